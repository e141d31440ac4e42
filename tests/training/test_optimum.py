"""f* against problems solved by hand, against another solver, and a cache that may fail in every way."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from hemiola.cache import cache_folder
from hemiola.errors import InputError
from hemiola.lab.tasks import Task, load_task, objective, optimum


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEMIOLA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def ridge(targets=(1.0, 3.0), l2=0.5):
    """f(w) = mean (w - y)^2 + (l2/2) w^2: one weight, no bias, every input 1."""
    y = torch.tensor(targets)
    return Task(
        name="ridge",
        model=lambda: torch.nn.Linear(1, 1, bias=False),
        train=(torch.ones(len(y), 1), y),
        test=(torch.ones(len(y), 1), y),
        losses=lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
        convex=True,
        l2=l2,
    )


def test_ridge_by_hand():
    # f(w) = ((w-1)^2 + (w-3)^2)/2 + w^2/4; f' = 2w - 4 + w/2 = 0 at w = 1.6; f* = (0.36 + 1.96)/2 + 0.64 = 1.8
    assert optimum(ridge()) == pytest.approx(1.8, abs=1e-14)
    assert objective(ridge(), torch.tensor([1.6])) == pytest.approx(1.8, abs=1e-12)
    assert objective(ridge(), torch.tensor([0.0])) == pytest.approx(5.0, abs=1e-14)


def test_digits_optimum_agrees_with_a_numpy_newton_method():
    """Softmax regression written out in NumPy, minimised by a second-order method instead of L-BFGS."""
    task = load_task("digits-logistic")
    x, y = (part.numpy() for part in task.train.batch(np.arange(1500)))
    x = np.hstack([x.astype(np.float64), np.ones((1500, 1))])
    onehot = np.eye(10)[y]

    def softmax(w):
        z = x @ w.reshape(10, 65).T
        z -= z.max(axis=1, keepdims=True)
        return np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)

    def f(w):
        return -np.log((softmax(w) * onehot).sum(axis=1)).mean() + 5e-4 * w @ w

    def gradient(w):
        return ((softmax(w) - onehot).T @ x).ravel() / 1500 + 1e-3 * w

    def hessian_times(w, v):
        p, u = softmax(w), x @ v.reshape(10, 65).T
        return ((p * (u - (p * u).sum(axis=1, keepdims=True))).T @ x).ravel() / 1500 + 1e-3 * v

    best = minimize(f, np.zeros(650), jac=gradient, hessp=hessian_times, method="trust-ncg", options={"gtol": 1e-9})
    assert np.linalg.norm(best.jac) < 1e-8
    assert optimum(task) == pytest.approx(best.fun, abs=1e-14)
    layer = torch.cat([torch.from_numpy(best.x.reshape(10, 65)[:, :64]).flatten(), torch.from_numpy(best.x[64::65])])
    assert objective(task, layer) == pytest.approx(best.fun, abs=1e-14)


def test_nothing_lies_below_the_optimum():
    task = load_task("breast-cancer-logistic")
    lowest = optimum(task)
    for seed in range(20):
        weights = torch.randn(31, generator=torch.Generator().manual_seed(seed))
        assert objective(task, weights) > lowest


def test_the_cache_is_used_and_depends_on_data_and_objective(cache):
    first = optimum(ridge())
    (file,) = (cache / "optima").iterdir()
    file.write_text('{"optimum": 7.5, "task": "ridge"}')
    assert optimum(ridge()) == 7.5
    assert optimum(ridge(l2=0.25)) != 7.5
    assert optimum(ridge(targets=(1.0, 4.0))) != 7.5
    other = ridge()
    other.losses = lambda outputs, targets: 2 * (outputs[:, 0] - targets) ** 2
    assert optimum(other) != 7.5
    assert len(list((cache / "optima").iterdir())) == 4
    assert first == pytest.approx(1.8)


@pytest.mark.parametrize("rubbish", [b"", b"{", b'{"optimum": "x"}', b'{"optimum": NaN}', b"[]", b"\xff\xfe"])
def test_a_corrupted_cache_is_ignored_and_replaced(cache, rubbish):
    optimum(ridge())
    (file,) = (cache / "optima").iterdir()
    file.write_bytes(rubbish)
    assert optimum(ridge()) == pytest.approx(1.8, abs=1e-14)
    assert b"1.8" in file.read_bytes() or b"1.79999" in file.read_bytes()


def test_a_cache_that_cannot_be_written_does_not_matter(cache):
    cache.write_text("a file where the folder should be")
    assert optimum(ridge()) == pytest.approx(1.8, abs=1e-14)


def test_the_cache_folder_follows_the_platform(monkeypatch, cache):
    assert cache_folder() == cache
    monkeypatch.delenv("HEMIOLA_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(cache_folder()) == "/x/hemiola"


def test_only_convex_tasks_have_an_optimum():
    with pytest.raises(InputError, match="task 'digits-mlp' is not convex"):
        optimum(load_task("digits-mlp"))


def test_a_task_without_a_smooth_minimum_is_told():
    task = ridge(targets=(1.0, 1.0, 3.0), l2=0.0)
    task.losses = lambda outputs, targets: (outputs[:, 0] - targets).abs()
    with pytest.raises(InputError, match="the minimum of task 'ridge' was not found: the search ended at"):
        optimum(task)


def test_searching_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    optimum(ridge())
    assert torch.equal(torch.rand(1), expected)
