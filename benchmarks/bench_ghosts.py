"""What learning an order from every example costs: steps of four models with ghosts, against the same loop without.

The two loops take turns, step by step, on one thread, and what is compared are medians of CPU seconds: other programs
on the machine then hit both. Data are random numbers of the right shapes (weights too): a step takes as long whatever
they are. Finding directions, in an epoch's first step, is not part of a median step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from bench_sampler import lenet
from ratio import Ratio
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from hemiola.loops.sampler import OrderedSampler
from hemiola.order import CDGraB

Step = Callable[[nn.Module, Tensor], Tensor]
"""A model and the numbers of a batch's examples, to their mean loss."""


def classification(*shape: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, *shape, generator=generator), torch.randint(10, (512,), generator=generator)
    return lambda model, batch: F.cross_entropy(model(x[batch]), y[batch])


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm, and a way around them (He et al. 2016, figure 2, option A)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.grow, self.stride = after - before, 2 if after > before else 1
        self.first, self.norm1 = nn.Conv2d(before, after, 3, self.stride, 1, bias=False), nn.BatchNorm2d(after)
        self.second, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        around = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grow))
        return F.relu(around + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def resnet20() -> nn.Module:
    torch.manual_seed(0)
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(widths)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


class Attention(nn.Module):
    """Causal self-attention as nanoGPT has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, 2))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention, then two linear layers, each with a way around."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """nanoGPT's model: 4 layers, 128 wide, 65 characters, the head tied to the embedding."""

    def __init__(self, layers: int = 4, width: int = 128, context: int = 64, vocabulary: int = 65) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))))


def nanogpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def next_character() -> Step:
    text = torch.randint(65, (512, 65), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(text[batch, :-1]).flatten(0, 1), text[batch, 1:].flatten())

    return loss


def minilm() -> nn.Module:
    """MiniLM-L6: a BERT of 6 layers, 384 wide, with a classifier on top."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    )


def sentence_pairs() -> Step:
    generator = torch.Generator().manual_seed(0)
    tokens, y = torch.randint(30522, (512, 64), generator=generator), torch.randint(2, (512,), generator=generator)
    return lambda model, batch: F.cross_entropy(model(input_ids=tokens[batch]).logits, y[batch])


def steps(build: Callable[[], nn.Module], loss: Step, batch: int, batches: int, order: CDGraB | None) -> Iterator[None]:
    """A training loop that stops after every step; without an order a plain one, in random order."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(numbers: Tensor) -> None:
        optimizer.zero_grad()
        loss(model, numbers).backward()
        optimizer.step()

    if order is None:
        while True:
            for numbers in torch.randperm(batch * batches).split(batch):
                step(numbers % 512)
                yield
    sampler = OrderedSampler(range(batch * batches), order)
    with sampler.watch(model):
        while True:
            for numbers in BatchSampler(sampler, batch, drop_last=False):
                step(torch.tensor(numbers) % 512)
                yield


def ratio(build: Callable[[], nn.Module], loss: Step, batch: int, batches: int, order: CDGraB) -> float:
    """Of median CPU seconds of a step, in two epochs after one to warm up."""
    loops = steps(build, loss, batch, batches, order), steps(build, loss, batch, batches, None)
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(3 * batches):
        for loop, times in zip(loops, found, strict=True):
            start = time.process_time()
            next(loop)
            times.append(time.process_time() - start)
    for loop in loops:
        loop.close()
    return median(found[0][batches:]) / median(found[1][batches:])


MODELS = {
    "LeNet, batch 64": (lenet, lambda: classification(3, 32, 32), 64, 48, "<= 1.12"),
    "nanoGPT, 4 x 128, batch 12": (nanogpt, next_character, 12, 20, "<= 1.15"),
    "ResNet-20, batch 64": (resnet20, lambda: classification(3, 32, 32), 64, 8, "<= 1.25"),
    "MiniLM-L6, batch 16": (minilm, sentence_pairs, 16, 8, "<= 1.15"),
}


def ratios() -> Iterator[Ratio]:
    torch.set_num_threads(1)
    for name, (build, data, batch, batches, bar) in MODELS.items():
        for sketch in ("ghost:4", "ghost:4:thin"):
            order = CDGraB(sketch=sketch)
            found = ratio(build, data(), batch, batches, order)
            yield Ratio(f"{name}, {order.sketch}", found, bar if "thin" in sketch else "", "against no order at all")
