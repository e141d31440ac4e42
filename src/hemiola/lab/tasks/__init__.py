"""Reference workloads and their data, and the way to bring your own."""

from hemiola.lab.tasks.load import TASKS, TaskEntry, TaskRecord, describe_tasks, load_task
from hemiola.lab.tasks.task import DatasetExamples, Task, TensorExamples, as_examples
from hemiola.training.optimum import objective, optimum

__all__ = [
    "TASKS",
    "DatasetExamples",
    "Task",
    "TaskEntry",
    "TaskRecord",
    "TensorExamples",
    "as_examples",
    "describe_tasks",
    "load_task",
    "objective",
    "optimum",
]
