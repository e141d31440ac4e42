"""One model at many weights: the gradient of every worker's batch at the worker's own weights, in one call.

Two ways, which give the same numbers to float tolerance:

* **side by side**: every linear layer multiplies each worker's rows by the worker's own matrix, all in one product, and
  everything else sees one long batch. For models whose trained parameters are all in linear layers, once a trial has
  shown that nothing in the model ties one worker's examples to another's.
* **vmapped**: the forward pass under `torch.func.vmap`. For all others; with a small model it takes far longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hemiola.flat import FlatModel

Losses = Callable[[Tensor, Tensor], Tensor]
Way = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


class ManyWeights:
    """Gradients of a model at many weights.

    Args:
        flat: The model; what its own weights are does not matter.
        losses: Maps outputs and targets to one loss per example.
    """

    def __init__(self, flat: FlatModel, losses: Losses):
        self._flat, self._losses = flat, losses
        self._layers = _linear_layers(flat)
        self._agrees: bool | None = None if self._layers else False

    def gradients(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Every worker's losses, (workers, examples), and the gradients of their means, (workers, size).

        Args:
            weights: One row a worker.
            inputs: All examples, worker by worker, as many of each.
            targets: Theirs.
        """
        if self._agrees is None:
            self._agrees = self._try_side_by_side(weights, inputs, targets)
        return self._gradients(self._side_by_side if self._agrees else self._vmapped, weights, inputs, targets)

    def _try_side_by_side(self, weights: Tensor, inputs: Tensor, targets: Tensor) -> bool | None:
        """Whether both ways agree on a batch; None where that is not known, because it is not finite."""
        found = []
        for way in (self._vmapped, self._side_by_side):
            with torch.random.fork_rng(devices=[]):
                try:
                    found.append(self._gradients(way, weights, inputs, targets)[1])
                except RuntimeError:  # Somewhere in the model one long batch does not fit.
                    return False
        error, scale = (found[1] - found[0]).norm(), found[0].norm()
        return bool(error <= torch.finfo(error.dtype).eps ** 0.5 * scale) if torch.isfinite(error) else None

    def _gradients(self, way: Way, weights: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        leaves = {name: piece.detach().requires_grad_() for name, piece in self._flat.split(weights).items()}
        losses = way(leaves, inputs, targets)
        pieces = torch.autograd.grad(losses.mean(1).sum(), tuple(leaves.values()), materialize_grads=True)
        return losses.detach(), torch.cat([piece.flatten(1) for piece in pieces], 1)

    def _vmapped(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        def losses(own: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return self._losses(functional_call(self._flat.module, own, (inputs,)), targets)

        workers = _workers(parameters)
        inputs, targets = (each.view(workers, -1, *each.shape[1:]) for each in (inputs, targets))
        return vmap(losses, randomness="different")(parameters, inputs, targets)

    def _side_by_side(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with self._own_matrices(parameters):
            return self._losses(self._flat.module(inputs), targets).view(_workers(parameters), -1)

    @contextmanager
    def _own_matrices(self, parameters: dict[str, Tensor]) -> Iterator[None]:
        """Let every linear layer multiply by the workers' own matrices."""
        for layer, (weight, bias) in self._layers.items():
            vars(layer)["forward"] = partial(_product, parameters[weight], parameters.get(bias))
        try:
            yield
        finally:
            for layer in self._layers:
                del vars(layer)["forward"]


def _linear_layers(flat: FlatModel) -> dict[nn.Linear, tuple[str, str]]:
    """Linear layers with the names of their matrices and biases, if they hold all that is trained; else none."""
    trained = {name for name, _ in flat.shapes}
    found = {}
    for path, module in flat.module.named_modules():
        names = {f"{path}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)}
        if names & trained and (type(module) is not nn.Linear or not names <= trained):
            return {}
        if names & trained:
            found[module] = (f"{path}.weight".removeprefix("."), f"{path}.bias".removeprefix("."))
    return found


def _product(matrices: Tensor, biases: Tensor | None, rows: Tensor) -> Tensor:
    """What a linear layer gives of rows that come worker by worker."""
    own = rows.reshape(len(matrices), -1, rows.shape[-1])
    turned = matrices.transpose(1, 2)
    products = torch.bmm(own, turned) if biases is None else torch.baddbmm(biases.unsqueeze(1), own, turned)
    return products.view(*rows.shape[:-1], -1)


def _workers(parameters: dict[str, Tensor]) -> int:
    return len(next(iter(parameters.values())))
