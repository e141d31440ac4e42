"""MiniLM-L6: a pretrained BERT of 6 layers, 384 wide, in plain PyTorch, with its weights read from safetensors.

Weights: sentence-transformers/all-MiniLM-L6-v2 (Wang et al. 2020, Apache-2.0). No dropout: every visit of an example
computes the same, and examples do not see each other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.lab.tasks.readers import read_safetensors, reading
from hemiola.lab.tasks.wordpiece import WordPiece

REMEMBERED = 16384  # texts of which it is remembered what frozen layers make of them; of 20 tokens they take half a GB


@dataclass(frozen=True)
class Config:
    """The entries of ``config.json`` that say what the model is."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


class Bert(nn.Module):
    """BERT without its head: (B, T) token numbers to the mean over each text's tokens of the last layer, (B, width).

    What is padding and which of two texts a token belongs to is read off the tokens themselves: `pad` is no text, and
    the second text starts after the first `separator`.

    Where the first layers are frozen, what they make of a text is the same at every visit, and is remembered.
    """

    def __init__(self, config: Config, pad: int, separator: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.pad, self.separator = pad, separator
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self._known: dict[bytes, Tensor] = {}  # a text's tokens, and what the frozen layers make of it
        self._known_by: list[tuple[Tensor, int]] = []  # their parameters then, and which versions of these

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean-pooled last layer."""
        text = tokens != self.pad
        frozen = self._frozen()
        stream = self._remembered(tokens, text, frozen) if frozen else None
        if stream is None:
            stream = self._begin(tokens, text, len(frozen))
        for layer in self.layers[max(0, len(frozen) - 1) :]:
            stream = layer(stream, text)
        share = text.unsqueeze(-1).to(stream.dtype)
        pooled: Tensor = (stream * share).sum(dim=1) / share.sum(dim=1)
        return pooled

    def _frozen(self) -> list[list[Tensor]]:
        """Parameters of the embeddings, the first layer, ... up to the first of these in which something learns."""
        embeddings = nn.ModuleList([self.words, self.positions, self.types, self.norm])
        parts = [list(part.parameters()) for part in (embeddings, *self.layers)]
        return list(takewhile(lambda part: not any(_learns(parameter) for parameter in part), parts))

    def _begin(self, tokens: Tensor, text: Tensor, parts: int) -> Tensor:
        """Through the embeddings and the layers of that many parts, (B, T, width)."""
        ends = (tokens == self.separator).long()
        second = (ends.cumsum(dim=1) - ends).clamp(max=1) * text
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        stream: Tensor = self.norm(self.words(tokens) + self.positions(places) + self.types(second))
        for layer in self.layers[: max(0, parts - 1)]:
            stream = layer(stream, text)
        return stream

    def _remembered(self, tokens: Tensor, text: Tensor, frozen: list[list[Tensor]]) -> Tensor | None:
        """The same by frozen parts, of which each text passes alone and once; zeros where there is no text.

        Alone, so that it does not depend on its company, and a resumed run finds the same to the last bit. None where
        tokens cannot be looked at: inside of ``torch.func.vmap``.
        """
        try:
            rows, lengths = tokens.cpu().numpy(), text.sum(dim=1).tolist()
        except RuntimeError:
            return None
        by = [(parameter, parameter._version) for part in frozen for parameter in part]
        if not _same(by, self._known_by):
            self._known, self._known_by = {}, by
        found = self.words.weight.new_zeros(*tokens.shape, self.words.embedding_dim)
        for at, length in enumerate(lengths):
            key = rows[at, :length].tobytes()
            known = self._known.get(key)
            if known is None:
                with torch.no_grad():
                    known = self._begin(tokens[at : at + 1, :length], text[at : at + 1, :length], len(frozen))[0]
                if len(self._known) < REMEMBERED:
                    self._known[key] = known
            found[at, :length] = known
        return found


def _learns(parameter: Tensor) -> bool:
    """Also what ``torch.func.functional_call`` puts in place of a parameter may."""
    return parameter.requires_grad or not isinstance(parameter, nn.Parameter)


def _same(these: list[tuple[Tensor, int]], those: list[tuple[Tensor, int]]) -> bool:
    """The very same tensors, which nobody has written to."""
    return len(these) == len(those) and all(
        this is that and version == other for (this, version), (that, other) in zip(these, those, strict=True)
    )


class _Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.norm_attention = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.widen, self.narrow = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.norm_mlp = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, stream: Tensor, text: Tensor) -> Tensor:
        stream = self.norm_attention(stream + self._attention(stream, text))
        result: Tensor = self.norm_mlp(stream + self.narrow(nn.functional.gelu(self.widen(stream))))
        return result

    def _attention(self, stream: Tensor, text: Tensor) -> Tensor:
        batch, time, width = stream.shape
        query, key, value = (
            part(stream).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        affinity = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = affinity.masked_fill(~text[:, None, None, :], -math.inf).softmax(dim=-1) @ value
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged


# Our names of a layer's parts and those of the file; each has a weight and a bias.
_PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "merge": "attention.output.dense",
    "norm_attention": "attention.output.LayerNorm",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
    "norm_mlp": "output.LayerNorm",
}


@cache
def tokenizer(root: Path) -> WordPiece:
    """The tokenizer of the model in this data folder."""
    return WordPiece(root / "minilm-l6/vocab.txt")


@cache
def _config(root: Path) -> Config:
    path = root / "minilm-l6/config.json"
    with reading(path):
        given = json.loads(path.read_text("utf-8"))
    absent = [key for key in Config.__dataclass_fields__ if key not in given]
    if absent:
        raise InputError(f"cannot read {path}: no {', '.join(absent)}")
    return Config(**{key: given[key] for key in Config.__dataclass_fields__})


@cache
def _weights(root: Path) -> dict[str, Tensor]:
    """The pretrained weights by our names."""
    names = {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "types.weight": "embeddings.token_type_embeddings.weight",
        "norm.weight": "embeddings.LayerNorm.weight",
        "norm.bias": "embeddings.LayerNorm.bias",
    }
    for number in range(_config(root).num_hidden_layers):
        for ours, theirs in _PARTS.items():
            for kind in ("weight", "bias"):
                names[f"layers.{number}.{ours}.{kind}"] = f"encoder.layer.{number}.{theirs}.{kind}"
    stored = read_safetensors(root / "minilm-l6/model.safetensors", set(names.values()))
    return {ours: torch.from_numpy(stored[theirs]) for ours, theirs in names.items()}


def width(root: Path) -> int:
    """Numbers in an embedding."""
    return _config(root).hidden_size


def size(root: Path) -> tuple[int, int]:
    """Layers, and the longest text in tokens."""
    return _config(root).num_hidden_layers, _config(root).max_position_embeddings


def pretrained(root: Path) -> Bert:
    """A fresh copy of the pretrained model; the weights are read once in a process."""
    weights, pieces = _weights(root), tokenizer(root)
    with torch.device("meta"):  # Its random weights would be thrown away at once.
        model = Bert(_config(root), pieces.pad, pieces.separator)
    path = root / "minilm-l6/model.safetensors"
    try:
        model.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    except RuntimeError as error:
        raise InputError(f"cannot read {path}: not the model of config.json: {' '.join(str(error).split())}") from error
    return model


def embed(root: Path, texts: list[list[int]], chunk: int = 64) -> np.ndarray:
    """Embeddings of tokenised texts, each of length 1, as all-MiniLM-L6-v2 is used; texts of a length go together."""
    model = pretrained(root).eval()
    found = np.empty((len(texts), width(root)), np.float32)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with torch.inference_mode():
        for first in range(0, len(order), chunk):
            some = order[first : first + chunk]
            pooled = model(padded([texts[i] for i in some], model.pad))
            found[some] = nn.functional.normalize(pooled, dim=1).numpy()
    return found


def padded(texts: list[list[int]], pad: int) -> Tensor:
    """(N, T) tokens, as wide as the longest text."""
    longest = max(map(len, texts))
    return torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts], dtype=torch.int64)
