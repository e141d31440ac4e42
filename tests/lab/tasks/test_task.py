"""`Task` and the ways to hand it data."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from hemiola import contracts
from hemiola.errors import InputError
from hemiola.lab.tasks import DatasetExamples, Task, TensorExamples, as_examples
from hemiola.lab.tasks.task import correct_sign, logistic_loss

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([2, 0, 1, 1, 0, 2])


class Pairs(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index], int(Y[index])


def make(**changes):
    parts = {"name": "t", "model": lambda: torch.nn.Linear(2, 3), "train": (X, Y), "test": (X, Y)}
    return Task(**(parts | changes))


@pytest.mark.parametrize("data", [(X, Y), TensorDataset(X, Y), Pairs()])
def test_every_kind_of_data_gives_the_same_batches(data):
    task = make(train=data)
    inputs, targets = task.train.batch(np.array([4, 0, 0]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0], [0.0, 1.0]]
    assert targets.tolist() == [0, 2, 2]
    assert task.train.labels().tolist() == Y.tolist()
    assert len(task.train) == 6


def test_tensors_are_indexed_directly_and_data_sets_collated():
    assert isinstance(as_examples(TensorDataset(X, Y), "train"), TensorExamples)
    assert isinstance(as_examples(Pairs(), "train"), DatasetExamples)
    own = TensorExamples(X, Y)
    assert as_examples(own, "train") is own


def test_labels_come_from_targets_where_a_data_set_has_them():
    data = Pairs()
    data.targets = [5] * 6
    assert as_examples(data, "train").labels().tolist() == [5] * 6


def test_real_valued_targets_have_no_labels():
    assert make(train=(X, X)).train.labels() is None
    assert make(train=(X, X[:, 0])).train.labels() is None
    assert as_examples([(X[i], X[i]) for i in range(6)], "train").labels() is None


def test_bytes_are_scaled_when_read():
    pixels = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    examples = TensorExamples(pixels, torch.tensor([0, 1]), scale=0.5, centre=0.5)
    inputs, _ = examples.batch(np.array([1, 0]))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.tensor([[-0.6, -0.2], [-1.0, 1.0]]))


def test_colours_are_standardised_each_by_its_own():
    pixels = torch.tensor([[51, 102]], dtype=torch.uint8).reshape(1, 2, 1, 1)
    examples = TensorExamples(pixels, torch.tensor([0]), scale=(0.5, 0.1), centre=(0.1, 0.2))
    inputs, _ = examples.batch(np.array([0]))
    assert inputs.dtype == torch.float32
    assert inputs.flatten().tolist() == pytest.approx([0.2, 2.0], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": (X, Y[:3])}, "train must have as many inputs as targets, got (6, 2) and (3,)"),
        ({"test": (X, [1])}, "test must be a pair of tensors (inputs, targets), got (Tensor, list)"),
        ({"test": 3}, "test must be a pair of tensors or a data set with __len__ and __getitem__, got int"),
        ({"train": (X[:0], Y[:0])}, "train must hold at least one example, got none"),
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be above 0, got nan"),
        ({"l2": -1.0}, "l2 must be at least 0, got -1.0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_impossible_parts_are_refused(changes, message):
    with pytest.raises(InputError) as caught:
        make(**changes)
    assert str(caught.value) == message


def test_a_task_fulfils_the_contract():
    task = make()
    assert isinstance(task, contracts.TaskLike)
    assert not task.noisy
    assert task.perturb(X, Y, torch.Generator()) == (X, Y)
    assert task.summarise(0.25) == 0.25


def test_default_loss_and_score_by_hand():
    outputs = torch.tensor([[0.0, 0.0], [0.0, float(np.log(3))]])
    task = make()
    torch.testing.assert_close(task.losses(outputs, torch.tensor([0, 0])), torch.log(torch.tensor([2.0, 4.0])))
    assert task.scores(outputs[1:], torch.tensor([1])).tolist() == [1.0]
    assert task.scores(outputs[1:], torch.tensor([0])).tolist() == [0.0]


def test_logistic_loss_and_sign_by_hand():
    outputs = torch.tensor([[0.0], [float(np.log(3))], [float(np.log(3))]])
    targets = torch.tensor([0, 1, 0])
    torch.testing.assert_close(logistic_loss(outputs, targets), torch.log(torch.tensor([2.0, 4 / 3, 4.0])))
    assert correct_sign(outputs, targets).tolist() == [1.0, 1.0, 0.0]
