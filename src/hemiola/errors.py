"""The one exception a user's mistake turns into, and the warning of the sampler."""

from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that stands on its own: what was wrong, the value, and what is allowed. The command
    line prints it and exits with code 2; nothing else prints a message without a traceback.
    """


def raised_at(error: BaseException) -> str:
    """Where an exception left the user's own code: `` (own_task.py:12)``; empty where none of it was on the way.

    Frames of hemiola, of installed packages and of Python itself are not the user's.
    """
    import sysconfig
    import traceback
    from pathlib import Path

    paths = sysconfig.get_paths()
    theirs = [Path(__file__).parent, *(Path(paths[key]) for key in ("purelib", "platlib", "stdlib"))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_file() and not any(file.is_relative_to(folder) for folder in theirs):
            return f" ({file.name}:{frame.lineno})"
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    return ""


class SamplerWarning(UserWarning):
    """The order does not learn from all that was trained on: other examples than handed out, or layers left out."""


def unknown(what: str, name: object, allowed: Iterable[str]) -> str:
    """The one wording for a name that is not there.

    ``unknown pace 'k-asink'; did you mean 'k-async'? Known: k-sync, k-async``
    """
    known = list(allowed)
    hint = nearest(name, known) if isinstance(name, str) else ""
    return f"unknown {what} {name!r}{hint or '.'} Known: {', '.join(known) or 'none'}"


def nearest(name: str, allowed: list[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest allowed name, or an empty string when none is close."""
    import difflib

    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
