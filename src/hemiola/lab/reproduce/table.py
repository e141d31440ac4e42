"""The table of claims, read from `claims.toml` and checked: what is said, what runs, what is measured, what is asked.

Two versions of every claim run: the full one, and a quick one, which is smaller in ways that the table says.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hemiola.errors import InputError, unknown
from hemiola.lab.experiment import Experiment

Cost = Literal["epochs", "seconds", "updates", "bytes_per_worker"]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Number(_Table):
    """A number measured on the folder of an experiment.

    The measure is a column of the log, at its end or ``at`` a place, or with ``reach`` what it costs to get there.
    Where the experiment has a sweep, every run is read at its own best point. Several runs stand for the best of them.

    Attributes:
        name: What it is, in words.
        file: The experiment it is read from.
        measure: A column of the log.
        run: Whose.
        over: Divide by the same of this run.
        minus: Subtract the same of this run.
        at: Where, such as ``{ epochs = 30 }``; at the end if not given.
        last: The mean over this last share of the evaluations instead.
        reach: A value of the measure that is to be reached; or
        until: the run whose end is to be reached: seed by seed, its own value of the measure there.
        way: Two runs, and the number is the share of the way from the first one's to the second one's that ``run`` has
            gone: 0 where it is as the first, 1 where it is as the second.
        cost: What reaching it is counted in.
        curve: Whether the mean curve is to touch it, or each seed's own, averaged.
        slope: By run, the x at which it stands: the slope of log(number) against log(x) over these runs.
        times: A factor, such as 100 for points of accuracy.
        line: The line of the picture it belongs to, and ``x`` its place there.
        quick: What differs in the quick version; false if it is not measured there.
    """

    name: str
    file: str
    measure: str
    run: str | list[str] = ""
    over: str | list[str] = ""
    minus: str | list[str] = ""
    at: dict[Cost, float] | None = None
    last: float | None = None
    reach: float | None = None
    until: str = ""
    way: list[str] = Field(default_factory=list, max_length=2)
    cost: Cost = "seconds"
    curve: Literal["mean", "seeds"] = "mean"
    slope: dict[str, float] | None = None
    times: float = 1.0
    line: str = ""
    x: float | None = None
    quick: Literal[False] | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Number:
        if bool(self.run) == bool(self.slope):
            raise ValueError("give either run or slope")
        if bool(self.over) + bool(self.minus) + bool(self.way) > 1:
            raise ValueError("give one of over, minus and way")
        if len(self.way) == 1:
            raise ValueError("way is from one run to another")
        if (self.at is not None) + (self.reach is not None) + (self.last is not None) + bool(self.until) > 1:
            raise ValueError("give one of at, last, reach and until")
        if self.at is not None and len(self.at) != 1:
            raise ValueError("at is one place")
        return self

    def version(self, quick: bool) -> Number | None:
        """As it is measured in this version; None if it is not."""
        if not quick or self.quick is None:
            return self
        return None if self.quick is False else Number.model_validate({**self.model_dump(), **self.quick})

    @property
    def label(self) -> str:
        """The name with where it is read, which may differ between the versions."""
        if self.reach is not None:
            return f"{self.name} (to {self.reach:g})"
        if self.until:
            return f"{self.name} (to where {self.until!r} ends)"
        return (
            f"{self.name} ({', '.join(f'{axis} {place:g}' for axis, place in self.at.items())})"
            if self.at
            else self.name
        )

    @property
    def runs(self) -> list[str]:
        """Every run it reads."""
        named = [[one] if isinstance(one, str) else one for one in (self.run, self.over, self.minus)]
        others = [*self.way, self.until, *(self.slope or {})]
        return [run for some in [*named, others] for run in some if run]


class Check(_Table):
    """A bound that a number must keep for the claim to count as reproduced; ``quick`` is that of the quick version."""

    number: str
    least: float | None = None
    most: float | None = None
    quick: float | Literal[False] | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Check:
        if (self.least is None) == (self.most is None):
            raise ValueError("give either least or most")
        return self

    def bound(self, quick: bool) -> float | None:
        """The bound in this version; None if it is not asked there."""
        if quick and self.quick is not None:
            return None if self.quick is False else self.quick
        return self.most if self.least is None else self.least


class Picture(_Table):
    """One picture of a claim, in the axes of the paper.

    Curves of an experiment's runs (``file``), the declared numbers that have a line (neither), or what a function
    drew under the panel's title. What comes before ``start`` is left out, where an untrained model would stretch the
    axis so far that nothing else shows.
    """

    title: str = ""
    file: str = ""
    runs: list[str] = Field(default_factory=list)
    x: str = "epochs"
    y: str = "train_loss"
    x_title: str = ""
    y_title: str = ""
    log_x: bool = False
    log_y: bool = False
    start: float = 0.0


class PublishedClaim(_Table):
    """One claim.

    Attributes:
        name: As on the command line.
        paper: A key of the table's papers.
        claim: In one sentence.
        reports: What the paper reports.
        task: What it is tested on.
        data: The data sets it needs, and ``quick_data`` those of the quick version, where they are fewer.
        files: Experiments it runs; or
        function: the function that measures it, with ``options`` and, for the quick version, ``quick_options``.
        numbers, checks, panels: See there.
        quick: What the quick version leaves out.
        remark: What else there is to say about the result.
    """

    name: str
    paper: str
    claim: str
    reports: str
    task: str
    data: list[str] = Field(default_factory=list)
    quick_data: list[str] | None = None
    files: list[str] = Field(default_factory=list)
    function: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    quick_options: dict[str, Any] = Field(default_factory=dict)
    numbers: list[Number] = Field(default_factory=list, alias="number")
    checks: list[Check] = Field(alias="check")
    panels: list[Picture] = Field(alias="picture")
    quick: str = ""
    remark: str = ""

    @model_validator(mode="after")
    def _files_or_function(self) -> PublishedClaim:
        if bool(self.files) == bool(self.function):
            raise ValueError(f"claim {self.name!r}: give either files or a function")
        return self

    def measured(self, quick: bool) -> list[Number]:
        """The declared numbers of this version."""
        return [number for one in self.numbers if (number := one.version(quick)) is not None]

    def labels(self, quick: bool) -> dict[str, str]:
        """By number, what it is called in this version."""
        return {number.name: number.label for number in self.measured(quick)}

    def files_of(self, quick: bool) -> list[str]:
        """The experiments that this version measures something on."""
        return [file for file in self.files if any(number.file == file for number in self.measured(quick))]

    def data_of(self, quick: bool) -> list[str]:
        """The data sets that this version reads."""
        return self.quick_data if quick and self.quick_data is not None else self.data

    def options_of(self, quick: bool) -> dict[str, Any]:
        """What the function of this version is given."""
        return {**self.options, **(self.quick_options if quick else {})}

    def definition(self, quick: bool) -> str:
        """A short name of what this version runs and measures: a result is one of today's claim only if it has it."""
        numbers = [number.model_dump(exclude={"quick", "line", "x"}) for number in self.measured(quick)]
        experiments = [
            _given(file, quick, {run for number in self.measured(quick) if number.file == file for run in number.runs})
            for file in self.files_of(quick)
        ]
        told = json.dumps([numbers, self.function, self.options_of(quick), experiments], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:12]


class QuickFile(_Table):
    """How the quick version of an experiment differs: values that replace the file's, and the runs that stay."""

    changes: dict[str, Any] = Field(default_factory=dict, alias="set")
    runs: list[str] = Field(default_factory=list)


class Table(_Table):
    """All of `claims.toml`."""

    papers: dict[str, str]
    quick: dict[str, QuickFile]
    claims: list[PublishedClaim] = Field(alias="claim")


@cache
def table() -> Table:
    """The table."""
    with (files("hemiola.lab.reproduce") / "claims.toml").open("rb") as file:
        return Table.model_validate(tomllib.load(file))


def claims() -> dict[str, PublishedClaim]:
    """Every claim by its name, in the table's order."""
    return {claim.name: claim for claim in table().claims}


def claim_named(name: str) -> PublishedClaim:
    """The claim of this name.

    Raises:
        InputError: There is none; names the nearest.
    """
    known = claims()
    if name not in known:
        raise InputError(unknown("claim", name, known))
    return known[name]


def experiment_path(file: str) -> Path:
    """Where an experiment file of the table lies."""
    return Path(str(files("hemiola.lab.reproduce") / "experiments" / f"{file}.toml"))


def load_experiment(file: str, quick: bool) -> Experiment:
    """An experiment of the table, in its full or quick version."""
    return Experiment.load(experiment_path(file), _changes(file) if quick else None)


def _changes(file: str) -> dict[str, Any]:
    """What the quick version of an experiment changes."""
    smaller = table().quick.get(file, QuickFile())
    changes = dict(smaller.changes)
    if smaller.runs:
        given = tomllib.loads(experiment_path(file).read_text("utf-8"))
        changes["run"] = [run for run in given["run"] if run["name"] in smaller.runs]
    return changes


def _given(file: str, quick: bool, runs: set[str]) -> dict[str, Any]:
    """What an experiment says about some of its runs, but for its title."""
    given = tomllib.loads(experiment_path(file).read_text("utf-8")) | (_changes(file) if quick else {})
    del given["title"]
    return given | {"run": [run for run in given["run"] if run["name"] in runs]}
