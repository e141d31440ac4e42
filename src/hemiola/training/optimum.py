"""f*, the minimum of a convex task's objective: L-BFGS, then Newton steps, in float64, and kept in the user's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hemiola.cache import cache_folder, keep, kept
from hemiola.contracts import Examples, TaskLike
from hemiola.errors import InputError
from hemiola.streams import torch_seed

GRADIENT_NORM = 1e-10
"""Where the search stops. The error of f* is then at most GRADIENT_NORM^2 / (2 l2): 5e-18 at l2 = 1e-3."""

_CHUNK = 8192
_VERSION = 1


def objective(task: TaskLike, weights: Tensor, model: nn.Module | None = None) -> float:
    """The training objective, mean loss + (l2/2)||w||^2 over all parameters, in float64.

    Args:
        task: Whose objective.
        weights: All parameters as one vector, in the order of ``model.parameters()``.
        model: A model of the task to evaluate with; its own weights do not matter and stay as they are.
    """
    model = _double(task.model() if model is None else model)
    return _Objective(task, model).value(weights.detach().to(torch.float64))


def optimum(task: TaskLike) -> float:
    """f* of a convex task.

    The result is kept under the cache folder (HEMIOLA_CACHE, else the platform's), named by a hash of the data, the
    model and the objective; an unreadable cache file counts as absent, and a cache that cannot be written as empty.

    Raises:
        InputError: The task is not convex, or the search does not reach a gradient norm of 1e-10.
    """
    if not task.convex:
        raise InputError(f"task {task.name!r} is not convex: its gap f - f* is not defined")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed("optimum"))
        model = _double(task.model())
    path = cache_folder() / "optima" / f"{_fingerprint(task, model)}.json"
    known = kept(path, "optimum")
    if known is None:
        known = _Objective(task, model).minimum()
        keep(path, {"optimum": known, "task": task.name})
    return known


# ------------------------------------------------------------------------------------------------------ the search


class _Objective:
    """Value and gradient of the objective at a vector of weights."""

    def __init__(self, task: TaskLike, model: nn.Module) -> None:
        self.task = task
        self.model = model
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def value(self, weights: Tensor) -> float:
        with torch.no_grad():
            return float(sum(part.item() for part in self._parts(weights)))

    def value_and_gradient(self, weights: np.ndarray) -> tuple[float, np.ndarray]:
        vector = torch.from_numpy(weights).requires_grad_()
        total = 0.0
        for part in self._parts(vector):
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
        assert vector.grad is not None
        return total, vector.grad.numpy()

    def hessian_times(self, weights: np.ndarray, direction: np.ndarray) -> np.ndarray:
        vector, along = torch.from_numpy(weights).requires_grad_(), torch.from_numpy(direction)
        total = torch.zeros_like(vector)
        for part in self._parts(vector):
            (gradient,) = torch.autograd.grad(part, vector, create_graph=True)
            if gradient.requires_grad:  # A loss that is linear in the weights has no second derivative.
                total += torch.autograd.grad(gradient.dot(along), vector)[0]
        return total.numpy()

    def minimum(self) -> float:
        from scipy.optimize import minimize
        from scipy.sparse.linalg import LinearOperator, cg

        self.kept = list(self._chunks())  # In float64 once, not at each of the many evaluations.
        size = sum(shape.numel() for shape in self.shapes.values())
        options = {"maxiter": 5_000, "maxfun": 10_000, "maxcor": 30, "ftol": 0.0, "gtol": GRADIENT_NORM / 10}
        weights = minimize(self.value_and_gradient, np.zeros(size), jac=True, method="L-BFGS-B", options=options).x
        # The line search of L-BFGS compares values of f, which float64 can no longer tell apart near a gradient norm
        # of 1e-8; Newton steps use gradients only and go the rest of the way.
        for _ in range(6):
            value, gradient = self.value_and_gradient(weights)
            norm = float(np.linalg.norm(gradient))
            if norm <= GRADIENT_NORM:
                return value
            if norm > 1e-4:
                break
            at = weights
            hessian = LinearOperator((size, size), matvec=lambda v, at=at: self.hessian_times(at, v), dtype=np.float64)
            weights = weights - cg(hessian, gradient, rtol=1e-6, maxiter=2 * size)[0]
        raise InputError(
            f"the minimum of task {self.task.name!r} was not found: the search ended at a gradient norm of {norm:.1e} "
            f"(wanted {GRADIENT_NORM:.0e}); is its objective convex, with l2 > 0?"
        )

    def _parts(self, weights: Tensor) -> Iterator[Tensor]:
        """Terms whose sum is the objective: the l2 term, then one term per chunk of examples."""
        yield 0.5 * self.task.l2 * weights.dot(weights)
        for inputs, targets in self.kept or self._chunks():
            outputs = torch.func.functional_call(self.model, self._unflatten(weights), (inputs,))
            yield self.task.losses(outputs, targets).sum() / len(self.task.train)

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.task.train)
        for first in range(0, count, _CHUNK):
            inputs, targets = self.task.train.batch(np.arange(first, min(first + _CHUNK, count)))
            yield _to_double(inputs), _to_double(targets)

    def _unflatten(self, weights: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(weights, [shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


def _double(model: nn.Module) -> nn.Module:
    """A float64 copy, so that the caller's model keeps its precision."""
    import copy

    return copy.deepcopy(model).to(torch.float64)


def _to_double(values: Tensor) -> Tensor:
    return values.to(torch.float64) if values.is_floating_point() else values


# ------------------------------------------------------------------------------------------------------- the cache


def _fingerprint(task: TaskLike, model: nn.Module) -> str:
    """A hash of everything f* depends on: the examples, l2, the model, and the losses themselves at two fixed weights.

    The last stands in for the code of model and loss, which cannot be hashed reliably.
    """
    digest = hashlib.sha256(f"{_VERSION} {task.l2!r} {model!r}".encode())
    _hash_examples(digest, task.train)
    target = _Objective(task, model)
    size = sum(shape.numel() for shape in target.shapes.values())
    for weights in (torch.zeros(size, dtype=torch.float64), torch.linspace(-1, 1, size, dtype=torch.float64)):
        # Rounded, because the last bits of a sum may differ between machines and numbers of threads.
        digest.update(f"{target.value(weights):.9e}".encode())
    return digest.hexdigest()


def _hash_examples(digest: hashlib._Hash, examples: Examples) -> None:
    for first in range(0, len(examples), _CHUNK):
        for part in examples.batch(np.arange(first, min(first + _CHUNK, len(examples)))):
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.contiguous().numpy().tobytes())
