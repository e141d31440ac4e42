"""Numbers arrive in TensorBoard, Weights & Biases and MLflow as their own readers read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler

import hemiola
from hemiola.adapters import loggers
from hemiola.extras import MissingExtraError

Told = list[tuple[dict[str, float], int]]


def train(sampler: hemiola.OrderedSampler, averager: hemiola.Averager, epochs: int) -> None:
    model, optimizer = averager.model, averager.optimizer
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    with sampler.watch(model), averager:
        for _ in range(epochs):
            for batch in BatchSampler(sampler, 4, drop_last=False):
                optimizer.zero_grad()
                model(x[batch]).square().mean().backward()
                optimizer.step()


def parts() -> tuple[hemiola.OrderedSampler, hemiola.Averager]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hemiola.OrderedSampler(range(12)), hemiola.Averager(model, optimizer, period=hemiola.Constant(p=2))


def test_a_plain_function_is_told_every_epoch_and_every_averaging_once() -> None:
    sampler, averager = parts()
    order: Told = []
    period: Told = []
    sampler.log_to(lambda numbers, step: order.append((numbers, step)))
    averager.log_to(lambda numbers, step: period.append((numbers, step)))
    train(sampler, averager, epochs=2)
    assert [step for _, step in order] == [0, 1]
    assert all(numbers["order/trained_on"] == numbers["order/learnt_from"] == 12 for numbers, _ in order)
    assert order[1][0]["order/herding"] > 0
    assert [step for _, step in period] == [record.step for record in averager.history] == [2, 4, 6]
    assert [numbers["period/local_steps"] for numbers, _ in period] == [2, 2, 2]
    assert "period/c2" not in period[0][0]  # a constant period has none


def test_what_cannot_log_and_what_logs_already_are_refused() -> None:
    sampler, averager = parts()
    with pytest.raises(hemiola.InputError, match="takes a function of numbers and a step, got str"):
        sampler.log_to("tensorboard")  # type: ignore[arg-type]
    averager.log_to(print)
    with pytest.raises(hemiola.InputError, match="told already"):
        averager.log_to(print)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sampler, averager = parts()
    with loggers.tensorboard(tmp_path) as log:
        sampler.log_to(log)
        averager.log_to(log)
        train(sampler, averager, epochs=2)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("period/local_steps")] == [(2, 2.0), (4, 2.0), (6, 2.0)]
    assert [each.step for each in events.Scalars("order/trained_on")] == [0, 1]


def test_finished_runs_are_logged_by_run_and_seed() -> None:
    results = hemiola.train(task="digits-logistic", workers=2, stop={"updates": 4}, seeds=[3])
    told: Told = []
    loggers.log_results(results, lambda numbers, step: told.append((numbers, step)))
    (result,) = results
    assert [step for _, step in told] == [line["updates"] for line in result.log]
    run = result.row["run"]
    assert told[-1][0][f"{run}/3/train_loss"] == result.row["train_loss"]
    assert f"{run}/3/seed" not in told[-1][0]


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with loggers.tensorboard(tmp_path) as log:
        log({"order/herding": 1.0}, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"hemiola\.loggers\.{name} needs {name}.*hemiola\[{name}\]"):
        getattr(loggers, name)()


# The next two run where the packages are installed; they are not part of the dev extra, which they would double.


@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with loggers.wandb(project="mine", mode="offline", dir=str(tmp_path)) as log:
        run = package.run
        log({"order/herding": 2.0}, 0)
        log({"order/herding": 1.5, "period/spread": 0.25}, 1)
        assert run.summary["order/herding"] == 1.5
        assert run.summary["period/at"] == 1
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("mlflow")
    with loggers.mlflow(tmp_path, experiment="mine", run="first") as log:
        log({"order/herding": 2.0}, 0)
        log({"order/herding": 1.5}, 1)
    client = package.MlflowClient(tracking_uri=tmp_path.as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "order/herding")
    assert [(each.step, each.value) for each in history] == [(0, 2.0), (1, 1.5)]
    assert json.loads(json.dumps(found.data.metrics)) == {"order/herding": 1.5}
