"""What users bring: an object is checked against its contract member by member, a path is imported.

A class that subclasses `hemiola.Order`, `hemiola.Period` or `hemiola.Pace` inherits a default for everything but one
method. A class of other descent must have every member that its contract does not list in `CAPABILITIES`, and is given
the defaults of those.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.machinery
import inspect
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hemiola.contracts import CAPABILITIES, Order, Policy
from hemiola.errors import InputError, raised_at, unknown

# ------------------------------------------------------------------------------------------------- objects and classes


def checked_policy(given: Any, family: type, what: str) -> Any:
    """Return ``given`` if it is a policy of this family; what it may do without is added to it.

    Args:
        given: Anything.
        family: `Order`, `Period` or `Pace`.
        what: Its place in messages, e.g. ``"order"``.

    Raises:
        InputError: naming the first member that is missing or takes other arguments, with its signature.
    """
    name = family.__name__
    if inspect.isclass(given):
        raise InputError(
            f"{what}: {given.__name__} is a class, and an object is meant; make one, as in {given.__name__}()"
        )
    if isinstance(given, str | int | float | list | tuple | dict | None):
        raise InputError(f"{what}: must be an object such as a hemiola.{name}, got {given!r}")
    own: Any = type(given)
    descends = family in own.__mro__
    if not descends:
        present = set(dir(given))
        for member, written in members(family).items():
            if member not in CAPABILITIES[family] and member not in present:
                raise InputError(
                    f"{what}: {own.__name__} lacks {written}; subclass hemiola.{name} for defaults of most members"
                )
    _check_arguments(given, family, what)
    try:
        given.__class__ = own if descends else with_defaults(own, family)
    except TypeError:
        raise InputError(f"{what}: {own.__name__} must be a subclass of hemiola.{name}, or a plain class") from None
    return given


def check_complete(made: Callable[..., Any], family: type, what: str) -> None:
    """Refuse a class that has not got all that its contract requires, before Python does so in other words."""
    if isinstance(made, ABCMeta) and inspect.isabstract(made):
        missing = next(name for name in members(family) if name in made.__abstractmethods__)
        raise InputError(f"{what}: {made.__name__} lacks {members(family)[missing]}")


def checked_sequence(order: Order, worker: int, epoch: int, size: int) -> np.ndarray:
    """The order's sequence for a worker of ``size`` units; whatever follows relies on it to visit every unit once.

    Raises:
        InputError: naming order, worker and epoch, and saying what is wrong with the sequence.
    """
    sequence = np.asarray(order.sequence(worker, epoch))
    what = f"order {order.kind!r}, worker {worker}, epoch {epoch}"
    if sequence.ndim != 1 or sequence.dtype.kind not in "iu":
        raise InputError(f"{what}: sequence must give whole numbers, got {sequence.dtype} of shape {sequence.shape}")
    if len(sequence) != size:
        raise InputError(f"{what}: sequence must visit each of {size} units once, got {len(sequence)} visits")
    outside = sequence[(sequence < 0) | (sequence >= size)]
    if len(outside):
        raise InputError(f"{what}: sequence must be a permutation of 0 to {size - 1}, got {outside[0]} in it")
    counts = np.bincount(sequence, minlength=size)
    if counts.max(initial=1) > 1:
        raise InputError(
            f"{what}: sequence must visit each of {size} units once, got unit {counts.argmax()} {counts.max()} times"
        )
    return sequence


@functools.cache
def members(family: type) -> Mapping[str, str]:
    """Every member of a contract by name, as it is written: ``k(self) -> int``, ``unit: int``."""
    found: dict[str, str] = {}
    for part in family.__mro__:
        if part in (object, Protocol) or part.__module__ == "typing":
            continue
        for name, hint in vars(part).get("__annotations__", {}).items():
            found[name] = f"{name}: {hint[9:-1] if hint.startswith('ClassVar[') else hint}"
        for name, member in vars(part).items():
            if isinstance(member, property) and member.fget is not None:
                found[name] = f"{name}: {member.fget.__annotations__['return']}"
            elif inspect.isfunction(member) and (not name.startswith("_") or name == "__call__"):
                found[name] = f"{name}{inspect.signature(member)}".replace("'", "")
    return found


def _check_arguments(given: object, family: type, what: str) -> None:
    for name, written in members(family).items():
        meant = vars(family).get(name) or vars(Policy).get(name)
        if not inspect.isfunction(meant) or name in CAPABILITIES[family] - set(dir(given)):
            continue
        method = inspect.getattr_static(given, name)
        method = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if not callable(method):
            raise InputError(f"{what}: {type(given).__name__}.{name} must be a method, {written}, got {method!r}")
        if inspect.isfunction(method) and not _takes(type(given), name, len(inspect.signature(meant).parameters) - 1):
            raise InputError(
                f"{what}: {type(given).__name__}.{name}{inspect.signature(method)} must take the arguments of {written}"
            )


def _takes(own: type, name: str, arguments: int) -> bool:
    """Whether the method can be called with so many positional arguments."""
    method = inspect.getattr_static(own, name, None)
    if not inspect.isfunction(method):
        return True
    try:
        inspect.signature(method).bind(*[None] * (arguments + 1))
    except TypeError:
        return False
    return True


@functools.cache
def with_defaults(own: Any, family: type) -> Any:
    """The class with the defaults of its contract behind it; it goes by the same name and can be pickled like it."""

    def reduce(self: Any, protocol: Any) -> Any:
        build, arguments, *rest = super(made, self).__reduce_ex__(protocol)
        if build is copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed leaves it out
            return _rebuild, (own, family, *arguments[1:]), *rest
        return build, arguments, *rest

    facts = {"__module__": own.__module__, "__doc__": own.__doc__, "__reduce_ex__": reduce}
    made: Any = type(own.__name__, (own, family), facts)
    return made


def _rebuild(own: type, family: type, *arguments: Any) -> Any:
    made = with_defaults(own, family)
    return made.__new__(made, *arguments)


# --------------------------------------------------------------------------------------------------------------- paths


def is_path(name: object) -> bool:
    """Whether a name in an experiment file is a path, ``"package.module:Name"``."""
    return isinstance(name, str) and ":" in name


def import_path(path: str, base: Path, what: str) -> Callable[..., Any]:
    """Import what ``"package.module:Name"`` says, from the folder ``base`` if it is there.

    The folders stay on `sys.path`: the module may import its neighbours later, and Ray tells its workers the path.

    Args:
        path: As in the experiment file.
        base: The folder of the experiment file; the current folder is the next, then where Python looks.
        what: Its family in messages: ``"task"``, ``"order"``.
    """
    module_name, _, attribute = path.partition(":")
    what = f"{what} {path!r}"
    if not module_name or not attribute:
        raise InputError(f"{what} must be written 'package.module:name'")
    folders = list(dict.fromkeys((str(base), os.getcwd())))
    sys.path[:] = folders + [entry for entry in sys.path if entry not in folders]
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = module_name == error.name or module_name.startswith(f"{error.name}.")
        missing = "" if own else f" (it needs {error.name!r}, which is not installed)"
        raise InputError(f"{what}: cannot import {module_name!r} from {' or '.join(folders)}{missing}") from error
    except Exception as error:
        raise InputError(f"{what}: importing {module_name!r} raised {_one_line(error)}{raised_at(error)}") from error
    _check_origin(what, module_name, base)
    if attribute not in vars(module):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{what}: in {module_name!r}, {unknown('name', attribute, public)}")
    found: Callable[..., Any] = vars(module)[attribute]
    if not callable(found):
        raise InputError(f"{what}: {attribute!r} must be a class or a function, got {type(found).__name__}")
    return found


def _check_origin(what: str, module_name: str, base: Path) -> None:
    """Refuse a module of the same name that was imported from elsewhere before: it would be another one."""
    top = module_name.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [str(base)])
    loaded = sys.modules[top].__spec__
    if here is None or here.origin is None or loaded is None or loaded.origin is None:
        return
    if Path(loaded.origin).exists() and not Path(loaded.origin).samefile(here.origin):
        raise InputError(
            f"{what}: {top!r} was imported from {loaded.origin} before, so {here.origin} cannot be; rename one of them"
        )


@contextmanager
def own_code(what: str, how: str = "raised") -> Iterator[None]:
    """An exception of the user's code becomes one line that says where it was raised."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} {how} {_one_line(error)}{raised_at(error)}") from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
