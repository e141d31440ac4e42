"""What each pace would do on a cluster with given delays: theory beside simulation, and conclusions in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from rich.table import Table

from hemiola.contracts import Pace
from hemiola.errors import InputError
from hemiola.pace import PACES
from hemiola.timing.delays import Delay, empirical_delay, parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.timing.theory import Ageing, Expectation, Variant, mean_staleness, new_against_used, update_time
from hemiola.timing.traces import Trace

COMPLETIONS = 20_000  # simulated per row
STINTS = 50  # per worker at least, so that the start of a run weighs little
MONTE_CARLO = 256  # up to this many workers, theory is simulated where it has no formula
ALL_K = 16  # up to this many workers every K is shown, then powers of two
NEARLY_UNIFORM = 1.15  # waiting for all is not worth avoiding below this factor of a mean step
NEARLY = 0.05  # rates that differ by less are as good as equal
VARIANTS: tuple[Variant, ...] = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


@dataclass(frozen=True)
class PredictedRow:
    """One variant at one K.

    Attributes:
        variant, k: Which.
        update_seconds: Expected time per update: theory where it is exact, else simulated.
        updates_per_second: Its inverse.
        reports_per_second: Reports merged, K times that; more where an update takes more than K.
        theory_seconds: Time per update by theory; None where there are only bounds.
        theory_low, theory_high: Bounds on it; None for no upper bound.
        theory_source: Which law, or Monte Carlo.
        simulated_seconds, simulated_error: Time per update in a timing-only run, and its standard error.
        deviation: Simulated over theory, minus 1.
        mean_staleness: By the counting identity; as simulated where that does not hold.
        simulated_staleness: In the timing-only run.
        fresh_fraction, idle_share, wasted_share: See `TimingResult`.
    """

    variant: Variant
    k: int
    update_seconds: float
    updates_per_second: float
    reports_per_second: float
    theory_seconds: float | None
    theory_low: float
    theory_high: float | None
    theory_source: str
    simulated_seconds: float
    simulated_error: float
    deviation: float | None
    mean_staleness: float
    simulated_staleness: float
    fresh_fraction: float
    idle_share: float
    wasted_share: float


@dataclass(frozen=True)
class Prediction:
    """A row for every variant and K, and what follows from them.

    Attributes:
        workers: How many there are.
        delay: The law of a step, as in an experiment file.
        mean_step_seconds: Of a worker that is not slow.
        slow: Factor on the times of some workers, given or found in a trace.
        exchange_seconds: Of one exchange; None where it is not known.
        ageing: See `new_against_used`.
        rows: One for every variant and K.
        conclusions: What follows, in words.
    """

    workers: int
    delay: str
    mean_step_seconds: float
    slow: dict[int, float]
    exchange_seconds: float | None
    ageing: Ageing
    rows: list[PredictedRow]
    conclusions: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``; numbers that are not finite, which JSON does not know, become None."""
        plain = {**asdict(self), "slow": {str(worker): factor for worker, factor in self.slow.items()}}
        plain["rows"] = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in plain["rows"]
        ]
        return plain

    def as_table(self, width: int | None = None) -> Table:
        """A table for a terminal of this width: the columns that fit, from the left; all without one."""
        table = Table(
            title=f"{self.workers} workers, {self.delay}; seconds per update by theory and by simulation",
            box=None,
            header_style="bold",
            padding=(0, 1, 0, 0),
        )
        names = ("pace", "K", "theory", "simulated", "off by", "upd./s", "stale", "fresh", "idle", "wasted")
        cells = [
            (
                row.variant,
                str(row.k),
                _theory_cell(row),
                f"{row.simulated_seconds:.4g}",
                "" if row.deviation is None else f"{row.deviation:+.1%}",
                f"{row.updates_per_second:.3g}",
                f"{row.mean_staleness:.2f}",
                f"{row.fresh_fraction:.0%}",
                f"{row.idle_share:.0%}",
                f"{row.wasted_share:.0%}",
            )
            for row in self.rows
        ]
        needed = accumulate(1 + max(map(len, column)) for column in zip(names, *cells, strict=True))
        fitting = len(names) if width is None else max(4, sum(end <= width for end in needed))
        for name in names[:fitting]:
            table.add_column(name, justify="left" if name == "pace" else "right", no_wrap=True)
        for before, row, line in zip([None, *self.rows], self.rows, cells, strict=False):
            if before and before.variant != row.variant:
                table.add_section()
            table.add_row(*line[:fitting])
        return table


def predict(
    workers: int,
    delay: str | Delay | Trace,
    k: int | None = None,
    slow: Mapping[int, float] | None = None,
    seed: int = 0,
    exchange: float | None = None,
    ring: bool = False,
    grace: float | None = None,
) -> Prediction:
    """Compare every variant.

    Args:
        workers: How many there are.
        delay: Law of the time of a step, as in an experiment file: ``"shifted-exponential(1, 1)"``; or parsed; or
            measured times. Those of a `Trace` that names workers are taken apart: workers that are slow throughout
            become ``slow``, and only what is left is chance.
        k: Only this K; by default all of them, or powers of two beyond 16 workers.
        slow: Factor on the times of some workers.
        seed: Of the simulation.
        exchange: Seconds of one exchange of gradients or weights; by default what the trace measured, if it did.
        ring: Whether updates take these seconds: reports travel by rings, behind the computation where the others keep
            going. Otherwise the time of exchanges is left out.
        grace: Of the paces that have it: updates stay open for more reports than K.

    Raises:
        InputError: An argument cannot be used.
    """
    _check(workers, k, exchange)
    slow = dict(slow or {})
    notes: list[str] = []
    if isinstance(delay, str):
        delay = parse_delay(delay)
    if isinstance(delay, Delay) and delay.own is not None:
        delay = delay.own.as_trace()
    if isinstance(delay, Trace):
        found, notes = _unequal_workers(delay, workers)
        slow = found | slow
        if exchange is None and delay.exchange_seconds:
            exchange = statistics.median(delay.exchange_seconds)
        delay = empirical_delay(delay.even(), f"trace({delay.source})")
    if ring and not exchange:
        raise InputError("a ring takes time, which is not known here: give exchange (--exchange SECONDS)")
    ks = [k] if k is not None else _ks(workers)
    cluster = _Cluster(workers, delay, slow, seed, exchange if ring and exchange else 0.0, grace)
    rows = [_row(variant, one, cluster) for variant in VARIANTS for one in ks]
    synchronous = next((row for row in rows if row.variant == "k-sync" and row.k == workers), None)
    synchronous = synchronous or _row("k-sync", workers, cluster)
    ageing = new_against_used(delay)
    conclusions = [*notes, *_conclusions(cluster, ageing, rows, synchronous, exchange)]
    return Prediction(workers, delay.law, delay.mean, slow, exchange, ageing, rows, conclusions)


def _check(workers: int, k: int | None, exchange: float | None) -> None:
    if workers < 2:
        raise InputError(f"workers must be at least 2 for a pace to matter, got {workers}")
    if k is not None and not 1 <= k <= workers:
        raise InputError(f"k must be between 1 and the number of workers, {workers}, got {k}")
    if exchange is not None and not (math.isfinite(exchange) and exchange >= 0):
        raise InputError(f"exchange must be a time in seconds, at least 0, got {exchange}")


def parse_slow(text: str) -> dict[int, float]:
    """Read slow workers as given on the command line: ``"3=5,4=2"`` for worker 3 five times, worker 4 twice as slow."""
    slow: dict[int, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        worker, _, factor = part.partition("=")
        try:
            slow[int(worker)] = float(factor)
        except ValueError:
            raise InputError(f"slow workers are written like '3=5,4=2', got {part!r}") from None
    return slow


def _ks(workers: int) -> list[int]:
    if workers <= ALL_K:
        return list(range(1, workers + 1))
    return [2**power for power in range(workers.bit_length()) if 2**power < workers] + [workers]


@dataclass(frozen=True)
class _Cluster:
    """What a row is about, beside its pace; the seconds of a ring are 0 where exchanges are left out."""

    workers: int
    delay: Delay
    slow: dict[int, float]
    seed: int
    ring: float
    grace: float | None


def _row(variant: Variant, k: int, cluster: _Cluster) -> PredictedRow:
    workers, delay, slow = cluster.workers, cluster.delay, cluster.slow
    updates = math.ceil(max(COMPLETIONS, STINTS * workers) / k)
    made = PACES[variant]
    pace = made(k=k, grace=cluster.grace) if made.idles else made(k=k)
    measured = simulate_timing(pace, workers, delay, updates, cluster.seed, slow, exchange=cluster.ring)
    theory = _theory(variant, k, pace, cluster)
    seconds = theory.value if theory.exact else measured.mean_update_seconds
    known = None if math.isnan(theory.value) else theory.value
    as_many = pace.fixed_k is not None and (not cluster.ring or pace.cancels or pace.lockstep)
    return PredictedRow(
        variant=variant,
        k=k,
        update_seconds=seconds,
        updates_per_second=1 / seconds,
        reports_per_second=(k if as_many else measured.mean_reports) / seconds,
        theory_seconds=known,
        theory_low=theory.low,
        theory_high=theory.high if math.isfinite(theory.high) else None,
        theory_source=theory.source,
        simulated_seconds=measured.mean_update_seconds,
        simulated_error=measured.standard_error,
        deviation=None if known is None else measured.mean_update_seconds / known - 1,
        mean_staleness=mean_staleness(variant, workers, k) if as_many else measured.mean_staleness,
        simulated_staleness=measured.mean_staleness,
        fresh_fraction=measured.fresh_fraction,
        idle_share=measured.idle_share,
        wasted_share=measured.wasted_share,
    )


def _theory(variant: Variant, k: int, pace: Pace, cluster: _Cluster) -> Expectation:
    """Time per update with what a grace and rings add to it: exact where everyone waits for the ring, else bounds."""
    workers, delay, slow, ring = cluster.workers, cluster.delay, cluster.slow, cluster.ring
    simulate = workers <= MONTE_CARLO
    plain = update_time(variant, delay, workers, k, slow, simulate)
    if pace.fixed_k is None:
        most = update_time(variant, delay, workers, workers, slow, simulate=False)
        plain = Expectation(math.nan, math.inf, plain.low, most.high, "between K and all")
    if ring and not (pace.cancels or pace.lockstep):
        least = update_time("k-batch-async", delay, workers, k, slow).value
        return Expectation(math.nan, math.inf, max(ring, least), math.inf, "a ring, and K E[X] / P")
    return replace(plain, value=plain.value + ring, low=plain.low + ring, high=plain.high + ring)


def _theory_cell(row: PredictedRow) -> str:
    if row.theory_seconds is not None:
        return f"{row.theory_seconds:.4g}"
    return f"{row.theory_low:.4g} to {'∞' if row.theory_high is None else format(row.theory_high, '.4g')}"


# ------------------------------------------------------------------------------------------------------ conclusions


def _unequal_workers(trace: Trace, workers: int) -> tuple[dict[int, float], list[str]]:
    """Which workers a trace shows to be slow (or quick) throughout, and what to say of it."""
    if trace.workers is None:
        return {}, [
            "The trace does not say which worker took which step: a worker that is always slow cannot be told from "
            "steps that straggle by chance, and every conclusion takes them for chance. If one is slow, leave its "
            "times out and give --slow."
        ]
    factors = trace.factors()
    named = len(set(trace.workers))
    if not factors and named > 1:
        return {}, [
            f"None of the {named} workers of the trace is shown to be slow throughout: what waiting costs is "
            "transient, steps that straggle by chance."
        ]
    notes = [
        f"Worker {worker} took {factor:.2f} times as long as the others throughout: it counts as a slow worker, not as "
        f"chance. Repair it or give it less to do before choosing a pace for its sake."
        if factor > 1
        else f"Worker {worker} took {factor:.2f} times as long as the others throughout: it counts as a quick worker."
        for worker, factor in factors.items()
    ]
    absent = sorted(worker for worker in factors if worker >= workers)
    if absent:
        notes.append(
            f"Worker {', '.join(map(str, absent))} of the trace is not among the {workers} workers asked about, which "
            "are numbered from 0."
        )
    return {worker: factor for worker, factor in factors.items() if worker < workers}, notes


def _conclusions(
    cluster: _Cluster,
    ageing: Ageing,
    rows: list[PredictedRow],
    synchronous: PredictedRow,
    exchange: float | None,
) -> list[str]:
    workers, delay, slow = cluster.workers, cluster.delay, cluster.slow
    factors = [slow.get(worker, 1.0) for worker in range(workers)]
    mean = delay.mean * statistics.fmean(factors)  # of all workers, the slow ones included
    lines = [
        f"Waiting for all {workers} workers, an update takes {synchronous.update_seconds:.3g} s, "
        f"{synchronous.update_seconds / mean:.2f} times a mean step; "
        f"{synchronous.idle_share:.0%} of all worker time is spent waiting."
    ]
    if slow:
        waiting = synchronous.update_seconds - cluster.ring
        lines.append(_persistent_and_transient(waiting, delay.mean * max(factors), mean))
    fresh, most = _best([row for row in rows if row.mean_staleness == 0]), _best(rows)
    gain = most.reports_per_second / synchronous.reports_per_second
    fresh_gain = fresh.reports_per_second / synchronous.reports_per_second
    uniform = gain < NEARLY_UNIFORM
    if uniform:
        lines.append(
            f"Stay synchronous: the delays are nearly uniform. The most any pace could gain is {gain - 1:.0%} more "
            f"reports per second, too little to pay for staleness."
        )
    else:
        lines += _ranking(workers, ageing, rows, bool(slow))
        if fresh_gain >= NEARLY_UNIFORM:
            lines.append(
                f"Without any staleness, {fresh.variant} with K = {fresh.k} merges {fresh_gain:.2f} times the "
                f"reports per second of synchronous training, with {fresh.wasted_share:.0%} of the work thrown away."
            )
        if most.mean_staleness > 0:
            lines.append(
                f"With staleness, {most.variant} merges {gain:.2f} times the reports per second of synchronous "
                f"training; K sets the price: mean staleness {most.mean_staleness:.2f} at K = {most.k}."
            )
    lines.append(_on_exchanges(synchronous.update_seconds - cluster.ring, exchange, uniform))
    if delay.name == "trace":
        lines.append("The delays are drawn from the trace: nothing slower than its slowest step is foreseen.")
    if slow:
        lines.append("The workers are unequal: cancelling and dropping then hit the data of the slow ones most.")
    return lines


def _persistent_and_transient(update: float, slowest: float, mean: float) -> str:
    """What waiting costs beyond a mean step, taken apart: one worker's fault, or chance."""
    persistent, transient = max(slowest - mean, 0.0), max(update - slowest, 0.0)
    share = persistent / max(persistent + transient, 1e-300)
    line = (
        f"Of what waiting costs beyond a mean step, {share:.0%} is persistent (the slowest worker is always slow) and "
        f"{1 - share:.0%} transient (steps that straggle by chance)"
    )
    if share > 0.5:
        return f"{line}: give the slow worker less to do; cancelling it only repeats its work."
    return f"{line}: not waiting for the last ones helps more than evening out the workers."


def _best(rows: list[PredictedRow]) -> PredictedRow:
    """The largest K that merges nearly the most reports per second: a larger K means less noise and less staleness."""
    most = max(row.reports_per_second for row in rows)
    near = [row for row in rows if row.reports_per_second >= (1 - NEARLY) * most]
    return max(near, key=lambda row: (row.k, row.reports_per_second))


def _on_exchanges(update: float, exchange: float | None, uniform: bool) -> str:
    """What averaging less often could gain: at most all of the exchange's time."""
    if exchange is None:
        return (
            "How long an exchange takes is not known here (--exchange SECONDS tells it); if it is long beside "
            f"{update:.3g} s, averaging less often may gain more than any pace."
        )
    share = exchange / (update + exchange)
    gain = f"An exchange takes {exchange:.3g} s, {share:.0%} of a synchronous update"
    if share >= NEARLY:
        return f"{gain}: averaging less often (a period) could gain up to that much."
    if uniform:
        return f"{gain}, and the steps are even: plain synchronous training is best here. Neither pace nor period pays."
    return f"{gain}: averaging less often would gain next to nothing."


def _ranking(workers: int, ageing: Ageing, rows: list[PredictedRow], unequal: bool) -> list[str]:
    """Whether cancelling beats waiting, from the computed times: never assumed from the law alone."""
    by_key = {(row.variant, row.k): row for row in rows}
    wins: list[tuple[PredictedRow, PredictedRow]] = []
    losses: list[tuple[PredictedRow, PredictedRow]] = []
    for row in rows:
        waiting = by_key.get(("k-async", row.k))
        if row.variant != "k-sync" or waiting is None:
            continue
        difference = row.simulated_seconds - waiting.simulated_seconds
        if abs(difference) > 3 * math.hypot(row.simulated_error, waiting.simulated_error):
            (wins if difference < 0 else losses).append((row, waiting))
    if wins:
        sync, waiting = min(wins, key=lambda pair: abs(pair[0].k - workers / 2))
        why = {
            "shorter": "these delays are not new-longer-than-used: a stint that has run for long has long to go",
            "longer": "these delays would favour waiting, were the workers equal",
        }.get(ageing, "these delays are not new-longer-than-used throughout")
        if unequal:
            why = "it leaves out the slow workers, and with them their data"
        return [
            f"Warning: cancelling beats waiting here ({why}). At K = {sync.k}, k-sync takes "
            f"{sync.update_seconds:.3g} s an update, k-async {waiting.update_seconds:.3g} s, and is stale besides."
        ]
    if losses:
        sync, waiting = min(losses, key=lambda pair: abs(pair[0].k - workers / 2))
        return [
            f"Letting the others keep going is faster than cancelling them: at K = {sync.k}, k-async takes "
            f"{waiting.update_seconds:.3g} s an update, k-sync {sync.update_seconds:.3g} s."
        ]
    return []
