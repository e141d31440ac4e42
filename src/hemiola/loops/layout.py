"""Which tensors are averaged, and where each lies in the two flat vectors that travel.

The *lossy* vector (parameters, then optimizer state if momentum is averaged) goes through the wire's number format; the
*exact* vector (buffers, small) always travels as float32. The list of tensors is fixed when the averager is entered and
never depends on which gradients exist: ranks that left out different parameters would average different layers with
each other. Numbers are laid out in logical order, so ranks may differ in memory format, and are copied back in place,
so a channels_last tensor stays channels_last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hemiola.errors import InputError

# Optimizer state that must not become negative when a low-precision mean is a little off.
SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta"}


class Layout:
    """The averaged tensors of a model and its optimizer.

    Attributes:
        names: Of the parameters, in the order they are laid out.
        parameters: Every parameter that is trained, whatever its ``grad``.
        buffers: Every averaged buffer; None of them with ``buffers="local"``.
        moments: Names of the averaged entries of the optimizer's state.
        device: Where the flat vectors live.
        dtype: Of the flat vectors; float64 only for a model that has such parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, average_buffers: bool) -> None:
        found = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
        inside = {id(p) for p in model.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for index, p in enumerate(group["params"]):
                if id(p) not in inside:
                    found[id(p)] = (f"optimizer.{number}.{index}", p)
        if not found:
            raise InputError("nothing to average: the model has no parameter that requires a gradient")
        self.names = [name for name, _ in found.values()]
        self.parameters: list[Tensor] = [p for _, p in found.values()]
        for name, p in found.values():
            if not p.is_floating_point():
                raise InputError(f"cannot average parameter {name} of type {p.dtype}; only floating point is supported")
        self._model = model
        self._optimizer = optimizer
        self.buffers = [b for b in model.buffers() if b.dtype != torch.bool and not b.is_complex()]
        if not average_buffers:
            self.buffers = []
        self.moments: list[str] = []
        self.device = self.parameters[0].device
        self.dtype = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32

    @property
    def counted(self) -> int:
        """Numbers that are parameters; only they count in the spread."""
        return sum(p.numel() for p in self.parameters)

    @property
    def lossy(self) -> int:
        return self.counted * (1 + len(self.moments))

    @property
    def exact(self) -> int:
        return sum(b.numel() for b in self.buffers)

    def own_moments(self) -> list[str]:
        """Names of this rank's optimizer-state entries that have the shape of their parameter."""
        state = self._optimizer.state
        return sorted(
            {
                key
                for p in self.parameters
                for key, value in state.get(p, {}).items()
                if isinstance(value, Tensor)
                and value.shape == p.shape
                and value.is_floating_point()
                and value.dim() > 0
            }
        )

    def check_frozen(self) -> None:
        """Refuse a parameter that was frozen on entry and is trained now: the other ranks do not expect it."""
        known = {id(p) for p in self.parameters}
        for name, p in self._model.named_parameters():
            if p.requires_grad and id(p) not in known:
                raise InputError(
                    f"parameter {name} was unfrozen inside the averager; leave the context and enter it again"
                )

    def gather(self) -> tuple[Tensor, Tensor]:
        """Copies of all numbers: the lossy vector, and the exact one in float64 (counters exceed float32)."""
        lossy = torch.empty(self.lossy, dtype=self.dtype, device=self.device)
        exact = torch.empty(self.exact, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            _copy(self._views(lossy[: self.counted]), self.parameters)
            for index, key in enumerate(self.moments):
                section = lossy[(index + 1) * self.counted : (index + 2) * self.counted]
                for view, p in zip(self._views(section), self.parameters, strict=True):
                    value = self._optimizer.state.get(p, {}).get(key)
                    view.zero_() if value is None else view.copy_(value)
            for view, buffer in zip(_cut(exact, self.buffers), self.buffers, strict=True):
                view.copy_(buffer)
        return lossy, exact

    def scatter(self, lossy: Tensor, exact: Tensor) -> None:
        """Write all numbers back in place."""
        with torch.no_grad():
            _copy(self.parameters, self._views(lossy[: self.counted]))
            for index, key in enumerate(self.moments):
                section = lossy[(index + 1) * self.counted : (index + 2) * self.counted]
                for view, p in zip(self._views(section), self.parameters, strict=True):
                    value = self._optimizer.state.get(p, {}).get(key)
                    if value is not None:
                        value.copy_(view.clamp_min(0.0) if key in SECOND_MOMENTS else view)
            for view, buffer in zip(_cut(exact, self.buffers), self.buffers, strict=True):
                buffer.copy_(view if buffer.is_floating_point() else view.round())

    def reset_moments(self) -> None:
        """Forget the optimizer's state; it begins anew at the next step, Adam's bias correction included."""
        for p in self.parameters:
            if p in self._optimizer.state:
                self._optimizer.state[p].clear()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return _cut(flat, self.parameters)


def difference(one: Tensor, other: Tensor) -> Tensor:
    """The difference; 0 where both are equal, also where both are infinite (a buffer may be an attention mask)."""
    return torch.where(one == other, 0.0, one - other)


def _cut(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [
        part.view(t.shape)
        for part, t in zip(torch.split_with_sizes(flat, [t.numel() for t in like]), like, strict=True)
    ]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)
