"""Data-parallel PyTorch training whose order, period and pace measure and adapt.

Public names are loaded when they are first used, so that ``hemiola --help`` does not wait for torch, and so that one's
own loop needs torch and NumPy only. Type checkers see plain imports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hemiola.adapters import accelerate as accelerate
    from hemiola.adapters import ddp as ddp
    from hemiola.adapters import lightning as lightning
    from hemiola.adapters import loggers as loggers
    from hemiola.adapters import torchft as torchft
    from hemiola.adapters import transformers as transformers
    from hemiola.contracts import Arrivals as Arrivals
    from hemiola.contracts import Averaging as Averaging
    from hemiola.contracts import Batch as Batch
    from hemiola.contracts import Cluster as Cluster
    from hemiola.contracts import Order as Order
    from hemiola.contracts import Pace as Pace
    from hemiola.contracts import Period as Period
    from hemiola.contracts import Report as Report
    from hemiola.contracts import Stint as Stint
    from hemiola.contracts import Update as Update
    from hemiola.contracts import Visit as Visit
    from hemiola.contracts import Work as Work
    from hemiola.errors import InputError as InputError
    from hemiola.errors import SamplerWarning as SamplerWarning
    from hemiola.lab.advise.advice import Advice as Advice
    from hemiola.lab.advise.race import advise as advise
    from hemiola.lab.api import train as train
    from hemiola.lab.compared import Results as Results
    from hemiola.lab.models import load_model as load_model
    from hemiola.lab.report import write_figure as write_figure
    from hemiola.lab.report import write_report as write_report
    from hemiola.lab.results import Result as Result
    from hemiola.lab.tasks import Task as Task
    from hemiola.lab.tasks import load_task as load_task
    from hemiola.loops.averager import Averager as Averager
    from hemiola.loops.loader import OrderedLoader as OrderedLoader
    from hemiola.loops.sampler import OrderedSampler as OrderedSampler
    from hemiola.order import CDGraB as CDGraB
    from hemiola.order import GraB as GraB
    from hemiola.order import IDGraB as IDGraB
    from hemiola.order import IDPairGraB as IDPairGraB
    from hemiola.order import InOrder as InOrder
    from hemiola.order import RandomReshuffling as RandomReshuffling
    from hemiola.order import Scored as Scored
    from hemiola.order import ShuffleOnce as ShuffleOnce
    from hemiola.pace import KAsync as KAsync
    from hemiola.pace import KBatchAsync as KBatchAsync
    from hemiola.pace import KBatchSync as KBatchSync
    from hemiola.pace import KSync as KSync
    from hemiola.peers import RankLostError as RankLostError
    from hemiola.period import FDA as FDA
    from hemiola.period import QSR as QSR
    from hemiola.period import Adaptive as Adaptive
    from hemiola.period import Budget as Budget
    from hemiola.period import Clocked as Clocked
    from hemiola.period import Constant as Constant
    from hemiola.period import Decreasing as Decreasing
    from hemiola.period import Full as Full
    from hemiola.period import PostLocal as PostLocal
    from hemiola.plan import ClusterFactory as ClusterFactory
    from hemiola.plan import Plan as Plan
    from hemiola.timing.predict import predict as predict
    from hemiola.timing.simulate import simulate_timing as simulate_timing
    from hemiola.wire.outer import Outer as Outer

__version__ = "0.1.0"

# Every name above and where it comes from; a test keeps the two lists the same.
_PUBLIC = {
    "Adaptive": "hemiola.period",
    "Arrivals": "hemiola.contracts",
    "Advice": "hemiola.lab.advise.advice",
    "Averager": "hemiola.loops.averager",
    "Averaging": "hemiola.contracts",
    "Batch": "hemiola.contracts",
    "Budget": "hemiola.period",
    "CDGraB": "hemiola.order",
    "Clocked": "hemiola.period",
    "FDA": "hemiola.period",
    "Cluster": "hemiola.contracts",
    "ClusterFactory": "hemiola.plan",
    "Constant": "hemiola.period",
    "Decreasing": "hemiola.period",
    "Full": "hemiola.period",
    "GraB": "hemiola.order",
    "IDGraB": "hemiola.order",
    "IDPairGraB": "hemiola.order",
    "InOrder": "hemiola.order",
    "InputError": "hemiola.errors",
    "KAsync": "hemiola.pace",
    "KBatchAsync": "hemiola.pace",
    "KBatchSync": "hemiola.pace",
    "KSync": "hemiola.pace",
    "Order": "hemiola.contracts",
    "OrderedLoader": "hemiola.loops.loader",
    "OrderedSampler": "hemiola.loops.sampler",
    "Outer": "hemiola.wire.outer",
    "Pace": "hemiola.contracts",
    "Period": "hemiola.contracts",
    "Plan": "hemiola.plan",
    "PostLocal": "hemiola.period",
    "QSR": "hemiola.period",
    "RandomReshuffling": "hemiola.order",
    "RankLostError": "hemiola.peers",
    "Report": "hemiola.contracts",
    "Result": "hemiola.lab.results",
    "Results": "hemiola.lab.compared",
    "SamplerWarning": "hemiola.errors",
    "Scored": "hemiola.order",
    "ShuffleOnce": "hemiola.order",
    "Stint": "hemiola.contracts",
    "Task": "hemiola.lab.tasks",
    "Update": "hemiola.contracts",
    "Visit": "hemiola.contracts",
    "Work": "hemiola.contracts",
    "load_model": "hemiola.lab.models",
    "advise": "hemiola.lab.advise.race",
    "load_task": "hemiola.lab.tasks",
    "predict": "hemiola.timing.predict",
    "simulate_timing": "hemiola.timing.simulate",
    "train": "hemiola.lab.api",
    "write_figure": "hemiola.lab.report",
    "write_report": "hemiola.lab.report",
}

# Modules for other people's frameworks: ``hemiola.lightning.Ordered``, ``hemiola.loggers.tensorboard``.
_ADAPTERS = ("accelerate", "ddp", "lightning", "loggers", "torchft", "transformers")

__all__ = ["__version__", *_PUBLIC, *_ADAPTERS]

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> Any:
        from hemiola.extras import naming_the_extra

        if name in _ADAPTERS:
            with naming_the_extra(f"hemiola.{name}"):
                return import_module(f"hemiola.adapters.{name}")
        if name not in _PUBLIC:
            raise AttributeError(f"module 'hemiola' has no attribute {name!r}")
        with naming_the_extra(f"hemiola.{name}"):
            return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
