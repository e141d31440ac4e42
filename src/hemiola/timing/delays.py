"""How long one local step takes at one worker: delay laws, and streams of draws from them.

A law is written as in an experiment file, ``"shifted-exponential(1, 1)"``, and parsed by `parse_delay`. `DelayStreams`
turns a law into draws that are a pure function of (seed, worker, number of the draw), so every policy, and the
simulation with and without gradients, sees common random numbers, and a resumed run needs to remember counts only.

A trace that says whose times they are is not one law: every worker draws from its own. Draws of the same number come
from the same place of everybody's times, so that what slowed several workers at once still does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import scipy  # its parts are imported when they are first used: scipy.stats takes a second

from hemiola.errors import InputError, unknown
from hemiola.pace.laws import Empirical, Exponential, Floats, Hyperexponential, Law
from hemiola.streams import stream
from hemiola.timing.traces import Trace, read_trace

SHORTEST, LONGEST = 1e-12, 1e12  # seconds; beyond them sums of times lose their digits
BLOCK = 512  # draws from one place of the generator: many enough to hide the move there, few enough for 10,000 workers


@dataclass(frozen=True)
class OwnTimes:
    """Measured times by worker, and how they are drawn from.

    Attributes:
        times: Of each worker, in the order they were measured.
        block: Times that follow each other stay together in blocks of this many; 0 for all of them, in order.
        source: Where they come from, for messages.
    """

    times: tuple[Floats, ...]
    block: int
    source: str

    def check(self, workers: int) -> None:
        """Refuse a run with more workers than there are times for."""
        if workers > len(self.times):
            raise InputError(
                f"the trace {self.source} has the times of {len(self.times)} workers, and the run has {workers}; "
                f"trace({self.source}, pooled) lets every worker draw from all of them"
            )

    def as_trace(self) -> Trace:
        """All times again, each with its worker."""
        owners = [worker for worker, times in enumerate(self.times) for _ in times]
        return Trace(tuple(float(time) for times in self.times for time in times), tuple(owners), source=self.source)

    def draws(self, worker: int, first: int, uniforms: Callable[[int], Floats]) -> Floats:
        """Draws ``first`` to ``first + BLOCK - 1`` of a worker; ``uniforms(b)`` are `BLOCK` numbers, the b-th ones."""
        mine, numbers = self.times[worker], np.arange(first, first + BLOCK)
        if not self.block:
            return np.asarray(mine[numbers % len(mine)])
        blocks, within = numbers // self.block, numbers % self.block
        chunks = {int(chunk): uniforms(int(chunk)) for chunk in np.unique(blocks // BLOCK)}
        starts = np.array([chunks[b // BLOCK][b % BLOCK] for b in blocks.tolist()])
        return np.asarray(mine[((starts * len(mine)).astype(np.intp) + within) % len(mine)])


@dataclass(frozen=True)
class Delay:
    """A law of the time of one local step.

    Attributes:
        name: Of the law, e.g. ``"exponential"``.
        arguments: Of the law; none for a trace.
        law: As in an experiment file; parses back to the same delay.
        mean: Expected seconds.
        scipy: The distribution: a frozen ``scipy.stats`` one, or one of `hemiola.pace.laws` with the same methods.
        draw: See `sample`.
        own: Where every worker has times of its own; then ``scipy`` and ``draw`` are of all of them together.
    """

    name: str
    arguments: tuple[float, ...]
    law: str
    mean: float
    scipy: Law
    draw: Callable[[np.random.Generator, int], Floats]
    own: OwnTimes | None = None

    def sample(self, generator: np.random.Generator, n: int) -> Floats:
        """Return n independent draws. The first m of n draws are the m draws that ``sample(generator, m)`` gives."""
        return self.draw(generator, n)


def parse_delay(text: str, base: Path | None = None) -> Delay:
    """Read a delay law such as ``"exponential(1.0)"``; ``base`` is the folder a trace's relative path starts from.

    Raises:
        InputError: The law is unknown or its arguments are impossible.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*\((.*)\)\s*", text, flags=re.DOTALL)
    if not match:
        raise InputError(f"a delay is written like 'exponential(1.0)', got {text!r}; known: {', '.join(_forms())}")
    name, inside = match.group(1), match.group(2).strip()
    if name == "trace":
        return _parse_trace(inside, base)
    if name not in _LAWS:
        raise InputError(unknown("delay law", name, [*_LAWS, "trace"]))
    names, build = _LAWS[name]
    given = [part.strip() for part in inside.split(",")] if inside else []
    if len(given) != len(names):
        raise InputError(f"{name} takes {len(names)} argument(s), {name}({', '.join(names)}), got {text.strip()!r}")
    values = {argument: _number(text, argument, part) for argument, part in zip(names, given, strict=True)}
    law, draw = build(**values)
    if not SHORTEST <= float(law.mean()) <= LONGEST:
        raise InputError(f"the mean of {text.strip()!r} must be between {SHORTEST:g} and {LONGEST:g} seconds")
    arguments = tuple(values.values())
    written = f"{name}({', '.join(repr(value) for value in arguments)})"
    return Delay(name, arguments, written, float(law.mean()), law, draw)


_TRACE_WAYS = r"\s*,\s*(pooled|in-order|blocks\s*=.*)$"


def _parse_trace(inside: str, base: Path | None) -> Delay:
    """Read ``trace(FILE)``, ``trace(FILE, pooled)``, ``trace(FILE, in-order)`` or ``trace(FILE, blocks=N)``."""
    found = re.search(_TRACE_WAYS, inside)
    way = found.group(1) if found else ""
    path = _resolve((inside[: found.start()] if found else inside).strip("'\""), base)
    block = 0 if way == "in-order" else 1
    if way.startswith("blocks"):
        size = way.partition("=")[2].strip()
        if not (size.isascii() and size.isdigit() and int(size) >= 1):
            raise InputError(f"blocks of trace({path}, {way}) must be a whole number of at least 1, got {size!r}")
        block = int(size)
    return trace_delay(read_trace(path), path, way, block)


def trace_delay(trace: Trace, path: Path, way: str, block: int) -> Delay:
    """Measured step times of a file.

    Where the file says whose they are, every worker draws from its own, unless the way is ``"pooled"``. Where it does
    not, all workers draw from all times, one by one.
    """
    law = f"trace({path}, {way})" if way else f"trace({path})"
    pooled = empirical_delay(trace.seconds, law)
    if way == "pooled" or (not way and trace.workers is None):
        return pooled
    if trace.workers is None:
        raise InputError(f"{law} needs to know whose times they are, and {path} has no column 'worker'")
    return replace(pooled, own=OwnTimes(tuple(trace.by_worker()), block, str(path)))


def empirical_delay(seconds: Iterable[float], law: str) -> Delay:
    """Measured step times that are already in memory, resampled with replacement."""
    values = np.asarray(list(seconds), dtype=np.float64)

    def draw(generator: np.random.Generator, n: int) -> Floats:
        return np.asarray(values[(generator.random(n) * len(values)).astype(np.intp)])

    empirical = Empirical(values)
    return Delay("trace", (), law, empirical.mean(), empirical, draw)


def _resolve(name: str, base: Path | None) -> Path:
    if not name:
        raise InputError("trace takes the name of a file, as in trace(steps.txt), got 'trace()'")
    path = Path(name).expanduser()
    return path if path.is_absolute() or base is None else base / path


# ------------------------------------------------------------------------------------------------------------- laws

Draw = Callable[[np.random.Generator, int], Floats]


def _constant(seconds: float) -> tuple[Law, Draw]:
    _above(0, "constant", seconds=seconds)
    return Empirical([seconds]), lambda generator, n: np.full(n, seconds)


def _exponential(mean: float) -> tuple[Law, Draw]:
    _above(0, "exponential", mean=mean)
    return Exponential(mean), lambda generator, n: generator.standard_exponential(n) * mean


def _shifted_exponential(shift: float, mean: float) -> tuple[Law, Draw]:
    if shift < 0:
        raise InputError(f"the shift of shifted-exponential must be at least 0, got {shift}")
    _above(0, "shifted-exponential", mean=mean)
    return Exponential(mean, shift), lambda generator, n: shift + generator.standard_exponential(n) * mean


def _pareto(alpha: float, mean: float) -> tuple[Law, Draw]:
    _above(1, "pareto", " (below that the law has no mean)", alpha=alpha)
    _above(0, "pareto", mean=mean)
    least = mean * (alpha - 1) / alpha
    law = scipy.stats.pareto(alpha, scale=least)
    return law, lambda generator, n: least * np.exp(generator.standard_exponential(n) / alpha)


def _lognormal(mean: float, cv: float) -> tuple[Law, Draw]:
    _above(0, "lognormal", mean=mean, cv=cv)
    sigma = math.sqrt(math.log1p(cv * cv))
    scale = mean * math.exp(-sigma * sigma / 2)
    law = scipy.stats.lognorm(s=sigma, scale=scale)
    return law, lambda generator, n: scale * np.exp(generator.standard_normal(n) * sigma)


def _hyperexponential(p: float, mean1: float, mean2: float) -> tuple[Law, Draw]:
    if not 0 <= p <= 1:
        raise InputError(f"the p of hyperexponential must be between 0 and 1, got {p}")
    _above(0, "hyperexponential", mean1=mean1, mean2=mean2)

    def draw(generator: np.random.Generator, n: int) -> Floats:
        # Two uniforms a draw, side by side: n draws of one kind and then n of the other would make the first draws
        # depend on how many were asked for.
        which, age = generator.random((n, 2)).T
        return np.asarray(-np.log1p(-age) * np.where(which < p, mean1, mean2))

    return Hyperexponential(p, mean1, mean2), draw


_LAWS: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Law, Draw]]]] = {
    "constant": (("seconds",), _constant),
    "exponential": (("mean",), _exponential),
    "shifted-exponential": (("shift", "mean"), _shifted_exponential),
    "pareto": (("alpha", "mean"), _pareto),
    "lognormal": (("mean", "cv"), _lognormal),
    "hyperexponential": (("p", "mean1", "mean2"), _hyperexponential),
}


def _forms() -> list[str]:
    return [f"{name}({', '.join(names)})" for name, (names, _) in _LAWS.items()] + [
        "trace(FILE)",
        "trace(FILE, pooled)",
        "trace(FILE, in-order)",
        "trace(FILE, blocks=N)",
    ]


def _number(text: str, argument: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise InputError(f"{argument} in {text.strip()!r} must be a number, got {part!r}") from None
    if not math.isfinite(value):
        raise InputError(f"{argument} in {text.strip()!r} must be finite, got {part!r}")
    return value


def _above(limit: float, law: str, why: str = "", **values: float) -> None:
    for name, value in values.items():
        if not value > limit:
            raise InputError(f"the {name} of {law} must be above {limit}{why}, got {value}")


# ---------------------------------------------------------------------------------------------------------- streams


class DelayStreams:
    """Draws for every worker; draw i of worker j depends on (seed, j, i) only.

    Nothing is drawn before it is asked for, and one block a worker is kept, so 10,000 workers cost nothing to create.

    Args:
        delay: The law of one local step.
        workers: How many workers there are.
        seed: The run's seed.
        slow: Factor on the times of some workers.
    """

    def __init__(self, delay: Delay, workers: int, seed: int, slow: Mapping[int, float] | None = None) -> None:
        self.delay = delay
        self.workers = workers
        self.seed = seed
        self.factors = np.ones(workers)
        for worker, factor in (slow or {}).items():
            if not 0 <= worker < workers:
                raise InputError(f"slow names worker {worker}, but the workers are numbered 0 to {workers - 1}")
            if not (math.isfinite(factor) and factor > 0):
                raise InputError(f"the slow factor of worker {worker} must be finite and above 0, got {factor}")
            self.factors[worker] = factor
        self.factors.flags.writeable = False  # draws that are held would not follow a change
        if delay.own is not None:
            delay.own.check(workers)
        self._held: dict[int, tuple[int, list[float]]] = {}
        # Philox is a function of (key, counter): the key says what the stream is for, and the upper words of the
        # counter say which block of it, so that going to a block costs a tenth of making a generator for it.
        self._generator = stream("delay", seed)
        self._state = self._generator.bit_generator.state

    def block(self, worker: int, block: int) -> Floats:
        """Draws ``block * BLOCK`` to ``(block + 1) * BLOCK - 1`` of a worker: the fast way through many draws."""
        if self.delay.own is not None:
            draws = self.delay.own.draws(worker, block * BLOCK, self._shared_uniforms)
        else:
            draws = self.delay.sample(self._at(block, worker), BLOCK)
        return np.asarray(draws * self.factors[worker])

    def _at(self, block: int, worker: int) -> np.random.Generator:
        """The generator, at the beginning of a worker's block."""
        self._state["state"]["counter"][:] = (0, 0, block, worker)
        self._generator.bit_generator.state = self._state
        return self._generator

    def _shared_uniforms(self, block: int) -> Floats:
        """`BLOCK` numbers in [0, 1), the same for every worker."""
        return self._at(block, 0).random(BLOCK)

    def seconds(self, worker: int, first: int, count: int = 1) -> float:
        """Sum of ``count`` draws from number ``first`` on: the compute time of a stint of that many local steps."""
        total = 0.0
        for number in range(first, first + count):
            block, offset = divmod(number, BLOCK)
            held = self._held.get(worker)
            if held is None or held[0] != block:
                held = self._held[worker] = (block, self.block(worker, block).tolist())
            total += held[1][offset]
        return total

    def matrix(self, first: int, count: int) -> Floats:
        """Draws ``first`` to ``first + count - 1`` of every worker: one row a worker."""
        blocks = range(first // BLOCK, (first + count - 1) // BLOCK + 1)
        out = np.empty((self.workers, len(blocks) * BLOCK))
        for worker in range(self.workers):
            for column, block in enumerate(blocks):
                out[worker, column * BLOCK : (column + 1) * BLOCK] = self.block(worker, block)
        skip = first - blocks.start * BLOCK
        return out[:, skip : skip + count]
