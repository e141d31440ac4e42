"""Reference workloads and their data, and the way to bring your own."""

from hemiola.tasks.load import TASKS, TaskEntry, TaskRecord, describe_tasks, load_task
from hemiola.tasks.optimum import objective, optimum
from hemiola.tasks.task import DatasetExamples, Task, TensorExamples, as_examples

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
