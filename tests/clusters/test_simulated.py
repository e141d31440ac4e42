"""The simulated cluster: who finishes when, by hand and by the timing-only mode; memory; the ways of computing."""

import numpy as np
import pytest
import torch

from hemiola.clusters.stints import StintRunner
from hemiola.contracts import Batch, Stint
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import Task, load_task
from hemiola.optimizers import Optimizer
from hemiola.pace import PACES
from hemiola.timing.delays import parse_delay
from hemiola.timing.simulate import simulate_timing
from hemiola.training import Training

DELAY = "shifted-exponential(1, 1)"


def training(**fields) -> Training:
    (cell,) = Experiment({"task": "digits-logistic", "batch": 4, "evaluate": {"every_updates": 10**6}, **fields}).cells
    return Training(*cell.plan(None))


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("slow", [{}, {"2": 4.0}], ids=["even", "slow"])
def test_the_clock_is_that_of_the_timing_only_mode(name, k, slow):
    """Two implementations, one written for gradients and one for speed, agree update by update."""
    run = training(
        workers=5,
        pace={"name": name, "k": k},
        stop={"updates": 150},
        cluster={"name": "simulated", "delay": DELAY, "slow": slow},
    )
    seen = []
    collect = run.cluster.collect

    def watched():
        update = collect()
        merged = [(r.stint.worker, r.stint.number, r.staleness) for r in update.reports]
        seen.append((update.seconds, merged, [(s.worker, s.number) for s in update.cancelled]))
        return update

    run.cluster.collect = watched
    run.run()
    pace = PACES[name](k=k)
    slow_factors = {int(worker): factor for worker, factor in slow.items()}
    timing = simulate_timing(pace, 5, parse_delay(DELAY), 150, seed=0, slow=slow_factors, log=True)
    assert len(timing.log) == len(seen) == 150
    for logged, (seconds, merged, cancelled) in zip(timing.log, seen, strict=True):
        assert logged.seconds == pytest.approx(seconds, rel=1e-12)
        assert logged.merged == merged
        assert sorted(logged.cancelled) == sorted(cancelled)


def test_a_timeline_by_hand():
    """Two workers, constant delays of 1 and 3 seconds, fully asynchronous: worker 0 reports three times as often."""
    run = training(
        workers=2,
        pace={"name": "k-async", "k": 1},
        stop={"updates": 8},
        cluster={"name": "simulated", "delay": "constant(1.0)", "slow": {"1": 3.0}},
    )
    seen = []
    run.run(
        lambda r: (
            seen.append((r.cluster.now, r.ledger.per_worker()[0]["used"], r.ledger.per_worker()[1]["used"])) or True
        )
    )
    # At 3 s both are done; worker 1's event is older, so it is counted first.
    assert seen == [(1, 4, 0), (2, 8, 0), (3, 8, 4), (3, 12, 4), (4, 16, 4), (5, 20, 4), (6, 20, 8), (6, 24, 8)]


def test_a_thousand_workers_need_no_thousand_copies():
    """Live versions of the weights stay few, whatever the number of workers."""
    inputs = torch.randn(2000, 8)
    big = Task(
        name="big",
        model=lambda: torch.nn.Linear(8, 5000),
        train=(inputs, torch.zeros(2000, dtype=torch.int64)),
        test=(inputs[:4], torch.zeros(4, dtype=torch.int64)),
    )
    (cell,) = Experiment({"task": "digits-logistic", "workers": 1000, "batch": 1, "stop": {"updates": 3}}).cells
    object.__setattr__(cell, "task", lambda data: big)
    run = Training(*cell.plan(None))
    held = []
    run.run(lambda r: held.append(sum(w.numel() for w in r.versions.values())) or True)
    assert max(held) == run.parameters  # one version: everybody reads the same
    state = run.cluster.state_dict()
    assert not state["runner"]["local"]


# ------------------------------------------------------------------------------------------- the ways of computing


def stints(runner: StintRunner, workers: int, steps: int, size: int) -> list[Stint]:
    draws = np.random.default_rng(0)
    return [
        Stint(
            worker,
            0,
            0,
            tuple(Batch(0, step * size, draws.permutation(50)[:size]) for step in range(steps)),
            (0.1,) * steps,
        )
        for worker in range(workers)
    ]


def runner(task: Task, workers: int = 4, momentum: float = 0.9, sketch: str | None = None) -> StintRunner:
    shards = list(np.arange(50 * workers).reshape(workers, 50))
    return StintRunner(task, shards, 1, sketch, Optimizer("SGD", 0.1, {"momentum": momentum}), seed=0)


def test_one_weighted_call_equals_one_call_per_worker():
    one = runner(load_task("digits-mlp"))
    work = stints(one, 4, 1, 6)
    factors = [0.1, 0.2, 0.3, 0.4]
    together, _ = one.gradient(one.initial, work, factors, [False] * 4)
    each, _ = one.gradients([one.initial] * 4, work, [False] * 4)
    torch.testing.assert_close(together, torch.tensor(factors) @ each, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_stacked_workers_equal_one_after_the_other(noise):
    task = load_task("digits-mlp", {"input_noise": noise})
    stacked, alone = runner(task), runner(task)
    alone._stacks = False
    work = stints(stacked, 4, 5, 6)
    wanted = [[False] * 5] * 4
    a, seen_a = stacked.changes([stacked.initial] * 4, work, wanted)
    b, seen_b = alone.changes([alone.initial] * 4, work, wanted)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert seen_a.losses == pytest.approx(seen_b.losses, rel=1e-5)


@pytest.mark.parametrize("sketch", ["exact", "fold:32"])
def test_sketches_of_stacked_workers_equal_those_of_one_after_the_other(sketch):
    task = load_task("digits-mlp")
    stacked, alone = runner(task, sketch=sketch), runner(task, sketch=sketch)
    alone._stacks = False
    work = stints(stacked, 4, 3, 1)
    wanted = [[True, True, False]] * 4
    _, seen_a = stacked.changes([stacked.initial] * 4, work, wanted)
    _, seen_b = alone.changes([alone.initial] * 4, work, wanted)
    for one, other in zip(seen_a.sketches, seen_b.sketches, strict=True):
        assert one[2] is None
        assert other[2] is None
        torch.testing.assert_close(one[0], other[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-5)


def test_batch_norm_sees_one_worker_at_a_time_and_its_statistics_are_averaged():
    task = load_task("digits-mlp")
    normed = Task(
        name="normed",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)),
        train=(task.train.inputs, task.train.targets),
        test=(task.test.inputs, task.test.targets),
    )
    one = runner(normed)
    work = stints(one, 2, 1, 10)
    change, _ = one.gradient(one.initial, work, [0.5, 0.5], [False] * 2)
    means = []
    for stint in work:
        model = normed.model()
        with torch.no_grad():
            for p, value in zip(model.parameters(), one.flat.module.parameters(), strict=True):
                p.copy_(value)
        model.train()
        model(normed.train.batch(one.reader.examples(stint.worker, stint.batches[0].units))[0])
        means.append(model[1].running_mean.clone())
    buffers = (one.initial + change)[one.flat.size :]
    torch.testing.assert_close(buffers[:8], torch.stack(means).mean(0), rtol=1e-4, atol=1e-6)
