"""What ``pip install hemiola`` leaves out, and the one line that says how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# The package that cannot be imported -> the extra of pyproject.toml that brings it.
EXTRAS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "mlflow": "mlflow",
    "pydantic": "lab",
    "ray": "ray",
    "rich": "lab",
    "scipy": "lab",
    "sklearn": "lab",
    "tensorboard": "tensorboard",
    "torchft": "torchft",
    "transformers": "transformers",
    "typer": "lab",
    "vl_convert": "lab",
    "wandb": "wandb",
}


class MissingExtraError(ImportError):
    """A part of hemiola was used whose packages are not installed."""


@contextmanager
def naming_the_extra(what: str) -> Iterator[None]:
    """Turn a failed import of an optional package into one line about ``what`` and the extra it needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingExtraError(
            f"{what} needs {package}, which is not installed; pip install 'hemiola[{EXTRAS[package]}]' brings it",
            name=error.name,
        ) from None
