"""The one exception a user's mistake turns into, and the warning of the sampler."""

import re
from collections.abc import Iterable

LONGEST = 200  # characters of a word in a message; a longer value is not read by anyone


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that stands on its own: what was wrong, the value, and what is allowed. The command
    line prints it and exits with code 2; nothing else prints a message without a traceback.
    """

    def __str__(self) -> str:
        return re.sub(rf"\S{{{LONGEST},}}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", super().__str__())


class FailedElsewhere(RuntimeError):
    """Something failed in another process: the message stands on its own, the traceback there comes as text."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message, trace)  # both, so that it can be pickled
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


def told(error: BaseException) -> str:
    """An exception in one line: its own words where they stand on their own, else with its kind and place."""
    if isinstance(error, InputError | FailedElsewhere):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}{raised_at(error)}"


def raised_at(error: BaseException) -> str:
    """Where an exception left the user's own code: `` (own_task.py:12: x = x / 0)``; empty where it never was there.

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
            code = frame.line or ""
            return f" ({file.name}:{frame.lineno}: {code if len(code) <= 80 else code[:77] + '...'})"
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
