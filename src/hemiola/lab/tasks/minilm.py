"""MiniLM-L6: a pretrained BERT of 6 layers, 384 wide, in plain PyTorch, with its weights read from safetensors.

Weights: sentence-transformers/all-MiniLM-L6-v2 (Wang et al. 2020, Apache-2.0). No dropout: every visit of an example
computes the same, and examples do not see each other.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.errors import InputError
from hemiola.lab.tasks.readers import read_safetensors, reading
from hemiola.lab.tasks.wordpiece import WordPiece


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

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean-pooled last layer."""
        ends = (tokens == self.separator).long()
        text = (tokens != self.pad).long()
        second = (ends.cumsum(dim=1) - ends).clamp(max=1) * text
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        stream = self.norm(self.words(tokens) + self.positions(places) + self.types(second))
        absent = (text == 0)[:, None, None, :]
        for layer in self.layers:
            stream = layer(stream, absent)
        share = text.unsqueeze(-1).to(stream.dtype)
        pooled: Tensor = (stream * share).sum(dim=1) / share.sum(dim=1)
        return pooled


class _Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.norm_attention = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.widen, self.narrow = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.norm_mlp = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, stream: Tensor, absent: Tensor) -> Tensor:
        stream = self.norm_attention(stream + self._attention(stream, absent))
        result: Tensor = self.norm_mlp(stream + self.narrow(nn.functional.gelu(self.widen(stream))))
        return result

    def _attention(self, stream: Tensor, absent: Tensor) -> Tensor:
        batch, time, width = stream.shape
        query, key, value = (
            part(stream).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        affinity = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        mixed = affinity.masked_fill(absent, -math.inf).softmax(dim=-1) @ value
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
