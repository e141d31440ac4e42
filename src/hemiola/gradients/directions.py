"""The input directions a ghost sketch keeps of a layer: the principal ones of its inputs' second moment."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of inputs that are looked at: enough to find a handful of directions, few enough to take milliseconds. Where the
# inputs are longer than SHORT, the Gram matrix of the rows is decomposed instead of the second moment, so fewer rows.
SHORT = 512
MANY_ROWS = 4096
FEW_ROWS = 512


def row_limit(length: int) -> int:
    """How many inputs of this length are worth looking at."""
    return MANY_ROWS if length <= SHORT else FEW_ROWS


def principal_directions(inputs: Tensor, rank: int) -> Tensor:
    """Return the top principal directions of each group's inputs, not centred.

    Args:
        inputs: (groups, rows, length).
        rank: Directions wanted per group; at most ``length``.

    Returns:
        (groups, rank, length) orthonormal rows; rows are zero where the inputs span fewer directions.
    """
    groups, rows, length = inputs.shape
    inputs = torch.nan_to_num(inputs.double(), nan=0.0, posinf=0.0, neginf=0.0)
    if rows >= length:
        energies, vectors = torch.linalg.eigh(inputs.transpose(1, 2) @ inputs)
        found = vectors.flip(2)[:, :, :rank].transpose(1, 2)
        real = energies.flip(1)[:, :rank] > 0
        return torch.where(real.unsqueeze(2), found, torch.zeros_like(found))
    energies, vectors = torch.linalg.eigh(inputs @ inputs.transpose(1, 2))
    energies, vectors = energies.flip(1)[:, :rank], vectors.flip(2)[:, :, :rank]
    real = energies > 1e-12 * energies[:, :1]
    lengths = torch.where(real, energies, torch.ones_like(energies)).sqrt()
    found = (vectors.transpose(1, 2) @ inputs) * (real / lengths).unsqueeze(2)
    out = inputs.new_zeros(groups, rank, length)
    out[:, : found.shape[1]] = found
    return out
