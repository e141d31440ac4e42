"""What virtual time charges for ordering, and that equal workers do equal work: timings computed by hand."""

import json
import logging
from collections import Counter

import numpy as np
import pytest
import torch

from hemiola.clusters.simulated import sketch_cost
from hemiola.clusters.simulated.clockwork import Clockwork
from hemiola.clusters.simulated.machines import Machines
from hemiola.clusters.simulated.sketch_cost import USUAL, USUAL_WHOLE, measured_factor
from hemiola.contracts import Batch, Stint
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import Task, load_task
from hemiola.pace import PACES
from hemiola.timing.delays import DelayStreams, parse_delay
from hemiola.timing.link import Link, gather_bytes
from hemiola.training import Training

# 1500 digits, 650 weights: a change has 2600 bytes; a unit folded to 10 numbers has 40, a batch of 50 units 2000.
FOLDED = {"name": "cd-grab", "sketch": "fold:10"}


def training(task: Task | None = None, **fields) -> Training:
    given = {"task": "digits-logistic", "workers": 2, "batch": 50, "evaluate": {"every_epochs": 1}, **fields}
    (cell,) = Experiment(given).cells
    if task is not None:
        object.__setattr__(cell, "task", lambda data: task)
    return Training(*cell.plan(None))


def cluster(bandwidth: str | None = None, **options) -> dict:
    link = {} if bandwidth is None else {"link": {"bandwidth": bandwidth}}
    return {"name": "simulated", "delay": "constant(1.0)", **link, **options}


def times(run: Training) -> list[float]:
    seen: list[float] = []
    run.run(lambda r: seen.append(r.cluster.now) or True)
    return seen


# ------------------------------------------------------------------------------------------------- bytes and seconds


def test_a_ring_all_gather_by_hand():
    # 4 workers, 1000 bytes from each: 3 messages of 8000 bits at 1 Mbit/s and 1 ms latency.
    assert Link(1e6, 1e-3).gather_seconds(1000, 4) == pytest.approx(3 * (0.001 + 0.008))
    assert gather_bytes(1000, 4) == 3000
    assert Link(1e6, 1e-3).gather_seconds(0, 4) == 0  # without sketches there is no exchange, and no latency either


@pytest.mark.parametrize(
    ("order", "step", "sent"),
    [
        ("rr", 1 + 2.08, 2600),  # a ring of two: 2 messages of 1300 bytes, 1.04 s each at 10 kbit/s
        (FOLDED, 1.5 + 2.08 + 1.6, 2600 + 2000),  # and one message of 2000 bytes
        (FOLDED | {"sketch": "fold:10:int8"}, 1.5 + 2.08 + 0.56, 2600 + 700),  # 14 bytes a unit
    ],
    ids=["random", "balanced", "balanced, int8"],
)
def test_where_all_wait_for_all_sketches_are_gathered_and_steps_take_longer(order, step, sent):
    run = training(order=order, stop={"epochs": 1}, cluster=cluster("10 kbit/s", sketch_cost=1.5))
    assert times(run) == pytest.approx([step * n for n in range(1, 16)])
    assert run.records[-1]["bytes_per_worker"] == 15 * sent


def test_every_worker_but_oneself_gets_the_sketches():
    run = training(order=FOLDED, workers=5, stop={"updates": 1}, cluster=cluster("10 kbit/s", sketch_cost=1))
    ring, gather = 8 * (0.8 * 2600 / 5) / 1000, 4 * 1.6
    assert times(run) == pytest.approx([1 + ring + gather])
    assert run.records[-1]["bytes_per_worker"] == pytest.approx(2 * 4 / 5 * 2600 + 4 * 2000)


def test_through_a_server_sketches_ride_on_the_report():
    """At 8 kbit/s 1000 bytes take a second: weights 2.6 s, a report with sketches 4.6 s, and a step 1.5 s.

    Weights reach worker 0 at 2.6 and worker 1 at 5.2; they are done at 4.1 and 6.7. Reports follow each other on the
    link: 8.7 and 13.3. Worker 0 has new weights at 11.3, is done at 12.8, and its report arrives at 17.9.
    """
    pace = {"name": "k-async", "k": 1}
    run = training(order=FOLDED, pace=pace, stop={"updates": 3}, cluster=cluster("8 kbit/s", sketch_cost=1.5))
    assert times(run) == pytest.approx([8.7, 13.3, 17.9])
    assert run.records[-1]["bytes_per_worker"] == 3 * (2600 + 2000) / 2


def test_reports_that_nobody_listens_to_carry_sketches_too():
    """Worker 1 takes three seconds and is late for two updates; the third has its report as well."""
    pace = {"name": "k-sync", "k": 1, "late": "ignore"}
    run = training(order=FOLDED, pace=pace, stop={"seconds": 4}, cluster=cluster(sketch_cost=1, slow={"1": 3.0}))
    run.run()
    reports = run.records[-1]["bytes_per_worker"] * 2 / (2600 + 2000)
    assert reports == run.version + 1


def test_an_epoch_that_is_not_balanced_costs_nothing():
    run = training(order=FOLDED | {"every": 2}, stop={"epochs": 2}, cluster=cluster(sketch_cost=3.0))
    assert times(run)[14::15] == pytest.approx([45, 60])


def test_a_stint_pays_for_its_sketched_steps_only():
    """Stints of 10: the second has 5 steps of an epoch that is balanced, at 2 s, and 5 of one that is not."""
    period = {"name": "constant", "p": 10}
    run = training(order=FOLDED | {"every": 2}, period=period, stop={"epochs": 2}, cluster=cluster(sketch_cost=2.0))
    assert times(run) == pytest.approx([20, 35, 45])


def test_sketches_are_hidden_behind_local_steps_as_changes_are():
    """Stints of 4 on a link that takes 2.08 s for the changes and 6.4 s for the sketches of 4 batches."""
    seconds = {}
    for overlap in (0, 4):
        period = {"name": "constant", "p": 4, "overlap": overlap}
        run = training(order=FOLDED, period=period, stop={"epochs": 1}, cluster=cluster("10 kbit/s", sketch_cost=1))
        run.run()
        seconds[overlap] = run.cluster.now
    whole, last = 2.08 + 4 * 1.6, 2.08 + 3 * 1.6  # 15 steps: stints of 4, 4, 4, 3
    assert seconds[0] == pytest.approx(15 + 3 * whole + last)
    # Until the average is there a worker takes the four (at the end three) steps that do not need it.
    assert seconds[4] == pytest.approx(4 + 3 * whole + last)


# ---------------------------------------------------------------------------------------------------- what is charged


@pytest.mark.parametrize(
    ("order", "batch", "factor"),
    [
        ({"name": "cd-grab", "sketch": "exact"}, 4, USUAL["exact"]),
        ({"name": "cd-grab", "sketch": "exact"}, 1, USUAL_WHOLE["exact"]),
        ({"name": "cd-grab", "unit": 4}, 4, USUAL_WHOLE["fold"]),
        ({"name": "cd-grab", "unit": 2}, 4, USUAL["fold"]),
        ("cd-grab", 4, USUAL["ghost"]),
        ("cd-grab", 1, USUAL["ghost"]),
    ],
)
def test_the_usual_factors(order, batch, factor):
    run = training(order=order, batch=batch, stop={"updates": 1}, cluster=cluster())
    assert times(run) == pytest.approx([factor])
    charged = run.records[-1]["charged"]
    assert (charged["step_factor"], charged["source"]) == (factor, "usual")


def test_factors_can_be_given_by_kind():
    costs = {"fold": 1.25}
    folded = training(order=FOLDED, stop={"updates": 1}, cluster=cluster(sketch_cost=costs))
    ghosts = training(order="cd-grab", stop={"updates": 1}, cluster=cluster(sketch_cost=costs))
    assert times(folded) == pytest.approx([1.25])
    assert times(ghosts) == pytest.approx([USUAL["ghost"]])
    assert folded.records[-1]["charged"] == {
        "sketch": "fold:10",
        "row_bytes": 40,
        "step_factor": 1.25,
        "source": "given",
    }


def test_a_random_order_is_charged_nothing_and_the_log_says_nothing():
    run = training(stop={"updates": 2}, cluster=cluster(sketch_cost=9.0))
    assert times(run) == [1, 2]
    assert "charged" not in run.records[-1]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (0.5, "cluster: sketch_cost must be at least 1 and finite, got 0.5"),
        (float("nan"), "cluster: sketch_cost must be at least 1 and finite, got nan"),
        ("measurd", "did you mean 'measured'?"),
        ({"fold": 0.0}, "cluster: sketch_cost.fold must be at least 1 and finite, got 0.0"),
        ({"ghosts": 2.0}, "sketch_cost.ghosts: unknown kind of sketch; did you mean 'ghost'?"),
    ],
)
def test_a_wrong_cost_is_one_line(cost, message):
    with pytest.raises(InputError) as caught:
        training(cluster=cluster(sketch_cost=cost))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- measuring


def test_a_factor_is_measured_once_and_rounded(tmp_path, monkeypatch):
    monkeypatch.setenv("HEMIOLA_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(sketch_cost, "measure", lambda *about: calls.append(about) or 1.3371)
    task = load_task("digits-logistic")
    assert [measured_factor(task, "fold:10", 1, 50) for _ in range(2)] == [1.35, 1.35]
    assert measured_factor(task, "fold:10", 1, 25) == 1.35
    assert len(calls) == 2  # another batch is another step
    (saved, _) = sorted(tmp_path.glob("sketch-costs/*.json"))
    assert json.loads(saved.read_text())["factor"] == 1.35
    run = training(order=FOLDED, stop={"updates": 1}, cluster=cluster(sketch_cost="measured"))
    assert times(run) == pytest.approx([1.35])
    assert run.records[-1]["charged"]["source"] == "measured"
    assert len(calls) == 2


@pytest.mark.parametrize(("ratio", "factor"), [(0.8, 1.0), (1.02, 1.0), (1.03, 1.05), (2.5, 2.5)])
def test_sketches_never_make_a_step_faster(ratio, factor, tmp_path, monkeypatch):
    monkeypatch.setenv("HEMIOLA_CACHE", str(tmp_path))
    monkeypatch.setattr(sketch_cost, "measure", lambda *about: ratio)
    assert measured_factor(load_task("digits-logistic"), "exact", 1, 4) == factor


def test_the_median_ratio_of_interleaved_steps():
    """A clock that counts the steps: plain ones take 1, sketched ones 3; one pair is spoilt by something else."""
    now = 0.0
    history: list[str] = []

    def step(name: str, seconds: float):
        def call() -> None:
            nonlocal now
            history.append(name)
            now += seconds + (1000 if len(history) == 12 else 0)

        return call

    assert sketch_cost._ratio(step("plain", 1), step("sketched", 3), lambda: now) == 3
    assert history[5:9] == ["plain", "sketched", "plain", "sketched"]


def test_a_real_task_can_be_measured(monkeypatch):
    monkeypatch.setattr(sketch_cost, "_PAIRS", 3)
    task = load_task("digits-logistic")
    threads = torch.get_num_threads()
    assert 0.5 < sketch_cost.measure(task, "ghost:4", 1, 8) < 50
    assert torch.get_num_threads() == threads


def test_a_resumed_run_keeps_the_factor_it_began_with():
    """Measured again it might be another one."""
    run = training(order=FOLDED, stop={"updates": 4}, cluster=cluster(sketch_cost=1.5))
    run.run(lambda r: r.version < 2)
    other = training(order=FOLDED, stop={"updates": 4}, cluster=cluster(sketch_cost=2.0))
    other.load_state_dict(run.state_dict())
    assert times(other) == pytest.approx([4.5, 6.0])


# ------------------------------------------------------------------------------------------------- the default sketch


def test_experiments_balance_on_the_samplers_cheap_sketches():
    for order, sketch in (("cd-grab", "ghost:4"), ({"name": "id-grab", "unit": 5}, "fold:1024")):
        run = training(order=order, stop={"updates": 1}, cluster=cluster())
        assert run.plan.order.sketch == sketch


class Scale(torch.nn.Module):
    """A model that is all bare parameters: ghosts see none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def test_where_ghosts_see_nothing_gradients_are_folded_and_it_is_said(caplog):
    digits = load_task("digits-logistic")
    bare = Task(
        name="bare",
        model=Scale,
        train=(digits.train.inputs, digits.train.targets),
        test=(digits.test.inputs, digits.test.targets),
    )
    with caplog.at_level(logging.WARNING, "hemiola"):
        run = training(bare, order="cd-grab", stop={"updates": 1}, cluster=cluster())
    assert "ghosts see no layer of the model of bare" in caplog.text
    assert times(run) == pytest.approx([USUAL["fold"]])


# ----------------------------------------------------------------------------------------------------------- fairness


class Endless:
    """Work of one unit after the other, without a model: only the clock is looked at."""

    def __init__(self, workers: int) -> None:
        self.given = [0] * workers

    def assign(self, worker: int) -> Stint:
        self.given[worker] += 1
        return Stint(worker, self.given[worker], 0, (Batch(0, 0, np.arange(1)),), (0.1,))

    def give_back(self, stint: Stint) -> None:
        pass

    def wants_sketches(self, stint: Stint) -> tuple[bool, ...]:
        return (False,)


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize(("delay", "margin"), [("constant(0.01)", 1), ("shifted-exponential(0.01, 0.01)", 75)])
@pytest.mark.parametrize("link", [Link(1e7, 1e-3), Link()], ids=["link", "no link"])
def test_equal_workers_do_equal_work(name, delay, margin, link):
    """Eight workers, K = 6, 1000 updates, so 750 reports each.

    Were weights sent by worker number, under k-async the first would be used 856 times and the last 637 times, and with
    constant delays some of them never. Without chance at play all are used equally; with random delays to within 75,
    more than five standard deviations of independent reports.
    """
    for seed in (0, 1):
        pace = PACES[name](k=6)
        pace.begin(8)
        clock = Clockwork(Endless(8), pace, Machines(DelayStreams(parse_delay(delay), 8, seed), link), 2600)
        used = Counter()
        for _ in range(1000):
            used.update(running.stint.worker for running, _ in clock.next_round().arrived)
            clock.race.version += 1
        assert max(used.values()) - 750 <= margin
        assert 750 - min(used[worker] for worker in range(8)) <= margin
