"""GLUE: classify a sentence, or a pair of sentences; as logistic regression on frozen embeddings or by fine-tuning.

SST-2: is a snippet of a film review positive? CoLA: is a sentence grammatical? MRPC: do two sentences say the same?
RTE: does the second follow from the first? Test examples are those of ``dev.tsv``; the labels of GLUE's own test sets
are not public. The metric is accuracy, also for CoLA, whose usual one (Matthews correlation) is no mean over examples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.cache import cache_folder, keep_array, kept_array
from hemiola.errors import InputError
from hemiola.lab.tasks import minilm
from hemiola.lab.tasks.files import SETS, require
from hemiola.lab.tasks.readers import read_tsv, reading
from hemiola.lab.tasks.task import Task, TensorExamples, logistic_task

GlueTask = Literal["sst2", "cola", "mrpc", "rte"]
LONGEST = 128  # tokens of a sentence that is embedded; those of SST-2 have at most 66


@dataclass(frozen=True)
class _Form:
    """How the files of one task look: folder, columns of the texts and of the label, whether there is a header."""

    folder: str
    texts: tuple[int, ...]
    label: int
    header: bool
    labels: tuple[str, str] = ("0", "1")


FORMS: dict[str, _Form] = {
    "sst2": _Form("SST-2", (0,), 1, True),
    "cola": _Form("CoLA", (3,), 1, False),
    "mrpc": _Form("MRPC", (3, 4), 0, True),
    "rte": _Form("RTE", (1, 2), 3, True, ("entailment", "not_entailment")),
}


def _read(root: Path, task: str, part: str) -> tuple[list[tuple[str, ...]], Tensor]:
    """The texts and labels of ``part`` (train or dev)."""
    form = FORMS[task]
    path = root / f"glue/{form.folder}/{part}.tsv"
    rows = read_tsv(path, (*form.texts, form.label), form.header)
    strange = next((row[-1] for row in rows if row[-1] not in form.labels), None)
    if strange is not None:
        raise InputError(f"cannot read {path}: label {strange!r} is not one of {', '.join(form.labels)}")
    return [row[:-1] for row in rows], torch.tensor([form.labels.index(row[-1]) for row in rows])


# ------------------------------------------------------------------------------------------- frozen embeddings


class Embedded:
    """Sentences as their embeddings, which are computed when they are first asked for and kept in the cache folder.

    All 67,349 sentences of SST-2 take a few minutes once, and 100 MB.
    """

    def __init__(self, root: Path, part: str, count: int | None) -> None:
        self.root, self.part = root, part
        texts, targets = _read(root, "sst2", part)
        self.texts, self.targets = texts[:count], targets[:count]
        self._inputs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these examples."""
        if self._inputs is None:
            self._inputs = torch.from_numpy(self._embeddings())
        rows = torch.from_numpy(indices)
        return self._inputs.index_select(0, rows), self.targets.index_select(0, rows)

    def labels(self) -> np.ndarray:
        """0 for negative, 1 for positive."""
        return self.targets.numpy()

    def _embeddings(self) -> np.ndarray:
        """Of mean square 1 a feature, so that learning rates are of the usual size."""
        digest = hashlib.sha256(b"sst2 1")
        for name in (f"glue/SST-2/{self.part}.tsv", *SETS["minilm"].files):
            with reading(self.root / name):
                digest.update((self.root / name).read_bytes())
        path = cache_folder() / "embeddings" / f"{digest.hexdigest()}-{len(self)}.npy"
        found = kept_array(path, len(self))
        if found is None:
            pieces = minilm.tokenizer(self.root)
            found = minilm.embed(self.root, [pieces.encode(text, LONGEST) for text in self.texts])
            found *= np.float32(found.shape[1] ** 0.5)
            keep_array(path, found)
        return found


@cache
def _embedded(root: Path, count: int | None) -> tuple[Embedded, Embedded]:
    return Embedded(root, "train", count), Embedded(root, "dev", None)


def sst2_logistic(*, l2: float = 1e-4, examples: int = 0, data: Path | None = None) -> Task:
    """Logistic regression on SST-2's sentences as MiniLM embeds them; convex while l2 > 0.

    ``examples``: use only the first so many training sentences; 0 for all.
    """
    _check_examples(examples)
    root = require("minilm", require("sst2", data))
    train, test = _embedded(root, examples or None)
    return logistic_task("sst2-logistic", train, test, minilm.width(root), l2, lr=0.05, batch=1)


def _check_examples(examples: int) -> None:
    if examples < 0:
        raise InputError(f"examples must be at least 0, got {examples}")


# ------------------------------------------------------------------------------------------------- fine-tuning


class Tokens(TensorExamples):
    """Texts as (N, T) tokens; a batch is as wide as its longest text."""

    def __init__(self, tokens: Tensor, targets: Tensor, pad: int) -> None:
        super().__init__(tokens, targets)
        self.lengths = (tokens != pad).sum(dim=1)

    def scores(self) -> np.ndarray:
        """Tokens of each text: short sentences are easier."""
        return self.lengths.numpy()

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these examples."""
        inputs, targets = super().batch(indices)
        return inputs[:, : int(self.lengths[torch.from_numpy(indices)].max())], targets


class Classifier(nn.Module):
    """A pretrained BERT and a new linear layer on top."""

    def __init__(self, root: Path, trained: int | None) -> None:
        super().__init__()
        self.bert = minilm.pretrained(root)
        if trained is not None:
            self.bert.requires_grad_(False)
            for layer in list(self.bert.layers)[len(self.bert.layers) - trained :]:
                layer.requires_grad_(True)
        self.head = nn.Linear(minilm.width(root), 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens to (B, 2) scores."""
        scores: Tensor = self.head(self.bert(tokens))
        return scores


@cache
def _tokens(root: Path, task: str, longest: int) -> tuple[Tokens, Tokens]:
    pieces = minilm.tokenizer(root)
    parts = []
    for part in ("train", "dev"):
        texts, targets = _read(root, task, part)
        encoded = [pieces.encode(text, longest) for text in texts]
        parts.append(Tokens(minilm.padded(encoded, pieces.pad), targets, pieces.pad))
    return parts[0], parts[1]


def glue_minilm(
    *,
    task: GlueTask = "sst2",
    trained: Literal["all"] | int = "all",
    tokens: int = 64,
    examples: int = 0,
    data: Path | None = None,
) -> Task:
    """Fine-tune MiniLM on a task of GLUE.

    ``trained``: how many of the last layers learn beside the head, or all with the embeddings. ``tokens``: longer texts
    are cut. ``examples``: use only the first so many training examples; 0 for all.
    """
    _check_examples(examples)
    root = require("minilm", require(task, data))
    layers, places = minilm.size(root)
    if trained != "all" and not 0 <= trained <= layers:
        raise InputError(f'trained must be "all" or a number of layers from 0 to {layers}, got {trained}')
    if not 8 <= tokens <= places:
        raise InputError(f"tokens must be from 8 to {places}, got {tokens}")
    train, test = _tokens(root, task, tokens)
    if examples:
        train = Tokens(train.inputs[:examples], train.targets[:examples], minilm.tokenizer(root).pad)
    model = partial(Classifier, root, None if trained == "all" else trained)
    return Task(name="glue-minilm", model=model, train=train, test=test, lr=0.01, batch=16)
