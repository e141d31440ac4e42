"""The tasks on scikit-learn's data: never skipped."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits

from hemiola import contracts
from hemiola.errors import InputError
from hemiola.lab.tasks import TASKS, load_task, readers
from hemiola.streams import torch_stream

BUNDLED = [name for name, entry in TASKS.items() if not entry.data]


def test_the_three_bundled_tasks_are_there():
    assert BUNDLED == ["digits-logistic", "digits-mlp", "breast-cancer-logistic"]


def test_digits_are_scaled_to_the_unit_interval_and_split_in_order():
    pixels, labels = load_digits(return_X_y=True)
    task = load_task("digits-logistic")
    inputs, targets = task.train.batch(np.arange(1500))
    assert torch.equal(inputs, torch.tensor(pixels[:1500] / 16, dtype=torch.float32))
    assert targets.tolist() == labels[:1500].tolist()
    inputs, targets = task.test.batch(np.arange(297))
    assert torch.equal(inputs, torch.tensor(pixels[1500:] / 16, dtype=torch.float32))
    assert targets.tolist() == labels[1500:].tolist()
    assert (task.l2, task.convex) == (1e-3, True)


@pytest.mark.parametrize("moved", [False, True])
def test_scikit_learns_tables_are_read_as_it_reads_them(moved, monkeypatch):
    if moved:
        monkeypatch.setattr(readers, "find_spec", lambda name: None)
    for load, file, header in ((load_digits, "digits.csv.gz", 0), (load_breast_cancer, "breast_cancer.csv", 1)):
        found = readers.read_from_sklearn(load.__name__.removeprefix("load_"), file, header)
        for mine, expected in zip(found, load(return_X_y=True), strict=True):
            assert mine.dtype == expected.dtype
            np.testing.assert_array_equal(mine, expected)


def test_without_l2_a_logistic_task_is_not_called_convex():
    assert not load_task("digits-logistic", {"l2": 0.0}).convex
    assert not load_task("breast-cancer-logistic", {"l2": 0.0}).convex


def test_breast_cancer_inputs_are_standardised_by_the_training_part():
    inputs, _ = load_task("breast-cancer-logistic").train.batch(np.arange(469))
    assert torch.allclose(inputs.mean(0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(inputs.std(0, correction=0), torch.ones(30), atol=1e-5)


def test_mlp_has_the_widths_asked_for():
    model = load_task("digits-mlp", {"hidden": [7, 5]}).model()
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 64), (7,), (5, 7), (5,), (10, 5), (10,)]


def test_input_noise_has_the_stated_size_and_is_fresh_but_reproducible():
    task = load_task("digits-mlp", {"input_noise": 2.0})
    inputs, targets = task.train.batch(np.arange(1500))
    noisy, same = task.perturb(inputs, targets, torch_stream("a"))
    assert task.noisy
    assert torch.equal(same, targets)
    # 96,000 draws: the standard error of a deviation is 0.23 %.
    assert (noisy - inputs).std().item() == pytest.approx(2 * inputs.std().item(), rel=0.02)
    assert torch.equal(noisy, task.perturb(inputs, targets, torch_stream("a"))[0])
    assert not torch.equal(noisy, task.perturb(inputs, targets, torch_stream("b"))[0])


def test_label_noise_redraws_that_share_among_all_classes():
    task = load_task("digits-mlp", {"label_noise": 0.5})
    inputs, targets = task.train.batch(np.arange(1500))
    changed = []
    for seed in range(8):
        same, noisy = task.perturb(inputs, targets, torch_stream("labels", seed))
        assert torch.equal(same, inputs)
        changed.append((noisy != targets).float().mean().item())
    # A redrawn label stays the same one time in ten: 0.45 expected, standard error 0.0045 over 12,000 draws.
    assert np.mean(changed) == pytest.approx(0.45, abs=0.02)


def test_label_flip_is_done_once_for_all_and_leaves_the_test_set_alone():
    clean, flipped = load_task("digits-mlp"), load_task("digits-mlp", {"label_flip": 0.3})
    again = load_task("digits-mlp", {"label_flip": 0.3, "examples": 700})
    assert not flipped.noisy
    # 0.27 expected, standard error 0.0115.
    assert np.mean(clean.train.labels() != flipped.train.labels()) == pytest.approx(0.27, abs=0.05)
    assert np.array_equal(flipped.train.labels()[:700], again.train.labels())
    assert np.array_equal(clean.test.labels(), flipped.test.labels())


def test_examples_takes_the_first_ones():
    few, all_of_them = load_task("digits-mlp", {"examples": 10}), load_task("digits-mlp")
    assert len(few.train) == 10
    assert torch.equal(few.train.batch(np.arange(10))[0], all_of_them.train.batch(np.arange(10))[0])
    assert len(few.test) == 297


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": [0]}, "hidden must be widths of at least 1, got [0]"),
        ({"examples": 0}, "examples must be between 1 and 1500, got 0"),
        ({"examples": 1501}, "examples must be between 1 and 1500, got 1501"),
        ({"label_noise": 1.5}, "label_noise must be between 0 and 1, got 1.5"),
        ({"label_flip": -0.1}, "label_flip must be between 0 and 1, got -0.1"),
        ({"label_flip": float("nan")}, "label_flip must be between 0 and 1, got nan"),
        ({"input_noise": -1.0}, "input_noise must be at least 0, got -1.0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InputError) as caught:
        load_task("digits-mlp", options)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", BUNDLED)
def test_default_lr_and_batch_learn(name):
    """Three passes of plain SGD with the defaults beat guessing by far: sensible means it works as it stands."""
    task = load_task(name)
    assert isinstance(task, contracts.TaskLike)
    torch.manual_seed(0)
    model = task.model()
    shuffle = np.random.default_rng(0)
    order = np.concatenate([shuffle.permutation(len(task.train)) for _ in range(3)])
    for start in range(0, len(order), task.batch):
        inputs, targets = task.train.batch(order[start : start + task.batch])
        loss = task.losses(model(inputs), targets).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= task.lr * (gradient + task.l2 * parameter)
    with torch.no_grad():
        inputs, targets = task.test.batch(np.arange(len(task.test)))
        accuracy = task.summarise(task.scores(model(inputs), targets).mean().item())
    assert accuracy > 0.8
