"""Data-parallel PyTorch training whose order, period and pace measure and adapt.

Public names are loaded when they are first used, so that ``hemiola --help`` does not wait for torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "InputError": "hemiola.errors",
    "Task": "hemiola.tasks",
    "load_task": "hemiola.tasks",
    "train": "hemiola.runs",
    "Result": "hemiola.runs",
    "OrderedSampler": "hemiola.order.sampler",
    "SamplerWarning": "hemiola.errors",
    "CDGraB": "hemiola.order",
    "GraB": "hemiola.order",
    "IDGraB": "hemiola.order",
    "IDPairGraB": "hemiola.order",
    "Averager": "hemiola.period.averager",
    "RankLostError": "hemiola.period.roster",
    "Full": "hemiola.period",
    "Constant": "hemiola.period",
    "Adaptive": "hemiola.period",
    "Decreasing": "hemiola.period",
    "PostLocal": "hemiola.period",
    "QSR": "hemiola.period",
    "Budget": "hemiola.period",
    "write_report": "hemiola.report",
    "write_figure": "hemiola.report",
    "simulate_timing": "hemiola.clusters.timing",
    "predict": "hemiola.clusters.predict",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hemiola' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
