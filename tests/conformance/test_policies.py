"""What every policy must pass, alone (as anybody's must: hemiola.testing) and together. Adding a policy adds a row."""

import io

import pytest
import torch

import hemiola
from hemiola.clusters.ray.engine import Engine
from hemiola.lab.experiment import Experiment
from hemiola.order import ORDERS
from hemiola.pace import PACES
from hemiola.period import PERIODS
from hemiola.testing import check_order, check_pace, check_period
from hemiola.training import Training

# ------------------------------------------------------------------------------------------------------------- alone

ORDER_ROWS = [
    *((name, {}) for name in ORDERS),
    *(("cd-grab", {"sketch": sketch}) for sketch in ("ghost:2", "fold:64", "exact")),
    ("cd-grab", {"unit": 3, "signs": "probabilistic"}),
    *(("id-grab", option) for option in ({"every": 2}, {"every": "auto"}, {"reverse": True})),
    ("scored", {"by": "score", "shape": "saw", "unit": 2}),
]
PERIOD_OPTIONS = {"constant": {"p": 3}, "decreasing": {"start": 4, "end": 1}, "post-local": {"switch": 0.5, "p": 3}}
PERIOD_ROWS = [
    *((name, PERIOD_OPTIONS.get(name, {})) for name in PERIODS),
    ("adaptive", {"guard": False, "growth": "factor"}),
]
PACE_ROWS = [
    *((name, {"k": k}) for name in PACES for k in (2, 4)),
    *((name, {"k": "adasync", "start": 2}) for name in PACES),
    ("k-async", {"k": [[0.0, 1], [0.5, 3]]}),
    ("k-batch-sync", {"k": 2, "late": "ignore"}),
    *((name, {"k": 2, "late": "cut"}) for name in ("k-sync", "k-batch-sync")),
    *((name, {"k": 2, "grace": 2.0}) for name in ("k-sync", "k-async")),
    ("k-sync", {"k": 1, "grace": 1.0, "late": "cut"}),
    ("k-batch-async", {"k": 1, "max_staleness": 3, "stale_rate": "distance"}),
]


def row_name(value):
    return value if isinstance(value, str) else "-".join(str(part) for part in value.values()) or "default"


@pytest.mark.parametrize(("name", "options"), ORDER_ROWS, ids=row_name)
def test_every_order_conforms(name, options):
    check_order(lambda: ORDERS[name](**options), workers=1 if name == "grab" else 3)


@pytest.mark.parametrize(("name", "options"), PERIOD_ROWS, ids=row_name)
def test_every_period_conforms(name, options):
    check_period(lambda: PERIODS[name](**options))


@pytest.mark.parametrize(("name", "options"), PACE_ROWS, ids=row_name)
def test_every_pace_conforms(name, options):
    check_pace(lambda: PACES[name](**options), workers=4)


@pytest.mark.real
@pytest.mark.timeout(600)
def test_policies_of_ones_own_conform_on_ray():
    pytest.importorskip("ray")
    engine = Engine(None, 2)  # both find it running: to start Ray is most of the time they would take
    try:
        check_order(hemiola.CDGraB, workers=2, clusters=["ray"])
        check_order(hemiola.Scored, workers=2, clusters=["ray"])
    finally:
        engine.close()


# ---------------------------------------------------------------------------------------------------------- together

DELAY = {"name": "simulated", "delay": "shifted-exponential(1, 1)", "slow": {"0": 2.0}}
LINK = {"bandwidth": "50 kbit/s", "latency": "1 ms"}
BASE = {
    "task": "digits-logistic",
    "workers": 5,
    "batch": 20,
    "stop": {"epochs": 3},
    "optimizer": {"lr": 0.1, "momentum": 0.5},
    "cluster": DELAY,
}
TOGETHER = [
    {
        "order": {"name": order, "sketch": "fold:32", "unit": 4},
        "period": {"name": "adaptive", "wire": wire},
        "pace": {"name": pace, "k": 3},
    }
    for order, wire, pace in zip(
        ("id-grab", "id-pair-grab", "cd-grab", "cd-grab"), ("fp32", "bf16", "int8", "int4"), PACES, strict=True
    )
]
OVERLAPPING = [
    {"period": {"name": "constant", "p": 4, "overlap": overlap}, "cluster": DELAY | {"link": LINK}}
    for overlap in (2, "auto")
]
DEALT = [
    {
        "order": {"name": "cd-grab", "sketch": "fold:32", "unit": 4},
        **policies,
        "shards": {"deal": "deck"},
        "cluster": DELAY | {"link": LINK},
    }
    for policies in (
        {"period": {"name": "clocked", "wire": "int8"}},
        {"pace": {"name": "k-batch-async", "k": 5}},
    )
]
ROWS = [BASE | row for row in TOGETHER + OVERLAPPING + DEALT]


def name_of(row: dict) -> str:
    parts = [row.get(family) for family in ("order", "period", "pace")]
    return "+".join("-".join(str(v) for v in part.values()) for part in parts if part)


def training(row: dict) -> Training:
    (cell,) = Experiment(row).cells
    return Training(*cell.plan(None))


def without_wall_time(records: list[dict]) -> list[dict]:
    return [{key: value for key, value in record.items() if key != "wall_seconds"} for record in records]


def saved_and_loaded(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture(scope="module")
def whole_runs() -> dict[str, Training]:
    return {}


def whole_run(row: dict, known: dict[str, Training]) -> Training:
    if name_of(row) not in known:
        known[name_of(row)] = training(row)
        assert known[name_of(row)].run() == "done"
    return known[name_of(row)]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_together_they_learn_and_no_unit_is_lost_or_doubled(row, whole_runs):
    run = whole_run(row, whole_runs)
    assert run.records[-1]["train_loss"] < 0.8 * run.records[0]["train_loss"]
    for worker, counts in enumerate(run.ledger.counts["used"]):
        visits = counts + run.ledger.counts["dropped"][worker] + run.ledger.counts["refused"][worker]
        # A worker may be in mid-epoch when the run ends, and has stints under way; no unit is further ahead than that.
        # From a deck, one worker may hold the last batch of an epoch while the others are well into the next.
        assert visits.max() - visits.min() <= (0 if run.lockstep else 2 if run.plan.deck else 1)
        if run.lockstep:
            assert (visits == 3).all()


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_stopped_and_resumed_together_they_end_the_same(row, whole_runs):
    whole = whole_run(row, whole_runs)
    first = training(row)
    stop_at = max(whole.version // 2, 1)
    first.run(lambda run: run.version < stop_at)
    second = training(row)
    second.load_state_dict(saved_and_loaded(first.state_dict()))
    assert second.run() == "done"
    assert torch.equal(second.read(second.version), whole.read(whole.version))
    assert without_wall_time(second.records) == without_wall_time(whole.records)


@pytest.mark.parametrize("name", [*ORDERS, *PERIODS])
def test_alone_they_learn(name):
    family = "order" if name in ORDERS else "period"
    run = training(
        BASE | {"workers": 1 if name == "grab" else 5, family: {"name": name, **PERIOD_OPTIONS.get(name, {})}}
    )
    assert run.run() == "done"
    assert run.records[-1]["train_loss"] < 0.8 * run.records[0]["train_loss"]
