"""The experiment file: typed, strict, and with one clear line for every mistake.

An experiment is a grid: every run at every sweep point for every seed. One place in the grid is a `Cell`.
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hemiola.clusters.table import CLUSTERS, check_fit
from hemiola.contracts import Order, Pace, Period, Task
from hemiola.errors import InputError, nearest
from hemiola.optimizers import Optimizer, make_schedule
from hemiola.options import check_options, first_error, option_names
from hemiola.order import ORDERS
from hemiola.pace import PACES
from hemiola.period import PERIODS, Exchange
from hemiola.plan import Amount, ClusterFactory, Plan
from hemiola.tasks import load_task
from hemiola.training import split_examples

Named = str | dict[str, Any]
"""A policy, task or cluster: its name, or a table with a name and options."""


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Stop(_Table):
    """When a run ends."""

    epochs: float | None = Field(default=None, gt=0)
    updates: int | None = Field(default=None, gt=0)
    seconds: float | None = Field(default=None, gt=0)


class Evaluate(_Table):
    """How often a run is evaluated, and on how many training examples (all by default)."""

    every_epochs: float | None = Field(default=None, gt=0)
    every_updates: int | None = Field(default=None, gt=0)
    every_seconds: float | None = Field(default=None, gt=0)
    train_examples: int | None = Field(default=None, gt=0)


class Shards(_Table):
    """How the training set is dealt to the workers."""

    split: Literal["iid", "label-sorted"] | dict[str, float] = "iid"

    @field_validator("split")
    @classmethod
    def _alpha(cls, split: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(split, dict) and not (list(split) == ["dirichlet"] and 0 < split["dirichlet"] < float("inf")):
            raise ValueError(
                f"must be 'iid', 'label-sorted' or {{ dirichlet = ALPHA }} with ALPHA above 0, got {split}"
            )
        return split


class Settings(_Table):
    """One run, without its seed: the keys a ``[[run]]`` table may give, and the top level may give for all."""

    task: Named
    workers: int = Field(default=8, ge=1)
    batch: int | None = Field(default=None, ge=1)
    stop: Stop = Stop(epochs=10)
    evaluate: Evaluate = Evaluate(every_epochs=1)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    shards: Shards = Shards()
    cluster: Named = "simulated"
    order: Named = "rr"
    period: Named = "full"
    pace: Named = "k-sync"


# These tables name a class with its own options; a run's table replaces the default's instead of adding to it.
_NAMED = ("task", "cluster", "order", "period", "pace")


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

    def parts(self) -> tuple[Order, Period, Pace, Exchange, ClusterFactory]:
        """Fresh policies and the cluster, checked as far as possible without the data."""
        settings = self.settings
        order: Order = _make(ORDERS, "order", settings.order)
        period, exchange = _make_period(settings.period)
        pace: Pace = _make(PACES, "pace", settings.pace)
        with _where("pace"):
            pace.begin(settings.workers)
        name, options = _split(CLUSTERS, "cluster", settings.cluster)
        checked = check_options(CLUSTERS[name], options, "cluster")
        with _where("cluster"):
            make_cluster = CLUSTERS[name](self.base, settings.workers, **checked)
        with _where("period"):
            exchange.check(period.local)
            if exchange.overlap != 0 and not pace.lockstep:
                raise InputError(f"overlap = {exchange.overlap!r} needs a pace whose updates wait for every worker")
        check_fit(name, pace, exchange)
        return order, period, pace, exchange, make_cluster

    def plan(self, data: Path | None) -> tuple[Plan, ClusterFactory]:
        """Load the task and put everything together."""
        order, period, pace, exchange, make_cluster = self.parts()
        settings = self.settings
        task = self.task(data)
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
        )
        return plan, make_cluster

    def task(self, data: Path | None) -> Task:
        """Load the task."""
        table = self.settings.task
        name, options = (
            (table, {})
            if isinstance(table, str)
            else (table.get("name"), {k: v for k, v in table.items() if k != "name"})
        )
        if not isinstance(name, str):
            raise InputError("task: a table needs a name, as in { name = 'digits-mlp' }")
        return load_task(name, options, data)

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
        given: As written, after ``--set``.
    """

    def __init__(self, given: Mapping[str, Any], base: Path | None = None):
        self.given = copy.deepcopy(dict(given))
        self.base = base or Path()
        table = dict(self.given)
        runs = _list_of_tables(table.pop("run", [{}]))
        sweep = _sweep(table.pop("sweep", {}))
        self.seeds = _seeds(table.pop("seeds", [0]))
        self.title = _title(table.pop("title", None))
        self.sweep = sweep
        names = _names(runs)
        points = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
        self.cells = []
        for name, run in zip(names, runs, strict=True):
            extra = {key: value for key, value in run.items() if key != "name"}
            for point in points:
                with _where(f"run {name!r}" if run else ""):
                    settings = _settings(_merge(table, extra), point)
                    cells = [Cell(name, point, seed, settings, self.base) for seed in self.seeds]
                    cells[0].parts()
                    cells[0].optimizer(default_lr=1.0)
                    _amount("stop", settings.stop.model_dump())
                self.cells += cells

    @property
    def runs(self) -> list[str]:
        """Names of the runs, in the order of the file."""
        return list(dict.fromkeys(cell.run for cell in self.cells))

    @classmethod
    def load(cls, path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
        """Read an experiment file; ``changes`` maps dotted keys to values that replace the file's."""
        given = _read_toml(path)
        with _where(str(path)):
            for key, value in (changes or {}).items():
                _put(given, key, value)
            return cls(given, path.parent)

    def resolved(self) -> dict[str, Any]:
        """The experiment with every default filled in, as plain JSON values."""
        runs = {cell.run: {"name": cell.run, **cell.settings.model_dump()} for cell in reversed(self.cells)}
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
    *path, last = dotted.split(".")
    for part in path:
        inner = table.get(part, {})
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise InputError(f"{dotted}: {part!r} is not a table, it is {inner!r}")
        table[part] = dict(inner)
        table = table[part]
    table[last] = value


def _merge(default: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(default))
    for key, value in run.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both_tables and key not in _NAMED else copy.deepcopy(value)
    return merged


def _settings(table: dict[str, Any], point: Mapping[str, Any]) -> Settings:
    for key, value in point.items():
        _put(table, key, value)
    known = [*Settings.model_fields, "seeds", "sweep", "run", "title"]
    for key in table:
        if key not in Settings.model_fields:
            raise InputError(f"{key}: unknown key{nearest(str(key), known)} Keys here: {', '.join(known)}")
    for key, model in (("stop", Stop), ("evaluate", Evaluate), ("shards", Shards)):
        for inner in table[key] if isinstance(table.get(key), dict) else ():
            allowed = list(model.model_fields)
            if inner not in allowed:
                raise InputError(
                    f"{key}.{inner}: unknown key{nearest(str(inner), allowed)} Keys here: {', '.join(allowed)}"
                )
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
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise InputError(
                f"sweep.{key}: must be a list of at least one value, got {values!r} (write a dotted key in quotes)"
            )
        top = key.split(".")[0]
        if top not in Settings.model_fields:
            raise InputError(f"sweep: unknown key {key!r}{nearest(top, list(Settings.model_fields))}")
    return sweep


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


class _where:
    """Put the place in front of an `InputError` raised inside."""

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError) and self.place and not str(error).startswith(self.place):
            raise InputError(f"{self.place}: {error}") from None


def _split(table: Mapping[str, Any], family: str, given: Named) -> tuple[str, dict[str, Any]]:
    options = {"name": given} if isinstance(given, str) else dict(given)
    name = str(options.pop("name", None))
    if name not in table:
        hint = nearest(str(name), list(table))
        raise InputError(f"{family}.name: unknown {family} {name!r}{hint} Known: {', '.join(table)}")
    return name, options


def _make(table: Mapping[str, Callable[..., Any]], family: str, given: Named) -> Any:
    name, options = _split(table, family, given)
    checked = check_options(table[name], options, family)
    with _where(family):
        return table[name](**checked)


def _make_period(given: Named) -> tuple[Period, Exchange]:
    """A period's table holds its own options and those of the exchange."""
    name, options = _split(PERIODS, "period", given)
    own, shared = option_names(PERIODS[name]), option_names(Exchange)
    for key in options:
        if key not in own + shared:
            raise InputError(
                f"period.{key}: unknown option{nearest(key, own + shared)} Options here: {', '.join(own + shared)}"
            )
    mine = check_options(PERIODS[name], {k: v for k, v in options.items() if k in own}, "period")
    rest = check_options(Exchange, {k: v for k, v in options.items() if k not in own}, "period")
    with _where("period"):
        return PERIODS[name](**mine), Exchange(**rest)


def _amount(key: str, values: dict[str, Any]) -> Amount:
    with _where(key):
        return Amount(**values)
