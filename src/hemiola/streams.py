"""Random streams named by what they are for, not by when they are used.

A stream is found from its key, so results do not depend on the order in which work is done, on the number of
parallel jobs, or on which other policies run; and nothing needs to be saved to resume. ``seed + epoch`` would make
(seed 0, epoch 1) the same stream as (seed 1, epoch 0); keys are hashed instead.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch


def _entropy(key: tuple[int | str, ...]) -> list[int]:
    return [zlib.crc32(part.encode()) if isinstance(part, str) else int(part) for part in key]


def stream(*key: int | str) -> np.random.Generator:
    """A NumPy generator that depends on the key only, e.g. ``stream("delay", seed, worker, block)``."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(_entropy(key))))


def torch_seed(*key: int | str) -> int:
    """A 63-bit seed for torch that depends on the key only."""
    high, low = np.random.SeedSequence(_entropy(key)).generate_state(2, np.uint32)
    return (int(high) << 31) ^ int(low)


def torch_stream(*key: int | str) -> torch.Generator:
    """A torch CPU generator that depends on the key only."""
    return torch.Generator().manual_seed(torch_seed(*key))


def seed_torch(*key: int | str) -> None:
    """Seed torch's global CPU generator from a key.

    Not ``torch.manual_seed``: that also queues a seeding of every accelerator with a formatted stack trace, which
    costs more than a small model's whole step.
    """
    torch.default_generator.manual_seed(torch_seed(*key))
