"""Does a call of a layer hold one block of rows for each example of the batch? Told by derivatives, not by shapes.

A layer's input of (B * n, ...) may be B examples of n positions each, and then the gradient of example i comes from
block i. It may as well be n positions that all examples share (nanoGPT's ``wpe(arange(T))``), positions first (T, B),
two views of the batch one after the other, or tokens that happened to be routed to an expert: booked by blocks, their
gradients end up with other examples, and still add up to the right sum. So one or two examples are followed back
through the graph of the forward pass that was just made: what example i's output depends on, within a call's output,
must be block i and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOTHING = 1e-6  # of the energy in the example's own block: rounding
COUPLED = 0.5  # the same where examples see each other's statistics (BatchNorm), for each other block
FEW = 8  # batches in which BatchNorm couples examples so much that derivatives tell little


class Call(NamedTuple):
    """One call of a layer.

    Attributes:
        layer: Its number.
        output: What came out of it.
        direct: Whether it was called with an input of the model itself, batch first.
        exact: Whether its input's first dimension is the number of examples.
        shared: Whether nothing but the size of its input speaks for the batch: indices in one dimension, as of
            positions that all examples share.
    """

    layer: int
    output: Tensor
    direct: bool
    exact: bool
    shared: bool


_under_way = False


def checking() -> bool:
    """Whether derivatives are being taken that are none of the training loop's; hooks of any model look away."""
    return _under_way


def judge(calls: Sequence[Call], output: Any, examples: int, coupled: bool) -> dict[int, bool]:
    """For each layer, whether all its calls go example by example; layers that nothing came back to are missing.

    Args:
        calls: Of one forward pass, in order.
        output: What the model returned.
        examples: Of the batch, at least 2.
        coupled: Whether the model has a BatchNorm that uses the batch's statistics.
    """
    if coupled and examples < FEW:
        return by_shape(calls)
    ends, certain = _ends(calls, output, examples)
    if not ends:
        return by_shape(calls)
    global _under_way
    _under_way = True
    try:
        verdicts = _follow(calls, ends, examples, coupled)
    finally:
        _under_way = False
    found: dict[int, bool] = {}
    anchored = certain
    for call, good in zip(calls, verdicts, strict=True):
        anchored = anchored or (call.direct and good is True)
        if good is not None:
            found[call.layer] = found.get(call.layer, True) and good
    return found if anchored else by_shape(calls)


def by_shape(calls: Sequence[Call]) -> dict[int, bool]:
    """The same by what shapes alone can tell, which is where derivatives cannot be had."""
    found: dict[int, bool] = {}
    for call in calls:
        good = call.direct or (call.exact and not call.shared)
        found[call.layer] = found.get(call.layer, True) and good
    return found


def tensors(found: Any) -> Iterable[Tensor]:
    """The tensors in nested containers, in the order they are written."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for each in found.values():
            yield from tensors(each)
    elif isinstance(found, tuple | list):
        for each in found:
            yield from tensors(each)


def _ends(calls: Sequence[Call], output: Any, examples: int) -> tuple[list[Tensor], bool]:
    """Where to follow an example back from, and whether it is certain to be there: block i of each of these tensors."""
    given = [each for each in tensors(output) if each.requires_grad and each.dim() and len(each)]
    exact = [each for each in given if len(each) == examples]
    if exact:
        return exact, True
    folded = [each for each in given if len(each) % examples == 0]
    if folded:
        return folded, False
    last = [call.output for call in calls[-1:] if len(call.output) % examples == 0]
    return last, bool(last) and len(last[0]) == examples


def _follow(calls: Sequence[Call], ends: list[Tensor], examples: int, coupled: bool) -> list[bool | None]:
    """For each call: whether the first and the last example come from their own blocks; None if from nowhere."""
    verdicts: list[bool | None] = [None] * len(calls)
    limit = COUPLED if coupled else NOTHING
    for example in (0, examples - 1):
        random = torch.Generator().manual_seed(example)  # not a sum: that of a softmax does not depend on anything
        parts = [end[example * (len(end) // examples) : (example + 1) * (len(end) // examples)] for end in ends]
        signals = [torch.randn(part.shape, generator=random).to(part) for part in parts]
        wanted = [call.output for call in calls]
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            parts, wanted, signals, retain_graph=True, allow_unused=True
        )
        for number, gradient in enumerate(found):
            if gradient is None:
                continue
            energies = gradient.detach().reshape(examples, -1).double().square().sum(1)
            own = float(energies[example])
            energies[example] = 0.0
            most = float(energies.max())
            if own > 0 and most <= limit * own and verdicts[number] is not False:
                verdicts[number] = True
            elif most > limit * own:
                verdicts[number] = False
    return verdicts
