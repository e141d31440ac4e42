"""The example of an own task works, and the documentation shows exactly it and the tasks there are."""

from pathlib import Path

import numpy as np
import torch

from hemiola.lab.tasks import TASKS, load_task
from hemiola.lab.tasks.files import SETS

ROOT = Path(__file__).parents[3]


def test_the_example_is_a_task_and_learns(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    task = load_task("own_task:wine", {"hidden": 8})
    assert (len(task.train), len(task.test)) == (128, 50)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    for start in range(0, 5 * 128, task.batch):
        inputs, targets = task.train.batch(np.arange(start, start + task.batch) % 128)
        optimizer.zero_grad()
        task.losses(model(inputs), targets).mean().backward()
        optimizer.step()
    inputs, targets = task.test.batch(np.arange(50))
    assert task.scores(model(inputs), targets).mean() > 0.9


def test_the_documentation_shows_the_example_and_every_task():
    text = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    assert (ROOT / "examples/own_task.py").read_text(encoding="utf-8") in text
    for name, entry in TASKS.items():
        assert f"| `{name}` | {entry.model} | {entry.parameters:,} | {entry.train:,} / {entry.test:,} |" in text
    for name in SETS:
        assert f"| {name} |" in text
