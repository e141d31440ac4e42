"""WikiText-2: predict the next word. An example is a window of 35 words with the 35 words that follow each of them."""

from __future__ import annotations

import math
from collections import Counter
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
from hemiola.lab.tasks.task import Task, TensorExamples, first

WINDOW = 35


@cache
def _windows(root: Path, known: int = 0) -> tuple[TensorExamples, TensorExamples, int]:
    """Training and test windows, and the number of words in the vocabulary.

    The vocabulary is every word of train.txt, as is usual, or the ``known`` most frequent and ``<unk>``.
    """
    words = read_words(root / "wikitext-2/train.txt")
    kept = [word for word, _ in Counter(words).most_common(known)] if known else words
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*kept, "<unk>"]))}
    return (
        _examples(root / "wikitext-2/train.txt", words, vocabulary),
        _examples(root / "wikitext-2/test.txt", read_words(root / "wikitext-2/test.txt"), vocabulary),
        len(vocabulary),
    )


def _examples(path: Path, words: list[str], vocabulary: dict[str, int]) -> TensorExamples:
    unknown = vocabulary["<unk>"]
    return windows(
        path, torch.from_numpy(np.array([vocabulary.get(word, unknown) for word in words], np.int64)), WINDOW
    )


def windows(path: Path, tokens: Tensor, length: int) -> TensorExamples:
    """Windows of so many tokens, one after the other, with the tokens that follow each of theirs."""
    count = (len(tokens) - 1) // length
    if count == 0:
        raise InputError(f"cannot read {path}: {len(tokens)} tokens, fewer than one window of {length + 1}")
    return TensorExamples(
        tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(count, length)
    )


def token_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens of each window."""
    losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(dim=1)


def perplexity(mean_loss: float) -> float:
    """Exp of the mean loss; infinite where a float cannot hold it."""
    return math.exp(mean_loss) if mean_loss < 700 else math.inf


def lstm(*, examples: int = 0, words: int = 0, data: Path | None = None) -> Task:
    """A two-layer LSTM, 32 wide, on WikiText-2: CD-GraB's model.

    ``examples``: use only the first so many training windows; ``words``: know only the so many most frequent words; 0
    for all.
    """
    if min(examples, words) < 0:
        raise InputError(f"examples and words must be at least 0, got {examples} and {words}")
    train, test, words = _windows(require("wikitext2", data), words)
    model = partial(LSTM, words, width=32, layers=2)
    return next_token("wikitext2-lstm", model, first(train, examples), test, lr=5.0)


def gpt(*, width: int = 64, layers: int = 2, heads: int = 4, data: Path | None = None) -> Task:
    """A small GPT on WikiText-2, at word level."""
    check_gpt(width, layers, heads)
    train, test, words = _windows(require("wikitext2", data))
    model = partial(GPT, words, width=width, layers=layers, heads=heads, context=WINDOW)
    return next_token("wikitext2-gpt", model, train, test, lr=0.5)


def check_gpt(width: int, layers: int, heads: int) -> None:
    """Refuse a GPT that cannot be."""
    if layers < 1:
        raise InputError(f"layers must be at least 1, got {layers}")
    if heads < 1 or width < 1 or width % heads:
        raise InputError(f"width must be a multiple of heads, got {width} and {heads}")


def next_token(
    name: str, model: Callable[[], nn.Module], train: TensorExamples, test: TensorExamples, lr: float
) -> Task:
    """Predicting the next token of windows of text."""
    return Task(
        name=name,
        model=model,
        train=train,
        test=test,
        losses=token_losses,
        scores=token_losses,
        metric="perplexity",
        higher_is_better=False,
        summarise=perplexity,
        lr=lr,
        batch=16,
    )
