"""From a name, a path or an object to a policy, a task or a cluster.

In an experiment file and in ``--set``: a name of the tables (``"cd-grab"``), a path to one's own (``"package.module:
Name"``, found beside the file), or a table with a ``name`` and options. From Python also an object; every run and seed
gets a copy of it, so that it can serve several. Where it has to be written down it is `described`.
"""

from __future__ import annotations

import copy
import datetime
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from hemiola.clusters.table import CLUSTERS
from hemiola.contracts import AS_GIVEN, Cluster, Order, Pace, Period, TaskLike, Work
from hemiola.errors import InputError, unknown
from hemiola.lab.tasks import load_task
from hemiola.lab.tasks.load import checked_task
from hemiola.options import check_options, option_names
from hemiola.order import ORDERS
from hemiola.own import check_complete, checked_policy, import_path, is_path, members, own_code
from hemiola.pace import PACES
from hemiola.period import PERIODS
from hemiola.plan import ClusterFactory, Plan
from hemiola.wire.exchange import Exchange

Constructors = Mapping[str, Callable[..., Any]]

NAMED = ("task", "cluster", "order", "period", "pace")
"""The keys of an experiment that stand for one of these; a run's table replaces the default's."""

EXAMPLES = {"task": "digits-mlp", "cluster": "simulated", "order": "cd-grab", "period": "adaptive", "pace": "k-async"}

_PLAIN = (str, int, float, bool, datetime.date, datetime.time, type(None))  # what TOML knows, and None
_LIVE = "live"  # the key of a table that describes an object; nobody can type it in


class within:
    """Put the place in front of an `InputError` raised inside."""

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError) and self.place and not str(error).startswith(self.place):
            raise InputError(f"{self.place}: {error}") from error.__cause__


# ------------------------------------------------------------------------------------------------------------ policies


def make_order(given: Any, base: Path) -> Order:
    """A fresh order."""
    name, options = split("order", given)
    order: Order = _make(ORDERS, Order, "order", name, options, base)
    return order


def make_pace(given: Any, base: Path) -> Pace:
    """A fresh pace."""
    name, options = split("pace", given)
    pace: Pace = _make(PACES, Pace, "pace", name, options, base)
    return pace


def make_period(given: Any, base: Path) -> tuple[Period, Exchange]:
    """A fresh period. Its table holds its own options and those of the exchange; an object has only the latter."""
    name, options = split("period", given)
    own = option_names(_constructor(PERIODS, "period", name, base)) if isinstance(name, str) else []
    shared = option_names(Exchange)
    for key in options:
        if key not in own + shared:
            raise InputError(f"period: {unknown('option', key, own + shared)}")
    period: Period = _make(PERIODS, Period, "period", name, {k: v for k, v in options.items() if k in own}, base)
    rest = check_options(Exchange, {k: v for k, v in options.items() if k not in own}, "period")
    with within("period"):
        return period, Exchange(**rest)


def _make(table: Constructors, contract: type, family: str, name: Any, options: dict[str, Any], base: Path) -> Any:
    if not isinstance(name, str):
        if options:
            raise InputError(f"{family}: an object has its options already, got {', '.join(options)} beside it")
        return checked_policy(copied(name), contract, family)
    make = _constructor(table, family, name, base)
    place = f"{family} {name!r}" if is_path(name) else family
    check_complete(make, contract, place)
    checked = check_options(make, options, family)
    if not is_path(name) and isinstance(checked.get("file"), str):
        checked["file"] = str(base / checked["file"])  # beside the experiment file, as the file of a trace is
    with within(family), own_code(place):
        made = make(**checked)
    return checked_policy(made, contract, place)


def _constructor(table: Constructors, family: str, name: str, base: Path) -> Callable[..., Any]:
    if is_path(name):
        return import_path(name, base, family)
    if name not in table:
        raise InputError(f"{family}.name: {unknown(family, name, table)}, and your own as 'package.module:Name'")
    return table[name]


# --------------------------------------------------------------------------------------------------- tasks and clusters


def make_task(given: Any, base: Path, data: Path | None) -> TaskLike:
    """The task; an object is used as it is."""
    name, options = split("task", given)
    if isinstance(name, str):
        return load_task(name, options, data, base)
    if options:
        raise InputError(f"task: an object has its options already, got {', '.join(options)} beside it")
    return checked_task(name, "task")


def make_cluster(given: Any, base: Path, workers: int) -> ClusterFactory:
    """What makes the cluster; an object is used as it is, and may be any function of a plan and its work."""
    name, options = split("cluster", given)
    if not isinstance(name, str):
        if options:
            raise InputError(f"cluster: an object has its options already, got {', '.join(options)} beside it")
        return _checked_factory(name, "cluster")
    make = _constructor(CLUSTERS, "cluster", name, base)
    place = f"cluster {name!r}" if is_path(name) else "cluster"
    checked = check_options(make, options, "cluster")
    with within("cluster"), own_code(place):
        made = make(base, workers, **checked)
    return _checked_factory(made, place)


class _Bare(ClusterFactory):
    """A function of a plan and its work, with the defaults of a factory."""

    def __init__(self, make: Callable[[Plan, Work], Cluster]):
        self.make = make

    def __call__(self, plan: Plan, work: Work) -> Cluster:
        return self.make(plan, work)


def _checked_factory(given: Any, what: str) -> ClusterFactory:
    if inspect.isclass(given):
        raise InputError(
            f"{what}: {given.__name__} is a class, and an object is meant; make one, as in {given.__name__}()"
        )
    if not callable(given):
        raise InputError(f"{what}: {type(given).__name__} lacks {members(ClusterFactory)['__call__']}")
    return cast(ClusterFactory, given) if ClusterFactory in type(given).__mro__ else _Bare(given)


# -------------------------------------------------------------------------------------------------------------- objects


def split(family: str, given: Any) -> tuple[Any, dict[str, Any]]:
    """The name, path or object, and the options beside it."""
    if not isinstance(given, dict):
        name, options = given, {}
    else:
        options = dict(given)
        name = options.pop("name", None)
        if name is None:
            raise InputError(f"{family}: a table needs a name, as in {{ name = {EXAMPLES[family]!r} }}")
        if _LIVE in options:
            raise InputError(
                f"{family}: this run was started from Python with an object of {name}; go on from there, with "
                "hemiola.train(..., resume=True)"
            )
    if not isinstance(name, str) and not is_live(name):
        raise InputError(f"{family}: must be a name, a path 'package.module:Name' or an object, got {name!r}")
    return name, options


def is_live(value: Any) -> bool:
    """Whether this is an object, rather than something that a file can say."""
    return not isinstance(value, (*_PLAIN, list, tuple, dict))


def live_objects(table: Mapping[str, Any]) -> dict[str, Any]:
    """By key, the objects that stand in an experiment for a policy, a task or a cluster."""
    given = {key: table[key] for key in NAMED if key in table}
    names = {key: value.get("name") if isinstance(value, dict) else value for key, value in given.items()}
    return {key: name for key, name in names.items() if is_live(name)}


def check_shared(family: str, given: Any, runs: int) -> None:
    """Refuse an object that cannot be copied where several runs or seeds would share it."""
    try:
        copy.deepcopy(given)
    except Exception as error:  # whatever it holds decides what is raised
        if runs > 1 and family in ("order", "period", "pace"):
            raise InputError(
                f"{family}: {type(given).__name__} cannot be copied ({error}), so it serves one run with one seed, got "
                f"{runs}; give its path 'package.module:Name' instead"
            ) from None


def copied(given: Any) -> Any:
    """A copy for one run; the object itself where it cannot be copied."""
    try:
        return copy.deepcopy(given)
    except Exception:  # see `check_shared`
        return given


def described(value: Any) -> Any:
    """The same in plain values: an object becomes a table that says what it is, for files and comparisons."""
    if isinstance(value, dict):
        name = value.get("name")
        options = {key: described(each) for key, each in value.items()}
        return {**options, **options["name"]} if is_live(name) else options
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if not is_live(value):
        return value
    own = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    inside = {} if own is value else getattr(value, "__dict__", {})
    attributes = {key: each for key, each in inside.items() if isinstance(each, _PLAIN) and key != AS_GIVEN}
    return {"name": f"{own.__module__}:{own.__qualname__}", _LIVE: attributes}
