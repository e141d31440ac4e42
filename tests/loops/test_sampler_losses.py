"""Orders that want losses or scores, in one's own loop."""

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hemiola.errors import InputError
from hemiola.loops.sampler import OrderedSampler
from hemiola.order import Scored

EXAMPLES = 24


class Graded(TensorDataset):
    """A data set that has scores."""

    def scores(self):
        return -np.arange(len(self))


def make(order, batch=5, data=TensorDataset, deal="shards", unit=None):
    draws = torch.Generator().manual_seed(0)
    numbered = data(
        torch.arange(EXAMPLES), torch.randn(EXAMPLES, 4, generator=draws), torch.arange(EXAMPLES, dtype=torch.float32)
    )
    sampler = OrderedSampler(numbered, order, unit, seed=1, deal=deal)
    torch.manual_seed(0)
    return sampler, sampler.track(DataLoader(numbered, batch, sampler=sampler)), nn.Linear(4, 1)


def squared(model, x, y):
    return (model(x).squeeze(1) - y) ** 2


def train(sampler, loader, model, losses, tell=True):
    """One epoch with a model that stays as it is; returns what was handed out, and fills in each example's loss."""
    seen = []
    for numbers, x, y in loader:
        found = squared(model, x, y)
        if tell:
            sampler.tell_losses(found)
        found.mean().backward()
        losses[numbers.numpy()] = found.detach().numpy()
        seen += numbers.tolist()
    return seen


@pytest.mark.parametrize("deal", ["shards", "deck"])
def test_the_next_epoch_is_sorted_by_what_the_loop_told(deal):
    sampler, loader, model = make("scored", deal=deal)
    losses = np.zeros(EXAMPLES)
    with sampler.watch(model):
        first = train(sampler, loader, model, losses)
        second = train(sampler, loader, model, losses)
    assert sorted(first) == sorted(second) == list(range(EXAMPLES))
    assert second == np.argsort(losses).tolist() != first
    assert sampler.telemetry()["learnt_from"] == EXAMPLES


def test_units_are_sorted_by_their_mean_loss():
    sampler, loader, model = make(Scored(unit=3), batch=4)  # batches cut units in two
    losses = np.zeros(EXAMPLES)
    with sampler.watch(model):
        train(sampler, loader, model, losses)
        second = train(sampler, loader, model, losses)
    means = losses[second].reshape(-1, 3).mean(1)
    assert (np.diff(means) >= 0).all()


class WithLoss(nn.Module):
    """Returns its loss, as models of transformers do, or nanoGPT's."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 1), how

    def forward(self, x, y):
        answers = self.linear(x).squeeze(1)
        loss = F.mse_loss(answers, y)
        return {"dict": {"loss": loss, "logits": answers}, "tuple": (answers, loss), "alone": loss}[self.how]


@pytest.mark.parametrize("how", ["dict", "tuple", "alone"])
def test_a_batch_that_is_a_unit_needs_only_the_loss_that_the_model_returns(how):
    sampler, loader, _ = make(Scored(unit=4), batch=4)
    model, means, batches = WithLoss(how), {}, []
    with sampler.watch(model):
        for _ in range(2):
            for numbers, x, y in loader:
                found = model(x, y)
                loss = found if how == "alone" else found["loss" if how == "dict" else 1]
                loss.backward()
                batches.append(tuple(sorted(numbers.tolist())))
                means[batches[-1]] = loss.item()
    assert batches[6:] == sorted(batches[:6], key=means.get)


def test_losses_that_nobody_told_are_one_clear_line():
    sampler, loader, model = make("scored")
    with (
        pytest.raises(InputError, match=r"nobody has told it: call sampler\.tell_losses\(losses\)"),
        sampler.watch(model),
    ):
        train(sampler, loader, model, np.zeros(EXAMPLES), tell=False)


def train_on_means(sampler, loader, model):
    for _, x, y in loader:
        sampler.tell_losses(squared(model, x, y).mean())


def test_a_mean_is_not_the_loss_of_every_example():
    sampler, loader, model = make("scored")
    message = "losses of 5 examples were expected, one each, got 1; compute them with reduction='none'"
    with pytest.raises(InputError, match=message), sampler.watch(model):
        train_on_means(sampler, loader, model)


def test_orders_that_want_no_losses_take_no_note_of_them():
    sampler, loader, model = make("cd-grab")
    sampler.tell_losses(torch.zeros(3))  # outside of the watch, too
    with sampler.watch(model):
        assert sorted(train(sampler, loader, model, np.zeros(EXAMPLES))) == list(range(EXAMPLES))


def test_sketches_and_losses_together():
    widths = set()

    class Both(Scored):
        sketch = "ghost:2:8"

        def observe(self, visits):
            widths.update(visit.sketches.shape[1] for visit in visits)
            super().observe(visits)

    sampler, loader, model = make(Both())
    losses = np.zeros(EXAMPLES)
    with sampler.watch(model):
        train(sampler, loader, model, losses)
        assert train(sampler, loader, model, losses) == np.argsort(losses).tolist()
    assert widths == {sampler._exchange._width - 1}


@pytest.mark.parametrize("deal", ["shards", "deck"])
def test_a_resume_in_mid_epoch_does_not_show(deal):
    whole, resumed = make("scored", deal=deal), make("scored", deal=deal)
    losses = np.zeros(EXAMPLES)
    with whole[0].watch(whole[2]):
        expected = [train(*whole, losses) for _ in range(3)]
    saved = io.BytesIO()
    with resumed[0].watch(resumed[2]):
        seen = train(*resumed, losses)
        for step, (numbers, x, y) in enumerate(resumed[1]):
            found = squared(resumed[2], x, y)
            resumed[0].tell_losses(found)
            found.mean().backward()
            seen += numbers.tolist()
            if step == 1:
                torch.save(resumed[0].state_dict(), saved)
                break
    saved.seek(0)
    again = make("scored", deal=deal)
    again[0].load_state_dict(torch.load(saved, weights_only=True))
    with again[0].watch(again[2]):
        seen += train(*again, losses) + train(*again, losses)
    assert seen == [number for epoch in expected for number in epoch]


def test_scores_of_a_data_set():
    sampler, loader, model = make(Scored(by="score"), data=Graded)
    assert list(sampler) == list(range(EXAMPLES))[::-1]
    with sampler.watch(model):
        assert train(sampler, loader, model, np.zeros(EXAMPLES), tell=False) == list(range(EXAMPLES))[::-1]
    with pytest.raises(InputError, match="by = 'score' needs examples that have scores"):
        make(Scored(by="score"))


def test_another_number_of_ranks_deals_scores_again():
    state = OrderedSampler(Graded(torch.zeros(EXAMPLES)), Scored(by="score"), seed=1).state_dict()
    for rank in range(2):
        sampler = OrderedSampler(Graded(torch.zeros(EXAMPLES)), Scored(by="score"), num_replicas=2, rank=rank, seed=1)
        sampler.load_state_dict(state)
        first = list(sampler)  # what is left of the old epoch, about in its order
        assert len(first) == EXAMPLES // 2
        assert first == sorted(first, reverse=True)
