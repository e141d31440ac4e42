"""``hemiola new DIR``: an experiment file and a task of one's own, with comments, that run as they are."""

from __future__ import annotations

from pathlib import Path

from hemiola.errors import InputError

EXPERIMENT = """\
# Run it:   hemiola run experiment.toml --out results
# Every key is in docs/experiments.md; `hemiola policies` lists what order, period and pace can be.

task    = "my_task:digits"          # the function `digits` in my_task.py; or a reference task, see `hemiola tasks`
workers = 8
batch   = 4                         # examples per worker and local step
seeds   = [0, 1, 2]                 # ranking runs takes at least three
stop    = { epochs = 10 }           # or { updates = N }, or { seconds = T } of cluster time

[optimizer]                         # a class of torch.optim and its arguments
name = "SGD"
lr   = 0.1

[cluster]                           # a simulated one: real gradients, a virtual clock
name  = "simulated"
delay = "shifted-exponential(0.01, 0.01)"                  # seconds of a local step: 10 ms, and 10 ms of bad luck
link  = { bandwidth = "100 Mbit/s", latency = "1 ms" }

# [sweep]                           # every run at every value; the report shows the whole curve
# "optimizer.lr" = [0.05, 0.1, 0.2]

[[run]]                             # the first run is what the others are compared with
name = "ordinary"                   # random order, an exchange at every step, every update waits for all

[[run]]
name  = "order"
order = { name = "cd-grab" }        # balance gradients to find a better order

[[run]]
name   = "period"
period = { name = "constant", p = 4 }                      # average every four local steps

[[run]]
name = "pace"
pace = { name = "k-async", k = 6 }  # an update waits for the first six workers
"""

TASK = '''\
"""A task of your own: data, a model, a loss and a metric. Replace what is inside `digits` with yours."""

import torch
from sklearn.datasets import load_digits

from hemiola.lab.tasks import Task


def digits(hidden: int = 32) -> Task:
    """Keyword arguments are the task's options: task = { name = "my_task:digits", hidden = 64 }."""
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16, dtype=torch.float32)
    targets = torch.tensor(labels)
    return Task(
        name="my digits",
        # A function that returns a new model; hemiola has seeded torch's generator before it calls it.
        model=lambda: torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)),
        train=(inputs[:1500], targets[:1500]),
        test=(inputs[1500:], targets[1500:]),
        lr=0.1,  # used where the experiment file says nothing else
        batch=4,
    )
'''

FILES = {"experiment.toml": EXPERIMENT, "my_task.py": TASK}


def write_new(folder: Path) -> list[Path]:
    """Write the files into a folder, which is made if it is missing; returns their paths.

    Raises:
        InputError: One of the files is there already, or the folder cannot be written; then nothing is written.
    """
    paths = {folder / name: text for name, text in FILES.items()}
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise InputError(f"{', '.join(there)}: already there; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from None
    return list(paths)
