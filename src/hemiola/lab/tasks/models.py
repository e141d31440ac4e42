"""The models of the reference tasks. All work under ``torch.func``: no BatchNorm, no tied weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths, ReLU between; one input and one output width make a linear model."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def image_mlp(widths: Sequence[int]) -> nn.Sequential:
    """`mlp` on flattened images."""
    return nn.Sequential(nn.Flatten(), *mlp(widths))


def lenet(channels: int, flat: int) -> nn.Sequential:
    """LeNet with ReLU and max-pooling, as in CD-GraB and PyTorch's CIFAR-10 tutorial; 62,006 parameters on CIFAR-10.

    Args:
        channels: Of the images.
        flat: Numbers left after the convolutions: 400 for 32 x 32 pixels, 256 for 28 x 28.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *mlp([flat, 120, 84, 10]),
    )


def vgg() -> nn.Sequential:
    """A small VGG for 32 x 32 pictures: three pairs of 3 x 3 convolutions with GroupNorm, sized for a CPU."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        for into in (inputs, outputs):
            layers += [nn.Conv2d(into, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *mlp([128 * 4 * 4, 128, 10]))


# -------------------------------------------------------------------------------------------- words in, words out


class LSTM(nn.Module):
    """A word-level LSTM language model whose state is zero at the start of every window.

    Written out instead of ``nn.LSTM``, for which ``torch.func`` has no batching rule.
    """

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width)
        self.inputs = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.states = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) words to (B, T, vocabulary) scores of each next word."""
        sequence = self.embedding(tokens)
        for from_input, from_state in zip(self.inputs, self.states, strict=True):
            state = cell = torch.zeros_like(sequence[:, 0])
            hidden = []
            for step in from_input(sequence).unbind(dim=1):
                into, forget, new, out = (step + from_state(state)).chunk(4, dim=-1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
                state = torch.sigmoid(out) * torch.tanh(cell)
                hidden.append(state)
            sequence = torch.stack(hidden, dim=1)
        scores: Tensor = self.head(sequence)
        return scores


class GPT(nn.Module):
    """A small decoder-only transformer: learned positions, pre-norm blocks, causal attention written out."""

    def __init__(self, words: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) words to (B, T, vocabulary) scores of each next word."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        stream = self.words(tokens) + self.positions(places)
        for block in self.blocks:
            stream = block(stream)
        scores: Tensor = self.head(self.norm(stream))
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self._attention(self.norm_attention(stream))
        result: Tensor = stream + self.mlp(self.norm_mlp(stream))
        return result

    def _attention(self, stream: Tensor) -> Tensor:
        batch, time, width = stream.shape
        split = self.query_key_value(stream).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()
        affinity = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        future = torch.ones(time, time, dtype=torch.bool, device=stream.device).triu(1)
        mixed = affinity.masked_fill(future, -math.inf).softmax(dim=-1) @ value
        merged: Tensor = self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        return merged
