"""Tiny Shakespeare: predict the next character. An example is a window of characters with those that follow each."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import GPT
from hemiola.lab.tasks.readers import reading
from hemiola.lab.tasks.task import Task, TensorExamples
from hemiola.lab.tasks.wikitext2 import check_gpt, next_token, windows

TRAINED_ON = 0.9  # the first nine tenths of the text, as usual


@cache
def _text(root: Path) -> tuple[torch.Tensor, int]:
    """The text as numbers of characters, and how many there are."""
    path = root / "tiny-shakespeare/input.txt"
    with reading(path):
        text = path.read_text("utf-8")
    characters = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.from_numpy(np.array([characters[each] for each in text], np.int64)), len(characters)


@cache
def _parts(root: Path, context: int) -> tuple[TensorExamples, TensorExamples]:
    text, _ = _text(root)
    path, cut = root / "tiny-shakespeare/input.txt", int(TRAINED_ON * len(text))
    return windows(path, text[:cut], context), windows(path, text[cut:], context)


def gpt(*, width: int = 64, layers: int = 2, heads: int = 4, context: int = 64, data: Path | None = None) -> Task:
    """A small GPT on the characters of Shakespeare's plays; ``context``: characters in a window."""
    check_gpt(width, layers, heads)
    if context < 1:
        raise InputError(f"context must be at least 1, got {context}")
    root = require("tiny-shakespeare", data)
    train, test = _parts(root, context)
    model = partial(GPT, _text(root)[1], width=width, layers=layers, heads=heads, context=context)
    return next_token("shakespeare-gpt", model, train, test, lr=0.3)
