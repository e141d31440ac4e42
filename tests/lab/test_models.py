"""A model comes out: of Python, of a folder, of the command line, on every cluster."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hemiola
from hemiola.errors import InputError
from hemiola.lab.cli import main
from hemiola.lab.tasks import load_task

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TINY = {"task": "tiny_task:make", "workers": 2, "batch": 4, "stop": {"epochs": 3}, "optimizer": {"lr": 0.3}}


@pytest.fixture(autouse=True)
def _beside_the_tests(monkeypatch):
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])


def accuracy(model: nn.Module) -> float:
    task = load_task("tiny_task:make", base=HERE)
    x, y = task.test.inputs, task.test.targets
    assert not model.training
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("period", ["full", {"name": "constant", "p": 3}], ids=["full", "local"])
def test_the_model_is_the_one_that_was_measured(period):
    """Trained, frozen, tied and averaged numbers all come back under their names."""
    for result in hemiola.train(**TINY, period=period, seeds=[0, 1]):
        model = result.model()
        assert accuracy(model) == pytest.approx(result.row["test_metric"])
        loss = nn.functional.cross_entropy(
            model(load_task("tiny_task:make").test.inputs), load_task("tiny_task:make").test.targets
        )
        assert loss.item() == pytest.approx(result.row["test_loss"], rel=1e-5)
        assert model.second.weight is model.first.weight
        assert same(result.weights(), model.state_dict())
        assert "norm.running_mean" in result.weights()


def test_a_folder_keeps_it(tmp_path):
    kept = hemiola.train(**TINY, out=tmp_path / "out")[0]
    alone = hemiola.train(**TINY)[0]
    (file,) = tmp_path.glob("out/cells/*/weights.pt")
    plain = torch.load(file, weights_only=True)
    assert same(plain, alone.weights())
    assert same(plain, kept.weights())
    assert same(plain, kept.model().state_dict())
    assert same(plain, hemiola.load_model(tmp_path / "out").state_dict())
    assert not list(tmp_path.glob("out/cells/*/checkpoint.pt"))


def test_the_best_weights_are_kept_where_that_is_asked_for():
    """At this rate the last evaluation is not the best one; a lower metric can be better, too."""
    task = {"task": "tiny_task:make", "workers": 2, "batch": 4, "stop": {"epochs": 12}, "optimizer": {"lr": 1.0}}
    last, best = (hemiola.train(**task, keep=keep)[0] for keep in ("last", "best"))
    assert last.row == best.row | {"wall_seconds": last.row["wall_seconds"]}
    metrics = [line["test_metric"] for line in best.log]
    assert max(metrics) > metrics[-1]
    assert accuracy(best.model()) == pytest.approx(max(metrics))
    assert accuracy(last.model()) == pytest.approx(metrics[-1])
    first = metrics.index(max(metrics))
    assert best.trained.kept == {"keep": "best", "updates": best.log[first]["updates"], "test_metric": max(metrics)}


def test_the_best_weights_survive_an_interruption(tmp_path):
    from hemiola.lab.experiment import Experiment
    from hemiola.training import Training

    given = {**TINY, "keep": "best", "stop": {"epochs": 12}, "optimizer": {"lr": 1.0}}
    whole, _ = (hemiola.train(**given)[0], None)
    (cell,) = Experiment(given).cells
    first = Training(*cell.plan(None))
    first.run(lambda training: training.version < 20)
    torch.save(first.state_dict(), tmp_path / "state")
    second = Training(*cell.plan(None))
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    second.run()
    assert second.kept.metric == whole.trained.kept["test_metric"]
    assert second.kept.version == whole.trained.kept["updates"]


def test_a_run_may_keep_what_another_does_not():
    with pytest.raises(InputError, match="keep: must be 'last' or 'best', got 'first'"):
        hemiola.train(**TINY, keep="first")
    results = hemiola.train(**TINY, run=[{"name": "a"}, {"name": "b", "keep": "best"}])
    assert [result.trained.kept["keep"] for result in results] == ["last", "best"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("swept") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(HERE)
        hemiola.train(
            **TINY,
            out=folder,
            seeds=[3, 4],
            sweep={"optimizer.lr": [1e-3, 0.3]},
            run=[{"name": "a [/b]"}, {"name": "diverges", "optimizer": {"momentum": 1e30}}],
        )
    return folder


def test_a_folder_gives_the_run_seed_and_point_that_are_meant(swept):
    losses = {}
    for at in ({"optimizer.lr": 1e-3}, {"optimizer.lr": 0.3}, None):
        for seed in (3, 4, None):
            model = hemiola.load_model(swept, "a [/b]", at=at, seed=seed)
            losses[str(at), seed] = tuple(model.out.weight.flatten().tolist())
    best, other = str({"optimizer.lr": 0.3}), str({"optimizer.lr": 1e-3})
    assert losses["None", 3] == losses["None", None] == losses[best, 3] == losses[best, None]
    assert len({losses[best, 3], losses[best, 4], losses[other, 3], losses[other, 4]}) == 4
    for arguments, said in (
        ({}, r"holds several runs; name one of a \[/b\], diverges"),
        ({"run": "b"}, "unknown run 'b'"),
        ({"run": "diverges", "seed": 0}, "no seed 0; there are 3, 4"),
        ({"run": "diverges", "at": {"lr": 1}}, "unknown key of the sweep 'lr'"),
        (
            {"run": "diverges", "at": {"optimizer.lr": 1}},
            "no such point of the sweep; there are optimizer.lr = 0.001, 0.3",
        ),
    ):
        with pytest.raises(InputError, match=said):
            hemiola.load_model(swept, **arguments)
    with pytest.raises(InputError, match="holds no experiment"):
        hemiola.load_model(swept / "elsewhere", "a")


def test_the_command_exports_a_plain_file(swept, capsys, tmp_path):
    def export(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["export", str(swept), *arguments])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    code, printed, errors = export("a [/b]", "--seed", "4", "--out", str(tmp_path / "a.pt"))
    assert code == 0, errors
    assert printed.splitlines() == [
        "model: 'a [/b]', seed 4, optimizer.lr = 0.3 (its best point): the last weights, after 9 updates",
        f"file:  {tmp_path / 'a.pt'}",
    ]
    assert same(
        torch.load(tmp_path / "a.pt", weights_only=True), hemiola.load_model(swept, "a [/b]", seed=4).state_dict()
    )
    code, printed, _ = export("diverges", "--at", "optimizer.lr=0.3", "--out", str(tmp_path / "b.pt"))
    assert "which diverged" in printed
    assert export("nobody")[0] == 2


def test_what_was_never_kept_says_so():
    with pytest.raises(InputError, match="run 'a', seed 0: its weights were not kept"):
        hemiola.Result({"run": "a", "seed": 0}, []).model()


@pytest.mark.real
@pytest.mark.parametrize("cluster", ["torch", "ray"])
def test_real_clusters_leave_the_model_of_the_simulated_one(cluster, tmp_path):
    """Also without a folder, where torch's ranks hand it over through one of their own."""
    here = hemiola.train(**TINY)[0]
    there = hemiola.train(**TINY, cluster=cluster)[0]
    kept = hemiola.train(**TINY, cluster=cluster, out=tmp_path / "out")[0]
    for result in (there, kept):
        assert accuracy(result.model()) == pytest.approx(result.row["test_metric"])
        for name, value in here.weights().items():
            torch.testing.assert_close(result.weights()[name], value)
    assert same(torch.load(*tmp_path.glob("out/cells/*/weights.pt"), weights_only=True), kept.weights())
