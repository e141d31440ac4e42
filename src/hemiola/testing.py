"""Conformance checks for policies, anybody's: one call in a test of your own.

    from hemiola.testing import check_order

    def test_my_order():
        check_order(MyOrder)                     # or check_order(lambda: MyOrder(by=3))

Each takes a class, or anything else that makes a fresh policy when called, and raises an `AssertionError` that says in
one line what is wrong. The built-in policies pass the same checks (tests/conformance).

What is checked: every member of the contract is there and takes its arguments; the decisions are possible ones (a
sequence is a permutation, a period and a K are whole numbers of at least 1); the same run gives the same numbers twice;
a run that is stopped at any of several updates and resumed from its saved state ends with the same bits; the state is
plain, and that of another kind or version is refused; the policy can be pickled in mid-run; it leaves Python's and
NumPy's global random generators alone; and it runs on the simulated cluster, in a group of torch.distributed, and, if
asked for, on Ray.
"""

from __future__ import annotations

import difflib
import io
import math
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hemiola.clusters.torch.group import Place, join, leave
from hemiola.contracts import Arrivals, Averaging, Order, Pace, Period, Policy, State, Visit
from hemiola.errors import InputError
from hemiola.gradients.sketch import parse_sketch
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import Task
from hemiola.lab.tasks.task import TensorExamples
from hemiola.own import checked_policy, checked_sequence, members
from hemiola.streams import stream, torch_stream
from hemiola.training import Training

__all__ = ["check_order", "check_pace", "check_period"]

EPOCHS = 3
BATCH = 2
ROWS = 41  # examples; shards differ in size, so that workers rest, and their last batches are short
STRAGGLING = {"name": "simulated", "delay": "shifted-exponential(1, 1)", "slow": {"0": 2.0}}
ODD = (math.nan, math.inf, 0.0)


def check_order(
    make: Callable[[], Order], *, workers: int = 3, clusters: Sequence[str] = ("simulated", "torch")
) -> None:
    """Check an order.

    Args:
        make: A class, or anything that makes a fresh order when called.
        workers: How many it is checked with.
        clusters: Which it is run on: ``"simulated"``, ``"torch"`` (a group of one, in this process), ``"ray"``.

    Raises:
        AssertionError: saying what is wrong.
    """
    with _leaves_random_generators_alone("order"):
        order = _fresh(make, Order, "order")
        _check_decisions(make, workers)
        _check_state(_begun(make, [5] * workers, True), "order")
    asynchronous = {"pace": {"name": "k-async", "k": max(1, workers - 1)}, "cluster": STRAGGLING}
    local = {"period": {"name": "constant", "p": 3}}
    _check_runs("order", make, order.unit, workers, [{}, local, asynchronous | local], clusters)


def check_period(
    make: Callable[[], Period], *, workers: int = 3, clusters: Sequence[str] = ("simulated", "torch")
) -> None:
    """Check a period; see `check_order` for the arguments."""
    with _leaves_random_generators_alone("period"):
        period = _fresh(make, Period, "period")
        _check_lengths(make)
        _check_state(period, "period")
    asynchronous = {"pace": {"name": "k-async", "k": max(1, workers - 1)}, "cluster": STRAGGLING}
    falling = {"optimizer": {"lr": 0.2, "schedule": {"name": "MultiStepLR", "milestones": [0.5]}}}
    if period.probes:  # all workers meet for a probe
        _check_runs("period", make, 1, workers, [{}, falling], [cluster for cluster in clusters if cluster != "ray"])
    elif period.clock is None:
        _check_runs("period", make, 1, workers, [{}, falling, asynchronous], clusters)
    else:  # by the clock nobody waits for anybody, so there is one pace, and only virtual time comes again bit for bit
        _check_runs(
            "period", make, 1, workers, [{}, falling], [cluster for cluster in clusters if cluster == "simulated"]
        )


def check_pace(make: Callable[[], Pace], *, workers: int = 3, clusters: Sequence[str] = ("simulated", "torch")) -> None:
    """Check a pace; see `check_order` for the arguments."""
    with _leaves_random_generators_alone("pace"):
        pace = _fresh(make, Pace, "pace")
        _check_counts(make, workers)
        pace.begin(workers)
        _check_state(pace, "pace")
    local = {"period": {"name": "constant", "p": 2}}
    _check_runs("pace", make, 1, workers, [{"cluster": STRAGGLING}, {"cluster": STRAGGLING} | local], clusters)


# ----------------------------------------------------------------------------------------------------------- contracts


def _fresh(make: Callable[[], Any], family: type, what: str) -> Any:
    made = make()
    try:
        policy = checked_policy(made, family, what)
    except InputError as error:
        raise AssertionError(str(error)) from None
    own = {name for part in type(policy).__mro__ if part not in family.__mro__ for name in vars(part)}
    for name in sorted(own - set(members(family))):
        close = difflib.get_close_matches(name, set(members(family)) - own, n=1, cutoff=0.8)
        if close and not name.startswith("_"):
            raise AssertionError(f"{what} {policy.kind!r}: nothing asks for {name!r}; did you mean {close[0]!r}?")
    return policy


def _check_state(policy: Any, what: str) -> None:
    state = policy.state_dict()
    _require(isinstance(state, dict), what, policy, f"state_dict must give a dict, got {type(state).__name__}")
    state = _saved_and_loaded(state, what, policy)
    policy.load_state_dict(state)
    for foreign, of in (
        ({**state, "kind": "another kind"}, "another kind"),
        ({**state, "version": -1}, "another version"),
        ({}, "nothing at all"),
    ):
        try:
            policy.load_state_dict(foreign)
        except ValueError:
            continue
        except Exception as error:
            raise AssertionError(
                f"{what} {policy.kind!r}: the state of {of} must be refused by an InputError, got {error!r}"
            ) from None
        raise AssertionError(
            f"{what} {policy.kind!r}: load_state_dict takes the state of {of}; hemiola.state.own_state refuses it"
        )


def _saved_and_loaded(state: State, what: str, policy: Policy) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return cast(State, torch.load(file, weights_only=True))
    except pickle.UnpicklingError as error:
        raise AssertionError(
            f"{what} {policy.kind!r}: its state must be plain numbers, strings, lists, dicts and tensors: "
            f"{str(error).splitlines()[0]}"
        ) from None


@contextmanager
def _leaves_random_generators_alone(what: str) -> Iterator[None]:
    before = _global_states()
    yield
    after = _global_states()
    for name, one, other in zip(("random", "numpy.random", "torch"), before, after, strict=True):
        if not _equal(one, other):
            raise AssertionError(
                f"the {what} draws from the global generator of {name}; use hemiola.streams.stream(name, seed, ...), "
                "which depends on its key only"
            )


def _global_states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002 - read, not used


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_equal(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray | torch.Tensor) else bool(one == other)


def _require(fine: bool, what: str, policy: Policy, said: str) -> None:
    if not fine:
        raise AssertionError(f"{what} {policy.kind!r}: {said}")


# ----------------------------------------------------------------------------------------------------------- decisions


def _check_decisions(make: Callable[[], Order], workers: int) -> None:
    """Every sequence is a permutation, asked for twice and by another object too, also after rows that are odd."""
    for lockstep in (True, False):
        sizes = [7 + worker % 2 for worker in range(workers)]
        first, second = _begun(make, sizes, lockstep), _begun(make, sizes, lockstep)
        for epoch in range(EPOCHS):
            orders = [_sequence(first, worker, epoch, size) for worker, size in enumerate(sizes)]
            for worker, size in enumerate(sizes):
                again, other = first.sequence(worker, epoch), _sequence(second, worker, epoch, size)
                same = np.array_equal(orders[worker], again) and np.array_equal(orders[worker], other)
                _require(same, "order", first, f"asked again, the sequence of worker {worker}, epoch {epoch} differs")
            for start in range(0, max(sizes), BATCH):
                visits = [
                    Visit(
                        worker,
                        epoch,
                        order[start : start + BATCH],
                        _rows(first, worker, epoch, start),
                        1,
                        _losses(first, worker, epoch, start),
                    )
                    for worker, order in enumerate(orders)
                    if len(order[start : start + BATCH]) == BATCH
                ]
                first.observe(visits)
                second.observe(visits)
            second = pickle.loads(pickle.dumps(second))


def _begun(make: Callable[[], Order], sizes: list[int], lockstep: bool) -> Order:
    order: Order = _fresh(make, Order, "order")
    order.begin(sizes, 3, lockstep)
    count = sum(sizes) * order.unit
    examples = np.split(stream("examples").permutation(count), np.cumsum(sizes)[:-1] * order.unit)
    order.meet(examples, count, stream("scores").standard_normal(count) if order.wants_scores else None)
    return order


def _sequence(order: Order, worker: int, epoch: int, size: int) -> np.ndarray:
    try:
        return checked_sequence(order, worker, epoch, size)
    except InputError as error:
        raise AssertionError(str(error)) from None


def _rows(order: Order, worker: int, epoch: int, start: int) -> torch.Tensor | None:
    if order.sketch is None or not order.wants(worker, epoch):
        return None
    parse_sketch(order.sketch)
    rows = torch.randn(BATCH, 8, generator=torch_stream("rows", worker, epoch, start))
    if (worker, start) == (0, 0):
        rows[0, 0] = math.nan
    return rows


def _losses(order: Order, worker: int, epoch: int, start: int) -> np.ndarray | None:
    if not order.wants_losses or not order.wants(worker, epoch):
        return None
    losses = stream("losses", worker, epoch, start).exponential(size=BATCH)
    losses[0] = ODD[start % 3] if worker == 0 else losses[0]
    return losses


def _check_lengths(make: Callable[[], Period]) -> None:
    """Periods stay whole numbers of at least 1, whatever averagings measure; a copy in mid-run goes on the same."""
    period: Period = _fresh(make, Period, "period")
    draws = stream("averagings", 0)
    for number in range(60):
        lr, progress = 0.1 * 0.9**number, number / 60
        length = period.length(lr, progress)
        _require(_whole(length), "period", period, f"length must be a whole number of at least 1, got {length!r}")
        spread, movement, loss = (float(x) for x in draws.exponential(size=3))
        if number % 7 == 3:
            spread, movement, loss = ODD[number % 3], ODD[(number + 1) % 3], ODD[(number + 2) % 3]
        copy = pickle.loads(pickle.dumps(period))
        seen = Averaging(4 * number, progress, lr, spread, movement, loss, length)
        period.averaged(seen)
        copy.averaged(seen)
        same = period.length(lr, progress) == copy.length(lr, progress)
        _require(same, "period", period, "its pickled copy goes on differently")


def _check_counts(make: Callable[[], Pace], workers: int) -> None:
    """K stays possible and is what ``fixed_k`` and ``lockstep`` promise; weights are numbers."""
    pace: Pace = _fresh(make, Pace, "pace")
    pace.begin(workers)
    draws = stream("arrivals", 0)
    seconds = 0.0
    for number in range(60):
        k = pace.k()
        _require(_whole(k), "pace", pace, f"k must be a whole number of at least 1, got {k!r}")
        _require(
            not pace.idles or k <= workers, "pace", pace, f"k must be at most the number of workers, {workers}, got {k}"
        )
        _require(
            pace.fixed_k is None or k == pace.fixed_k, "pace", pace, f"k is {k} where fixed_k promises {pace.fixed_k}"
        )
        _require(
            not pace.lockstep or (pace.idles and k == workers),
            "pace",
            pace,
            f"lockstep promises one report of every worker, and k is {k} of {workers}",
        )
        deadline = pace.deadline()
        fits = deadline is None or deadline >= 0
        _require(fits, "pace", pace, f"deadline must be None or a number of seconds of at least 0, got {deadline!r}")
        weight = pace.weight(number % 4, float(number % 3))
        _require(weight >= 0 and math.isfinite(weight), "pace", pace, f"weight must be at least 0, got {weight!r}")
        seconds += float(draws.exponential())
        delays = draws.exponential(size=k).tolist()
        losses = [math.nan if number % 9 == 4 else 2.0**-number for _ in range(k)]
        copy = pickle.loads(pickle.dumps(pace))
        seen = Arrivals(seconds, number / 60, [i % workers for i in range(k)], losses, delays, [], [0] * k)
        pace.updated(seen)
        copy.updated(seen)
        _require(pace.k() == copy.k(), "pace", pace, "its pickled copy goes on differently")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# ---------------------------------------------------------------------------------------------------------------- runs


def _check_runs(
    family: str,
    make: Callable[[], Any],
    unit: int,
    workers: int,
    rows: list[dict[str, Any]],
    clusters: Sequence[str],
) -> None:
    base = {
        "task": _task(ROWS * unit),
        "workers": workers,
        "batch": BATCH * unit,
        "stop": {"epochs": EPOCHS},
        "optimizer": {"lr": 0.2, "momentum": 0.5},
    }
    for cluster in clusters:
        if cluster == "simulated":
            for row in rows:
                _check_simulated(family, make, base | row)
        elif cluster == "torch":
            _check_torch(family, make, base)
        elif cluster == "ray":
            _check_real(family, make, base | {"cluster": "ray"})
        else:
            raise InputError(f"clusters must be among simulated, torch and ray, got {cluster!r}")


def _task(examples: int) -> Task:
    """Two classes of points, told apart by a small network."""
    draws = torch_stream("conformance")
    inputs = torch.randn(examples + 20, 6, generator=draws)
    targets = (inputs[:, 0] + 0.5 * inputs[:, 1] > 0).long()
    return Task(
        name="conformance",
        model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
        train=TensorExamples(inputs[:examples], targets[:examples], scores=inputs[:examples, 0].abs().numpy()),
        test=(inputs[examples:], targets[examples:]),
        lr=0.2,
        batch=BATCH,
    )


def _training(family: str, make: Callable[[], Any], given: dict[str, Any]) -> Training:
    period = given.get("period", "full")
    return Training(*Experiment({**given, "period": period, family: make()}).cells[0].plan(None))


def _check_simulated(family: str, make: Callable[[], Any], given: dict[str, Any]) -> None:
    whole = _finished(family, make, given)
    policy = _policy(whole, family)
    stops = sorted({max(1, whole.version // 3), max(1, whole.version - 2)})
    saved: dict[int, State] = {}

    def save(run: Training) -> bool:
        if run.version in stops:
            saved[run.version] = _saved_and_loaded(run.state_dict(), family, policy)
        return True

    again = _finished(family, make, given, save)
    _require(_same(whole, again), family, policy, "the same run gives other numbers the second time")
    for stop_at in stops:
        resumed = _training(family, make, given)
        resumed.load_state_dict(saved[stop_at])
        resumed.run()
        _require(
            _same(whole, resumed),
            family,
            policy,
            f"stopped after update {stop_at} of {whole.version} and resumed, it goes on differently; "
            "is everything that it remembers in its state?",
        )


def _finished(
    family: str,
    make: Callable[[], Any],
    given: dict[str, Any],
    after_update: Callable[[Training], bool] | None = None,
) -> Training:
    """A whole run, which must have visited every unit as often as its epochs say."""
    training = _training(family, make, given)
    try:
        status = training.run(after_update)
    finally:
        training.close()
    policy = _policy(training, family)
    _require(status == "done", family, policy, f"a small run did not end well: {status}")
    for worker, used in enumerate(training.ledger.counts["used"]):
        visits = used + training.ledger.counts["dropped"][worker] + training.ledger.counts["refused"][worker]
        even = int(visits.max() - visits.min()) <= (0 if training.lockstep else 1)
        _require(even, family, policy, f"worker {worker} visited some units more often than others")
    return training


def _check_torch(family: str, make: Callable[[], Any], base: dict[str, Any]) -> None:
    """In a group of one rank it does what it does with one simulated worker."""
    given = base | {"workers": 1}
    try:
        lockstep = Experiment({**given, family: make()}).cells[0].parts()[2].lockstep
    except InputError:  # not for one worker
        return
    if not lockstep or dist.is_initialized():
        return
    simulated = _finished(family, make, given)
    with tempfile.TemporaryDirectory(prefix="hemiola-") as folder:
        join(Place(0, 1, 0, 0), "gloo", 60.0, Path(folder) / "rendezvous")
        try:
            _check_real(family, make, given | {"cluster": {"name": "torch", "device": "cpu"}}, simulated)
        finally:
            leave()


def _check_real(family: str, make: Callable[[], Any], given: dict[str, Any], expected: Training | None = None) -> None:
    real = _finished(family, make, given)
    if expected is not None:
        near = torch.allclose(real.read(real.version), expected.read(expected.version), rtol=1e-4, atol=1e-5)
        _require(near, family, _policy(real, family), "it trains otherwise in torch.distributed than simulated")


def _policy(training: Training, family: str) -> Policy:
    plan = training.plan
    return {"order": plan.order, "period": plan.period, "pace": plan.pace}[family]


def _same(one: Training, other: Training) -> bool:
    records = [
        [{key: value for key, value in record.items() if key != "wall_seconds"} for record in training.records]
        for training in (one, other)
    ]
    return records[0] == records[1] and torch.equal(one.read(one.version), other.read(other.version))
