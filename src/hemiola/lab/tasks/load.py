"""From what an experiment file says (`digits-mlp`, or `package.module:function`) to a task."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch

from hemiola import contracts
from hemiola.errors import InputError, raised_at, unknown
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
            options={key: option.default for key, option in _options_of(entry.make).items()},
        )
        for name, entry in TASKS.items()
    ]


def load_task(
    name: str, options: Mapping[str, Any] | None = None, data: Path | None = None, base: Path | None = None
) -> contracts.Task:
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
    if ":" in name:
        make = _import_function(name, Path.cwd() if base is None else base.absolute())
        arguments = _arguments(name, make, options or {}, data)
        try:
            task = make(**arguments)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"task {name!r} raised {_one_line(error)}{raised_at(error)}") from error
        return _checked_own(name, task)
    if name not in TASKS:
        raise InputError(f"{unknown('task', name, TASKS)}, and your own as 'package.module:function'")
    make = TASKS[name].make
    return make(**_arguments(name, make, options or {}, data))


# -------------------------------------------------------------------------------------------------------- options


def _options_of(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return {}
    return {key: parameter for key, parameter in parameters.items() if key != "data"}


def _arguments(name: str, make: Callable[..., Any], options: Mapping[str, Any], data: Path | None) -> dict[str, Any]:
    """The options, checked strictly against the factory's signature, and ``data`` where it takes one."""
    parameters = _options_of(make)
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in options:
        if key not in named and not takes_any:
            raise InputError(f"task {name!r}: {unknown('option', key, named)}")
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            raise InputError(f"task {name!r} needs the option {key!r}")
    hints = typing.get_type_hints(make, include_extras=True)
    checked = {
        key: _checked(f"option {key!r} of task {name!r}", value, hints.get(key, Any)) for key, value in options.items()
    }
    if "data" in inspect.signature(make).parameters:
        checked["data"] = data
    return checked


def _checked(what: str, value: Any, annotation: Any) -> Any:
    try:
        return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(strict=True)).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise InputError(f"{what}{where}: {reason}, got {first['input']!r}") from None


# ------------------------------------------------------------------------------------------------------- own tasks


def _import_function(name: str, base: Path) -> Callable[..., Any]:
    """Import what ``name`` says, from ``base`` if it is there.

    The folders stay on `sys.path`: the module may import its neighbours later, and Ray tells its workers the path.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise InputError(f"task {name!r} must be written 'package.module:function'")
    folders = list(dict.fromkeys((str(base), os.getcwd())))
    sys.path[:] = folders + [entry for entry in sys.path if entry not in folders]
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = module_name == error.name or module_name.startswith(f"{error.name}.")
        missing = "" if own else f" (it needs {error.name!r}, which is not installed)"
        raise InputError(
            f"task {name!r}: cannot import {module_name!r} from {' or '.join(folders)}{missing}"
        ) from error
    except Exception as error:
        raise InputError(
            f"task {name!r}: importing {module_name!r} raised {_one_line(error)}{raised_at(error)}"
        ) from error
    _check_origin(name, module_name, base)
    function = getattr(module, attribute, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"task {name!r}: in {module_name!r}, {unknown('function', attribute, public)}")
    if not callable(function):
        raise InputError(f"task {name!r}: {attribute!r} must be a function, got {type(function).__name__}")
    return typing.cast(Callable[..., Any], function)


def _check_origin(name: str, module_name: str, base: Path) -> None:
    """Refuse a module of the same name that was imported from elsewhere before: it would be another task."""
    top = module_name.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [str(base)])
    loaded = sys.modules[top].__spec__
    if here is None or here.origin is None or loaded is None or loaded.origin is None:
        return
    if Path(loaded.origin).exists() and not Path(loaded.origin).samefile(here.origin):
        raise InputError(
            f"task {name!r}: {top!r} was imported from {loaded.origin} before, so {here.origin} cannot be; "
            "rename one of them"
        )


def _checked_own(name: str, task: Any) -> contracts.Task:
    """Try the task on two examples, so that a mistake shows before a run starts rather than in the middle of one."""
    if not isinstance(task, contracts.Task):
        raise InputError(f"task {name!r} must return a hemiola.Task, got {type(task).__name__}")
    count = min(2, len(task.train))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            inputs, targets = task.train.batch(np.arange(count))
            outputs = task.model()(inputs)
            results = {"losses": task.losses(outputs, targets), "scores": task.scores(outputs, targets)}
    except Exception as error:
        raise InputError(
            f"task {name!r} failed on its first {count} examples: {_one_line(error)}{raised_at(error)}"
        ) from error
    for what, result in results.items():
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        if shape != (count,):
            hint = "; use reduction='none'" if shape == () else ""
            raise InputError(
                f"task {name!r}: {what} must give one number per example, shape ({count},), got {shape}{hint}"
            )
    return task


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
