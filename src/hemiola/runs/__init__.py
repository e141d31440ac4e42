"""Running experiments: cells in parallel, a folder that survives interruption, results."""

from hemiola.runs.api import train
from hemiola.runs.compared import Results
from hemiola.runs.execute import Outcome, run_experiment
from hemiola.runs.results import Result

__all__ = ["Outcome", "Result", "Results", "run_experiment", "train"]
