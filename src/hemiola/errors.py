"""The one exception a user's mistake turns into, and the warning of the sampler."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message is one line that stands on its own: what was wrong, the value, and what is allowed. The command
    line prints it and exits with code 2; nothing else prints a message without a traceback.
    """


class SamplerWarning(UserWarning):
    """The order does not learn from all that was trained on: other examples than handed out, or layers left out."""


def nearest(name: str, allowed: list[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest allowed name, or an empty string when none is close."""
    import difflib

    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
