"""From what an experiment file says (`digits-mlp`, or `package.module:function`) to a task."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hemiola import contracts
from hemiola.errors import InputError, unknown
from hemiola.lab.tasks import (
    a9a,
    breast_cancer,
    cifar10,
    digits,
    femnist,
    glue,
    hmda,
    m4,
    mnist,
    shakespeare,
    wikitext2,
)
from hemiola.lab.tasks.task import Task
from hemiola.options import check_options, default_options, option_names
from hemiola.own import import_path, is_path, members, own_code


@dataclass(frozen=True)
class TaskEntry:
    """A row of the table of reference tasks.

    Attributes:
        make: The factory. Its keyword arguments are the task's options; ``data``, if it has one, is the data folder.
        model: The model in a few words.
        parameters: Their number, with default options.
        train: Training examples, with default options.
        test: Test examples.
        convex: Whether the gap f - f* can be shown.
        data: The data sets it reads (`hemiola.lab.tasks.files.SETS`), with default options; none for bundled data.
    """

    make: Callable[..., Task]
    model: str
    parameters: int
    train: int
    test: int
    convex: bool
    data: tuple[str, ...] = ()


TASKS: dict[str, TaskEntry] = {
    "digits-logistic": TaskEntry(digits.logistic, "softmax regression", 650, 1500, 297, True),
    "digits-mlp": TaskEntry(digits.perceptron, "perceptron 64-32-10", 2410, 1500, 297, False),
    "breast-cancer-logistic": TaskEntry(breast_cancer.logistic, "logistic regression", 31, 469, 100, True),
    "mnist-mlp": TaskEntry(mnist.perceptron, "perceptron 784-100-10", 79510, 60000, 10000, False, ("mnist",)),
    "mnist-lenet": TaskEntry(mnist.mnist_lenet, "LeNet", 44426, 60000, 10000, False, ("mnist",)),
    "fashion-lenet": TaskEntry(mnist.fashion_lenet, "LeNet", 44426, 60000, 10000, False, ("fashion-mnist",)),
    "cifar10-lenet": TaskEntry(cifar10.cifar10_lenet, "LeNet", 62006, 50000, 10000, False, ("cifar10",)),
    "cifar10-vgg": TaskEntry(cifar10.cifar10_vgg, "VGG, 6 convolutions", 551466, 50000, 10000, False, ("cifar10",)),
    "wikitext2-lstm": TaskEntry(wikitext2.lstm, "LSTM, 2 layers of 32", 2179710, 59675, 7016, False, ("wikitext2",)),
    "wikitext2-gpt": TaskEntry(wikitext2.gpt, "GPT, 2 layers of 64", 4361920, 59675, 7016, False, ("wikitext2",)),
    "m4-mlp": TaskEntry(m4.perceptron, "perceptron 20-64-64-6", 5894, 59802, 359, False, ("m4-weekly",)),
    "hmda-logistic": TaskEntry(hmda.logistic, "logistic regression", 65, 163798, 40950, True, ("hmda",)),
    "a9a-logistic": TaskEntry(a9a.logistic, "logistic regression", 124, 32561, 16281, True, ("a9a",)),
    "femnist-cnn": TaskEntry(femnist.cnn, "CNN, 2 convolutions", 86910, 28395, 3218, False, ("femnist",)),
    "shakespeare-gpt": TaskEntry(
        shakespeare.gpt, "GPT, 2 layers of 64", 112512, 15685, 1742, False, ("tiny-shakespeare",)
    ),
    "sst2-logistic": TaskEntry(glue.sst2_logistic, "logistic regression", 385, 67349, 872, True, ("sst2", "minilm")),
    "glue-minilm": TaskEntry(
        glue.glue_minilm, "BERT, 6 layers of 384", 22566146, 67349, 872, False, ("sst2", "minilm")
    ),
}


@dataclass(frozen=True)
class TaskRecord:
    """One reference task, as ``hemiola tasks`` lists it; ``options`` maps each name to its default."""

    name: str
    model: str
    parameters: int
    train: int
    test: int
    convex: bool
    data: str
    options: dict[str, Any]


def describe_tasks() -> list[TaskRecord]:
    """Every reference task, without reading any data."""
    return [
        TaskRecord(
            name=name,
            model=entry.model,
            parameters=entry.parameters,
            train=entry.train,
            test=entry.test,
            convex=entry.convex,
            data=", ".join(entry.data) or "bundled",
            options={key: value for key, value in default_options(entry.make).items() if key != "data"},
        )
        for name, entry in TASKS.items()
    ]


def load_task(
    name: str, options: Mapping[str, Any] | None = None, data: Path | None = None, base: Path | None = None
) -> contracts.TaskLike:
    """Make a reference task, or a user's own.

    Args:
        name: A name `describe_tasks` lists, or ``"package.module:function"``.
        options: Keyword arguments of the task's factory.
        data: The folder that holds the data sets; the environment variable HEMIOLA_DATA when None.
        base: The folder that own tasks are looked for in first, then the current one, then where Python looks.

    Raises:
        InputError: No such task; an option it does not have, of the wrong type or impossible; data that are missing
            or cannot be read; an own task that cannot be imported, fails, or returns something else.
    """
    if data is None and os.environ.get("HEMIOLA_DATA"):
        data = Path(os.environ["HEMIOLA_DATA"])
    if is_path(name):
        make = import_path(name, Path.cwd() if base is None else base.absolute(), "task")
        arguments = _arguments(make, options or {}, data)
        with own_code(f"task {name!r}"):
            task = make(**arguments)
        return checked_task(task, f"task {name!r}")
    if name not in TASKS:
        raise InputError(f"{unknown('task', name, TASKS)}, and your own as 'package.module:function'")
    make = TASKS[name].make
    return make(**_arguments(make, options or {}, data))


def _arguments(make: Callable[..., Any], options: Mapping[str, Any], data: Path | None) -> dict[str, Any]:
    """The options, checked against the factory's parameters, and ``data`` where it takes one."""
    checked = check_options(make, options, "task", reserved=("data",))
    return {**checked, "data": data} if "data" in option_names(make) else checked


def checked_task(task: Any, what: str) -> contracts.TaskLike:
    """Try an own task on two examples, so that a mistake shows before a run starts rather than in the middle of one."""
    if inspect.isclass(task):
        raise InputError(
            f"{what}: {task.__name__} is a class, and an object is meant; make one, as in {task.__name__}()"
        )
    if not isinstance(task, contracts.TaskLike):
        raise InputError(f"{what} must be a hemiola.Task, got {type(task).__name__}{_first_missing(task)}")
    count = min(2, len(task.train))
    with (
        own_code(what, f"failed on its first {count} examples:"),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        inputs, targets = task.train.batch(np.arange(count))
        outputs = task.model()(inputs)
        results = {"losses": task.losses(outputs, targets), "scores": task.scores(outputs, targets)}
    for name, result in results.items():
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        if shape != (count,):
            hint = "; use reduction='none'" if shape == () else ""
            raise InputError(f"{what}: {name} must give one number per example, shape ({count},), got {shape}{hint}")
    return task


def _first_missing(task: object) -> str:
    """What an object that was meant for a task lacks, if it has something of one."""
    present = set(dir(task))
    written = members(contracts.TaskLike)
    missing = [member for member in written if member not in present]
    return f", which lacks {written[missing[0]]}" if missing and len(missing) < len(written) else ""
