"""From a name and options to a task, and one clear line for every way that can go wrong."""

import inspect
import sys

import numpy as np
import pytest
import torch

from hemiola import contracts
from hemiola.errors import InputError
from hemiola.lab.tasks import TASKS, describe_tasks, load_task


def error_of(name, options=None, data=None):
    with pytest.raises(InputError) as caught:
        load_task(name, options or {}, data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder, which is a fresh one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    written = []

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)


OWN = """
import torch
from hemiola.lab.tasks import Task

def line(points: int = 40, lr: float = 0.5) -> Task:
    x = torch.linspace(-1, 1, points)[:, None]
    return Task(name="line", model=lambda: torch.nn.Linear(1, 2), train=(x, (x[:, 0] > 0).long()),
                test=(x, (x[:, 0] > 0).long()), lr=lr)

def scalar_loss() -> Task:
    task = line()
    task.losses = torch.nn.functional.cross_entropy
    return task

def wrong_width() -> Task:
    task = line()
    task.model = lambda: torch.nn.Linear(3, 2)
    return task

def nothing():
    pass

def breaks():
    raise KeyError("a\\nb")

def any_option(**options):
    return line(**options)

number = 3
"""


def test_unknown_task_names_the_nearest_and_lists_all():
    message = error_of("digits-logistik")
    assert message.startswith("unknown task 'digits-logistik'; did you mean 'digits-logistic'?")
    assert all(name in message for name in TASKS)


def test_unknown_option():
    assert error_of("digits-mlp", {"hiden": [3]}) == (
        "task: unknown option 'hiden'; did you mean 'hidden'? "
        "Known: hidden, input_noise, label_noise, label_flip, examples"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": "32"}, "task.hidden: 'str' instances are not allowed"),
        ({"hidden": [32, 1.5]}, "task.hidden.1: must be a valid integer, got 1.5"),
        ({"examples": True}, "task.examples: must be a valid integer, got True"),
        ({"input_noise": "1"}, "task.input_noise: must be a valid number, got '1'"),
    ],
)
def test_wrongly_typed_option(options, message):
    assert error_of("digits-mlp", options).startswith(message)


def test_whole_numbers_are_numbers():
    assert load_task("digits-mlp", {"input_noise": 1}).noisy


def test_data_is_not_an_option():
    assert "unknown option 'data'" in error_of("digits-logistic", {"data": "x"})


def test_own_task_with_options(module):
    module("own_a", OWN)
    task = load_task("own_a:line", {"points": 10, "lr": 0.25})
    assert isinstance(task, contracts.TaskLike)
    assert (len(task.train), task.lr) == (10, 0.25)
    assert load_task("own_a:any_option", {"points": 12}).train.labels().tolist() == [0] * 6 + [1] * 6


def test_checking_an_own_task_leaves_the_global_generator_alone(module):
    module("own_b", OWN)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load_task("own_b:line")
    assert torch.equal(torch.rand(1), expected)


def test_own_task_gone_wrong(module, tmp_path):
    module("own_c", OWN)
    module("own_d", "import no_such_package_at_all\n")
    module("own_e", "1 / 0\n")
    module("own_f", "def f(:\n")
    assert error_of("own_missing:f") == f"task 'own_missing:f': cannot import 'own_missing' from {tmp_path}"
    assert "(it needs 'no_such_package_at_all', which is not installed)" in error_of("own_d:f")
    assert (
        error_of("own_e:f")
        == "task 'own_e:f': importing 'own_e' raised ZeroDivisionError: division by zero (own_e.py:1: 1 / 0)"
    )
    assert "importing 'own_f' raised SyntaxError" in error_of("own_f:f")
    assert error_of("own_f:f").endswith("(own_f.py:1)")
    assert error_of("own_c:lime").startswith(
        "task 'own_c:lime': in 'own_c', unknown name 'lime'; did you mean 'line'? Known: "
    )
    assert error_of("own_c:number") == "task 'own_c:number': 'number' must be a class or a function, got int"
    assert error_of("own_c:nothing") == "task 'own_c:nothing' must be a hemiola.Task, got NoneType"
    raised = r"""task 'own_c:breaks' raised KeyError: 'a\nb' (own_c.py:24: raise KeyError("a\nb"))"""
    assert error_of("own_c:breaks") == raised
    assert error_of("own_c:scalar_loss") == (
        "task 'own_c:scalar_loss': losses must give one number per example, shape (2,), got (); use reduction='none'"
    )
    assert "failed on its first 2 examples: RuntimeError" in error_of("own_c:wrong_width")
    assert "unknown option 'point'; did you mean 'points'?" in error_of("own_c:line", {"point": 3})
    assert error_of("own_c:") == "task 'own_c:' must be written 'package.module:name'"


def test_an_own_task_is_found_beside_the_experiment_first(module, tmp_path):
    module("own_g", OWN)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "own_g.py").write_text(OWN.replace("lr: float = 0.5", "lr: float = 0.125"))
    assert load_task("own_g:line", base=beside).lr == 0.125
    with pytest.raises(
        InputError, match=r"'own_g' was imported from .*beside/own_g.py before, so .*own_g.py cannot be"
    ):
        load_task("own_g:line", base=tmp_path)
    (beside / "own_h.py").write_text(OWN)
    assert load_task("own_h:line", base=beside).lr == 0.5
    sys.modules.pop("own_h")
    before = list(sys.path)
    load_task("own_g:line", base=beside)
    assert sys.path == before  # it does not grow


def test_descriptions_are_true_of_the_bundled_tasks():
    for record in describe_tasks():
        if record.data != "bundled":
            continue
        task = load_task(record.name)
        assert (task.name, len(task.train), len(task.test), task.convex) == (
            record.name,
            record.train,
            record.test,
            record.convex,
        )
        assert sum(p.numel() for p in task.model().parameters()) == record.parameters


def test_every_factory_takes_keywords_only_with_precise_types():
    for name, entry in TASKS.items():
        for parameter in inspect.signature(entry.make).parameters.values():
            assert parameter.kind is parameter.KEYWORD_ONLY, name
            assert parameter.annotation is not parameter.empty, name


def test_models_depend_on_the_seed_only():
    task = load_task("digits-mlp")
    torch.manual_seed(3)
    one = task.model()(task.train.batch(np.arange(4))[0])
    torch.manual_seed(3)
    assert torch.equal(one, task.model()(task.train.batch(np.arange(4))[0]))
