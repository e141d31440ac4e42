"""Policies, tasks and clusters of one's own: by path in a file, in --set, and as objects from Python."""

import json
from pathlib import Path

import pytest
from torch import nn

import hemiola
from hemiola.clusters.simulated.factory import SimulatedFactory
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment, parse_change

OWN = """
import numpy as np

import hemiola
from hemiola.clusters.simulated.factory import SimulatedFactory


class Rotated(hemiola.Order):
    def __init__(self, *, by: int = 1):
        self.by = by

    def sequence(self, worker, epoch):
        return np.roll(np.arange(self.sizes[worker]), self.by * epoch)


class Doubling(hemiola.Period):
    saved = ("p",)

    def __init__(self, *, most: int = 4):
        self.p, self.most = 1, most

    def length(self, lr, progress):
        return self.p

    def averaged(self, seen):
        self.p = min(2 * self.p, self.most)


class Half(hemiola.Pace):
    def k(self):
        return max(1, self.workers // 2)

    @property
    def fixed_k(self):
        return self.k()


class Loud(SimulatedFactory):
    def __call__(self, plan, work):
        print("made by Loud")
        return super().__call__(plan, work)


class Incomplete(hemiola.Order):
    pass


class Twice(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.zeros(self.sizes[worker], dtype=int)


class Refuses(Rotated):
    def __init__(self):
        raise RuntimeError("not today")


number = 3
"""

BASE = {
    "task": "digits-logistic",
    "workers": 4,
    "batch": 25,
    "stop": {"epochs": 1},
    "optimizer": {"lr": 0.1},
}


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    """A module beside the experiment file, under a name that no other test uses."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def load(tmp_path: Path, text: str, *changes: str) -> Experiment:
    path = tmp_path / "experiment.toml"
    path.write_text('task = "digits-logistic"\nworkers = 4\nbatch = 25\nstop = { epochs = 1 }\n' + text)
    return Experiment.load(path, dict(parse_change(change) for change in changes))


def test_a_path_stands_for_a_name_and_its_options_stand_in_the_same_table(tmp_path, own, capsys):
    experiment = load(
        tmp_path,
        f'order = {{ name = "{own}:Rotated", by = 3 }}\nperiod = {{ name = "{own}:Doubling", most = 2, wire = "bf16" }}'
        f'\npace = "{own}:Half"\ncluster = {{ name = "{own}:Loud", delay = "exponential(1)" }}\n',
    )
    order, period, pace, exchange, factory = experiment.cells[0].parts()
    assert (type(order).__name__, order.by, period.most, exchange.wire, pace.k()) == ("Rotated", 3, 2, "bf16", 2)
    assert isinstance(factory, SimulatedFactory)
    out = hemiola.train(**experiment.given)
    assert out[0].row["status"] == "done"
    assert out[0].row["mean_staleness"] > 0
    assert "made by Loud" in capsys.readouterr().out


def test_set_takes_a_path(tmp_path, own):
    experiment = load(tmp_path, "", f"order={own}:Rotated", "order.by=5", f"period={own}:Doubling")
    order, period, *_ = experiment.cells[0].parts()
    assert (order.by, period.most) == (5, 4)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ('"absent_module_x:Name"', "order 'absent_module_x:Name': cannot import 'absent_module_x' from"),
        ('"{own}:Rotatet"', "unknown name 'Rotatet'; did you mean 'Rotated'? Known: "),
        ('"{own}:number"', "'number' must be a class or a function, got int"),
        ('"{own}:"', "must be written 'package.module:name'"),
        ('"{own}:Incomplete"', "Incomplete lacks sequence(self, worker: int, epoch: int) -> np.ndarray"),
        ('"{own}:Refuses"', "raised RuntimeError: not today ("),
        ('"{own}:Half"', "Half lacks sketch: str | None; subclass hemiola.Order"),
        ('{{ name = "{own}:Rotated", bye = 1 }}', "order: unknown option 'bye'; did you mean 'by'? Known: by"),
        ('{{ name = "{own}:Rotated", by = "one" }}', "order.by: must be a valid integer, got 'one'"),
        ("3", "order: must be a name, a path 'package.module:Name', or a table with a name and options, got 3"),
        ("{{ unit = 3 }}", "order: a table needs a name, as in { name = 'cd-grab' }"),
        ("{{ name = 3 }}", "order: must be a name, a path 'package.module:Name' or an object, got 3"),
    ],
)
def test_a_mistake_is_one_clear_line(tmp_path, own, order, said):
    with pytest.raises(InputError) as caught:
        load(tmp_path, f"order = {order.format(own=own)}\n")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sequence_that_is_no_permutation_ends_the_run_in_one_line(tmp_path, own):
    with pytest.raises(
        InputError, match="order 'Twice', worker 0, epoch 0: sequence must visit each of 375 units once"
    ):
        hemiola.train(**BASE, order=f"{own}:Twice")


# ------------------------------------------------------------------------------------------------------------- objects


class Reversed(hemiola.Order):
    def sequence(self, worker, epoch):
        import numpy as np

        return np.arange(self.sizes[worker])[::-1]


class Locked(Reversed):
    """An order that can be neither copied nor pickled."""

    def __init__(self):
        import threading

        self.lock = threading.Lock()


def small_task() -> hemiola.Task:
    reference = hemiola.load_task("digits-logistic")
    return hemiola.Task(
        name="small", train=reference.train, test=reference.test, model=lambda: nn.Linear(64, 10), lr=0.1, batch=25
    )


def without_time(results):
    return [{key: value for key, value in result.row.items() if key != "wall_seconds"} for result in results]


def test_objects_do_what_their_names_do():
    named = hemiola.train(
        **BASE,
        seeds=[0, 1],
        order={"name": "cd-grab", "sketch": "fold:32"},
        period={"name": "constant", "p": 2, "wire": "int8"},
        pace={"name": "k-async", "k": 2},
        cluster={"name": "simulated", "delay": "exponential(1)"},
    )
    order, period = hemiola.CDGraB(sketch="fold:32"), hemiola.Constant(p=2)
    objects = hemiola.train(
        **BASE,
        seeds=[0, 1],
        order=order,
        period={"name": period, "wire": "int8"},
        pace=hemiola.KAsync(k=2),
        cluster=SimulatedFactory(Path(), 4, delay="exponential(1)"),
    )
    assert without_time(objects) == without_time(named)
    assert not hasattr(order, "_sizes")  # every run has had a copy


def test_a_task_and_a_function_that_makes_a_cluster_are_objects_too():
    made = []

    def make(plan, work):
        made.append(plan)
        return SimulatedFactory(Path(), 4)(plan, work)

    results = hemiola.train(**{**BASE, "task": small_task()}, order=Reversed(), cluster=make)
    assert results[0].row["status"] == "done"
    assert len(made) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"order": Reversed}, "order: Reversed is a class, and an object is meant; make one, as in Reversed()"),
        ({"task": hemiola.Task}, "task: Task is a class, and an object is meant"),
        ({"cluster": SimulatedFactory}, "cluster: SimulatedFactory is a class, and an object is meant"),
        ({"cluster": object()}, "cluster: object lacks __call__(self, plan: Plan, work: Work) -> Cluster"),
        ({"order": hemiola.KAsync(k=2)}, "order: KAsync lacks sketch: str | None; subclass hemiola.Order"),
        ({"task": Reversed()}, "task must be a hemiola.Task, got Reversed"),
        ({"order": {"name": Reversed(), "unit": 2}}, "order: an object has its options already, got unit beside it"),
        ({"period": {"name": hemiola.Constant(p=2), "p": 3}}, "period: unknown option 'p'. Known: wire"),
        ({"sweep": {"order": [Reversed()]}}, "sweep.order: objects cannot be swept; make a run of each"),
        ({"order": Locked(), "seeds": [0, 1]}, "order: Locked cannot be copied"),
    ],
)
def test_an_object_that_cannot_be_used_is_one_clear_line(fields, said):
    with pytest.raises(InputError) as caught:
        hemiola.train(**{**BASE, **fields})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_object_that_cannot_be_copied_serves_one_run():
    (result,) = hemiola.train(**BASE, order=Locked())
    assert result.row["status"] == "done"


def test_objects_are_written_down_as_what_they_are():
    experiment = Experiment(
        {**BASE, "order": hemiola.CDGraB(unit=5), "period": {"name": hemiola.Constant(p=2), "wire": "int8"}}
    )
    for written in (experiment.given, experiment.resolved()["run"][0]):
        assert json.loads(json.dumps(written)) == written
        assert written["order"]["name"] == f"{hemiola.CDGraB.__module__}:CDGraB"
        assert written["order"]["live"]["unit"] == 5
        name = f"{hemiola.Constant.__module__}:Constant"
        assert written["period"] == {"name": name, "wire": "int8", "live": {"p": 2}}
    with pytest.raises(
        InputError, match=r"order: this run was started from Python with an object of .*; go on from there"
    ):
        Experiment(experiment.given)


def test_what_cannot_be_pickled_says_so_and_runs_in_this_process(tmp_path):
    class Local(hemiola.InOrder):
        pass

    elsewhere = hemiola.train(**BASE, order=hemiola.InOrder(), out=tmp_path / "elsewhere", jobs=1)
    with pytest.warns(UserWarning, match=r"order: Local cannot be pickled .*; runs that need it are trained in this"):
        here = hemiola.train(**BASE, order=Local(), out=tmp_path / "here")
    assert without_time(here) == without_time(elsewhere)
    again = hemiola.train(**BASE, order=Local(), out=tmp_path / "here", resume=True)
    assert without_time(again) == without_time(here)
    torch = {"cluster": {"name": "torch", "device": "cpu"}, "out": tmp_path / "torch"}
    with pytest.raises(InputError, match=r"order: Local cannot be pickled .*, and cluster 'torch' trains in processes"):
        hemiola.train(**BASE, order=Local(), **torch)
