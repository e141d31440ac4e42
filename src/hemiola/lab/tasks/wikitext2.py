"""WikiText-2: predict the next word. An example is a window of 35 words with the 35 words that follow each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.models import GPT, LSTM
from hemiola.lab.tasks.readers import read_words
from hemiola.lab.tasks.task import Task, TensorExamples

WINDOW = 35


@cache
def _windows(root: Path) -> tuple[TensorExamples, TensorExamples, int]:
    """Training and test windows, and the number of words in the vocabulary: every word of train.txt, as is usual."""
    words = read_words(root / "wikitext-2/train.txt")
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*words, "<unk>"]))}
    return (
        _examples(root / "wikitext-2/train.txt", words, vocabulary),
        _examples(root / "wikitext-2/test.txt", read_words(root / "wikitext-2/test.txt"), vocabulary),
        len(vocabulary),
    )


def _examples(path: Path, words: list[str], vocabulary: dict[str, int]) -> TensorExamples:
    unknown = vocabulary["<unk>"]
    tokens = torch.from_numpy(np.array([vocabulary.get(word, unknown) for word in words], np.int64))
    count = (len(tokens) - 1) // WINDOW
    if count == 0:
        raise InputError(f"cannot read {path}: {len(words)} words, fewer than one window of {WINDOW + 1}")
    return TensorExamples(
        tokens[: count * WINDOW].view(count, WINDOW), tokens[1 : count * WINDOW + 1].view(count, WINDOW)
    )


def word_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the words of each window."""
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def perplexity(mean_loss: float) -> float:
    """Exp of the mean loss; infinite where a float cannot hold it."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def lstm(*, data: Path | None = None) -> Task:
    """A two-layer LSTM, 32 wide, on WikiText-2: CD-GraB's model."""
    return _next_word("wikitext2-lstm", partial(LSTM, width=32, layers=2), 5.0, data)


def gpt(*, width: int = 64, layers: int = 2, heads: int = 4, data: Path | None = None) -> Task:
    """A small GPT on WikiText-2, at word level."""
    if layers < 1:
        raise InputError(f"layers must be at least 1, got {layers}")
    if heads < 1 or width < 1 or width % heads:
        raise InputError(f"width must be a multiple of heads, got {width} and {heads}")
    model = partial(GPT, width=width, layers=layers, heads=heads, context=WINDOW)
    return _next_word("wikitext2-gpt", model, 0.5, data)


def _next_word(name: str, model: Callable[[int], nn.Module], lr: float, data: Path | None) -> Task:
    """The task for a model that is made for a number of words."""
    train, test, words = _windows(require("wikitext2", data))
    return Task(
        name=name,
        model=partial(model, words),
        train=train,
        test=test,
        losses=word_losses,
        scores=word_losses,
        metric="perplexity",
        higher_is_better=False,
        summarise=perplexity,
        lr=lr,
        batch=16,
    )
