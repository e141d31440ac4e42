"""The experiment file: typed, strict, and with one clear line for every mistake.

An experiment is a grid: every run at every sweep point for every seed. One place in the grid is a `Cell`.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from hemiola.contracts import Order, Pace, Period, TaskLike
from hemiola.errors import InputError, unknown
from hemiola.lab.named import (
    NAMED,
    check_shared,
    described,
    is_live,
    live_objects,
    make_cluster,
    make_order,
    make_pace,
    make_period,
    make_task,
    within,
)
from hemiola.optimizers import Optimizer, make_schedule
from hemiola.options import first_error
from hemiola.plan import Amount, ClusterFactory, Plan, check_policies
from hemiola.training import split_examples, whole_set
from hemiola.wire.exchange import Exchange
from hemiola.wire.outer import Outer


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Stop(_Table):
    """When a run ends."""

    epochs: float | None = Field(default=None, gt=0)
    updates: int | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)


class Evaluate(_Table):
    """How often a run is evaluated, and on how many training and test examples (all by default)."""

    every_epochs: float | None = Field(default=None, gt=0)
    every_updates: int | None = Field(default=None, gt=0)
    every_seconds: float | None = Field(default=None, gt=0)
    train_examples: int | None = Field(default=None, gt=0)
    test_examples: int | None = Field(default=None, gt=0)


class Shards(_Table):
    """How the training set is dealt to the workers: a shard for each, or one deck that all take batches from."""

    split: Literal["iid", "label-sorted", "natural"] | dict[str, float] = "iid"
    deal: Literal["shards", "deck"] = "shards"

    @field_validator("split")
    @classmethod
    def _alpha(cls, split: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(split, dict) and not (list(split) == ["dirichlet"] and 0 < split["dirichlet"] < float("inf")):
            raise ValueError(
                f"must be 'iid', 'label-sorted', 'natural' or {{ dirichlet = ALPHA }} with ALPHA above 0, got {split}"
            )
        return split

    @model_validator(mode="after")
    def _one_deck(self) -> Shards:
        if self.deal == "deck" and self.split != "iid":
            raise ValueError(
                f"deal = 'deck' has no shards, every worker visits examples of all kinds; it cannot go with "
                f"split = {self.split!r}"
            )
        return self


def _named_table(given: Any) -> Any:
    """A name alone stands for a table that has nothing else."""
    return {"name": given} if isinstance(given, str) else given


def _outer_table(given: Any) -> Any:
    return {"name": given.name, **given.options} if isinstance(given, Outer) else _named_table(given)


def _nameable(given: Any) -> Any:
    if isinstance(given, str | dict) or is_live(given):
        return given
    raise ValueError(f"must be a name, a path 'package.module:Name', or a table with a name and options, got {given!r}")


Named = Annotated[Any, BeforeValidator(_nameable)]
"""A policy, task or cluster: its name or path, a table with a name and options, or, from Python, an object."""


class Settings(_Table):
    """One run, without its seed: the keys a ``[[run]]`` table may give, and the top level may give for all."""

    task: Named
    workers: int = Field(default=8, ge=1)
    batch: int | None = Field(default=None, ge=1)
    stop: Stop = Stop(epochs=10)
    evaluate: Evaluate = Evaluate(every_epochs=1)
    keep: Literal["last", "best"] = "last"
    optimizer: Annotated[dict[str, Any], BeforeValidator(_named_table)] = Field(default_factory=dict)
    shards: Shards = Shards()
    cluster: Named = "simulated"
    order: Named = "rr"
    period: Named = "full"
    pace: Named = "k-sync"
    outer: Annotated[dict[str, Any] | None, BeforeValidator(_outer_table)] = None

    def resolved(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        plain = self.model_dump(exclude=set(NAMED))
        return {key: described(plain.get(key, value)) for key, value in self}


_TABLES: tuple[tuple[str, type[_Table], str], ...] = (
    ("stop", Stop, "{ epochs = 10 }"),
    ("evaluate", Evaluate, "{ every_epochs = 1 }"),
    ("shards", Shards, '{ split = "iid" }'),
)


@dataclass(frozen=True)
class Cell:
    """One run at one sweep point for one seed.

    Attributes:
        run: The run's name.
        point: The sweep's keys and values here.
        seed: Names every random stream.
        settings: All that was said about this run.
        base: Folder of the experiment file; relative paths in it start here.
    """

    run: str
    point: dict[str, Any]
    seed: int
    settings: Settings
    base: Path

    def cluster(self) -> ClusterFactory:
        """What makes the cluster, from its options."""
        return make_cluster(self.settings.cluster, self.base, self.settings.workers)

    def parts(self) -> tuple[Order, Period, Pace, Exchange, ClusterFactory]:
        """Fresh policies and the cluster, checked as far as possible without the data."""
        settings = self.settings
        order = make_order(settings.order, self.base)
        period, exchange = make_period(settings.period, self.base)
        pace = make_pace(settings.pace, self.base)
        with within("pace"):
            pace.begin(settings.workers)
        factory = self.cluster()
        with within("period"):
            check_policies(period, pace, exchange)
        if (outer := self.outer()) is not None:
            outer.check(period)
        factory.check(period, pace, exchange)
        return order, period, pace, exchange, factory

    def check(self) -> None:
        """Build what can be built without the data."""
        self.parts()
        self.optimizer(default_lr=1.0)
        _amount("stop", self.settings.stop.model_dump())

    def plan(self, data: Path | None) -> tuple[Plan, ClusterFactory]:
        """Load the task and put everything together."""
        order, period, pace, exchange, factory = self.parts()
        settings = self.settings
        task = self.task(data)
        deck = settings.shards.deal == "deck"
        if deck:
            shards = whole_set(task.train, settings.workers)
        else:
            shards = split_examples(task.train, settings.workers, settings.shards.split, self.seed)
        evaluate = settings.evaluate.model_dump()
        plan = Plan(
            task=task,
            shards=shards,
            batch=settings.batch or task.batch,
            seed=self.seed,
            order=order,
            period=period,
            pace=pace,
            exchange=exchange,
            optimizer=self.optimizer(task.lr),
            stop=_amount("stop", settings.stop.model_dump()),
            every=_amount(
                "evaluate", {key.removeprefix("every_"): evaluate[key] for key in evaluate if "every" in key}
            ),
            train_examples=settings.evaluate.train_examples,
            test_examples=settings.evaluate.test_examples,
            deck=deck,
            keep=settings.keep,
            outer=self.outer(),
        )
        return plan, factory

    def task(self, data: Path | None) -> TaskLike:
        """Load the task."""
        return make_task(self.settings.task, self.base, data)

    def outer(self) -> Outer | None:
        """A fresh outer optimizer, where there is one."""
        with within("outer"):
            return Outer.made(self.settings.outer)

    def optimizer(self, default_lr: float) -> Optimizer:
        """Build the optimizer's description."""
        table = dict(self.settings.optimizer)
        name, lr = table.pop("name", "SGD"), table.pop("lr", default_lr)
        if isinstance(lr, bool) or not isinstance(lr, int | float):
            raise InputError(f"optimizer.lr: must be a positive number, got {lr!r}")
        return Optimizer(str(name), float(lr), schedule=make_schedule(table.pop("schedule", None)), arguments=table)


class Experiment:
    """A checked experiment.

    Args:
        given: The file's content as plain dicts and lists.
        base: Folder that relative paths start from.

    Attributes:
        cells: The grid, in the order of results.csv.
        given: As written, after ``--set``; objects as tables that describe them.
    """

    def __init__(self, given: Mapping[str, Any], base: Path | None = None):
        self.given = described(dict(given))
        self.base = (base or Path()).absolute()
        table = dict(given)
        runs = _list_of_tables(table.pop("run", [{}]))
        sweep = _sweep(table.pop("sweep", {}))
        self.seeds = _seeds(table.pop("seeds", [0]))
        self.title = _title(table.pop("title", None))
        self.sweep = sweep
        names = _names(runs)
        points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
        self._shared = table
        self._own = {
            name: {key: value for key, value in run.items() if key != "name"}
            for name, run in zip(names, runs, strict=True)
        }
        self.cells = []
        for name in names:
            for point in points:
                with self.blaming(name, point, Cell.check):
                    cell = self._cell(name, self._own[name], point)
                    cell.check()
                self.cells += [replace(cell, seed=seed) for seed in self.seeds]
        for family, shared in live_objects(self._shared).items():
            check_shared(family, shared, len(self.cells))
        for own in self._own.values():
            for family, alone in live_objects(own).items():
                check_shared(family, alone, len(points) * len(self.seeds))

    def _cell(self, name: str, own: Mapping[str, Any], point: dict[str, Any]) -> Cell:
        return Cell(name, point, self.seeds[0], _settings(_merge(self._shared, own), point), self.base)

    @contextmanager
    def blaming(self, run: str, point: dict[str, Any], attempt: Callable[[Cell], object]) -> Iterator[None]:
        """Put the place of the mistake in front of an `InputError` raised inside.

        The place is the least part of the file that by itself makes ``attempt`` fail in the same words: what is given
        for all runs, that at a point of the sweep, a run, or a run at a point.
        """
        try:
            yield
        except InputError as error:
            own, at = self._own[run], ", ".join(f"{key} = {value!r}" for key, value in point.items())
            task = {"task": own["task"]} if "task" in own and "task" not in self._shared else {}
            places = [("", task, {}), (f"sweep ({at})", task, point), (f"run {run!r}", own, {})]
            for place, part, here in places:
                try:
                    attempt(self._cell(run, part, here))
                except InputError as again:
                    if str(again) == str(error):
                        raise InputError(f"{place}: {error}" if place else str(error)) from error.__cause__
            raise InputError(f"run {run!r}{f' ({at})' if at else ''}: {error}") from error.__cause__

    @property
    def runs(self) -> list[str]:
        """Names of the runs, in the order of the file."""
        return list(dict.fromkeys(cell.run for cell in self.cells))

    @classmethod
    def load(cls, path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
        """Read an experiment file; ``changes`` maps dotted keys to values that replace the file's."""
        given = _read_toml(path)
        with within(str(path)):
            for key, value in (changes or {}).items():
                _put(given, key, value)
            return cls(given, path.parent)

    def resolved(self) -> dict[str, Any]:
        """The experiment with every default filled in, as plain JSON values."""
        runs = {cell.run: {"name": cell.run, **cell.settings.resolved()} for cell in reversed(self.cells)}
        return {
            "title": self.title,
            "seeds": list(self.seeds),
            "sweep": {key: list(values) for key, values in self.sweep.items()},
            "run": [runs[name] for name in self.runs],
        }


# ------------------------------------------------------------------------------------------------- reading, merging


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a TOML file: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def parse_change(text: str) -> tuple[str, Any]:
    """Read ``--set key=value``; the value is TOML, or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set takes key=value, as in optimizer.lr=0.1, got {text!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key, turning a named shorthand such as ``pace = "k-sync"`` into a table where needed."""
    *path, last = _key_path(dotted)
    for part in path:
        inner = table.get(part, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise InputError(f"{dotted}: {part!r} is not a table, it is {inner!r}")
        table[part] = dict(inner)
        table = table[part]
    table[last] = value


def _key_path(dotted: str) -> list[str]:
    """Split a dotted key as TOML does, so that a quoted part may hold dots: ``sweep."optimizer.lr"``."""
    try:
        inner: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return dotted.split(".")
    path: list[str] = []
    while isinstance(inner, dict):
        path += inner
        inner = inner[path[-1]]
    return path


def _merge(default: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(default)
    for key, value in run.items():
        if key == "optimizer":  # The one table that is named and added to.
            merged[key], value = _named_table(merged.get(key)), _named_table(value)
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both_tables and key not in (*NAMED, "outer") else value
    return merged


def _settings(table: dict[str, Any], point: Mapping[str, Any]) -> Settings:
    for key, value in point.items():
        _put(table, key, value)
    known = [*Settings.model_fields, "seeds", "sweep", "run", "title"]
    for key in table:
        if key not in Settings.model_fields:
            raise InputError(unknown("key", key, known))
    for key, model, example in _TABLES:
        given = table.get(key, {})
        if not isinstance(given, dict):
            raise InputError(f"{key}: must be a table, as in {key} = {example}, got {given!r}")
        for inner in given:
            if inner not in model.model_fields:
                raise InputError(f"{key}: {unknown('key', inner, model.model_fields)}")
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        raise InputError(first_error(error)) from None


def _list_of_tables(runs: Any) -> list[dict[str, Any]]:
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise InputError("run: must be one or more [[run]] tables")
    return runs


def _names(runs: list[dict[str, Any]]) -> list[str]:
    names = []
    for number, run in enumerate(runs):
        name = run.get("name", f"run {number + 1}" if len(runs) > 1 else "run")
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise InputError(f"run {number + 1}: name must be a printable string, got {name!r}")
        if name in names:
            raise InputError(f"run {number + 1}: there are two runs called {name!r}; names must differ")
        names.append(name)
    return names


def _sweep(sweep: Any) -> dict[str, list[Any]]:
    if not isinstance(sweep, dict):
        raise InputError(f"sweep: must be a table of lists, got {sweep!r}")
    lists = _flat(sweep)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"sweep.{key}: must be a list of at least one value, got {values!r}")
        if any(is_live(value) for value in values):
            raise InputError(f"sweep.{key}: objects cannot be swept; make a run of each")
        top = key.split(".")[0]
        if top not in Settings.model_fields:
            raise InputError(f"sweep: {unknown('key', top, Settings.model_fields)}")
    return lists


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Dotted keys without their quotes are tables in tables; here both mean the same."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, dict) and value else {f"{before}{key}": value}
    return flat


def _seeds(seeds: Any) -> list[int]:
    whole = (
        isinstance(seeds, list)
        and seeds
        and all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 2**32 for s in seeds)
    )
    if not whole or len(set(seeds)) != len(seeds):
        raise InputError(f"seeds: must be a list of different whole numbers from 0 to 2^32 - 1, got {str(seeds)[:60]}")
    return list(seeds)


def _title(title: Any) -> str | None:
    if title is not None and not isinstance(title, str):
        raise InputError(f"title: must be a string, got {title!r}")
    return title


# ------------------------------------------------------------------------------------------------------- building


def _amount(key: str, values: dict[str, Any]) -> Amount:
    with within(key):
        return Amount(**values)
