"""The conformance checks catch what is wrong, and say it in one line."""

import random

import numpy as np
import pytest
import torch

import hemiola
from hemiola.testing import check_order, check_pace, check_period


class Fine(hemiola.Order):
    sketch = "fold:4"
    saved = ("sums",)

    def begin(self, sizes, seed, lockstep):
        super().begin(sizes, seed, lockstep)
        self.sums = [np.zeros(size) for size in sizes]

    def observe(self, visits):
        for visit in visits:
            if visit.sketches is not None:
                self.sums[visit.worker][visit.units] = visit.sketches[:, 0].numpy()

    def sequence(self, worker, epoch):
        # Sorted by what was seen of a unit in the epoch before, except in epochs that are under way.
        if epoch != self.known.get(worker, (None, None))[0]:
            self.known[worker] = epoch, np.argsort(self.sums[worker], kind="stable")
        return self.known[worker][1]


class Forgets(Fine):
    saved = ()

    def begin(self, sizes, seed, lockstep):
        super().begin(sizes, seed, lockstep)
        self.known = {}


class Fine2(Forgets):
    saved = ("sums", "known")


def test_an_order_that_learns_and_saves_what_it_learnt_passes():
    check_order(Fine2)


class Draws(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.random.default_rng((worker, epoch, random.randrange(2**32))).permutation(self.sizes[worker])


class DrawsFromTorch(hemiola.Order):
    def begin(self, sizes, seed, lockstep):
        super().begin(sizes, seed, lockstep)
        torch.rand(1)

    def sequence(self, worker, epoch):
        return np.arange(self.sizes[worker])


class Short(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.arange(self.sizes[worker] - (epoch == 2))


class Misspelt(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.arange(self.sizes[worker])

    def obserev(self, visits):
        pass


class TakesAnything(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.arange(self.sizes[worker])

    def load_state_dict(self, state):
        pass


class NotPlain(TakesAnything):
    def state_dict(self):
        return {"kind": self.kind, "version": 1, "self": np.random.default_rng(0)}


class Zero(hemiola.Period):
    def length(self, lr, progress):
        return int(lr > 0.05)


class Fraction(hemiola.Period):
    def length(self, lr, progress):
        return 1.5


class Counts(hemiola.Period):
    """Its state is a count that it does not save."""

    seen = 0

    def averaged(self, seen):
        self.seen += 1

    def length(self, lr, progress):
        return 1 + self.seen // 4


class TooMany(hemiola.Pace):
    def k(self):
        return self.workers + 1


class BrokenPromise(hemiola.Pace):
    updates = 0

    def updated(self, seen):
        self.updates += 1

    def k(self):
        return 1 + self.updates % 2

    @property
    def fixed_k(self):
        return 1


class NoLockstep(hemiola.Pace):
    lockstep = True

    def k(self):
        return 1


@pytest.mark.parametrize(
    ("check", "policy", "said"),
    [
        (check_order, Forgets, "stopped after update .* and resumed, it goes on differently; is everything"),
        (check_order, Draws, "asked again, the sequence of worker 0, epoch 0 differs"),
        (check_order, DrawsFromTorch, r"the order draws from the global generator of torch; use hemiola\.streams"),
        (
            check_order,
            Short,
            "order 'Short', worker 0, epoch 2: sequence must visit each of 7 units once, got 6 visits",
        ),
        (check_order, Misspelt, "order 'Misspelt': nothing asks for 'obserev'; did you mean 'observe'"),
        (check_order, TakesAnything, "order 'TakesAnything': load_state_dict takes the state of another kind"),
        (check_order, NotPlain, "order 'NotPlain': its state must be plain numbers"),
        (check_order, Zero, "order: Zero lacks sketch"),
        (check_period, Zero, "period 'Zero': length must be a whole number of at least 1, got 0"),
        (check_period, Fraction, r"period 'Fraction': length must be a whole number of at least 1, got 1\.5"),
        (check_period, Counts, "period 'Counts': stopped after update .* it goes on differently"),
        (check_pace, TooMany, "pace 'TooMany': k must be at most the number of workers, 3, got 4"),
        (check_pace, BrokenPromise, "pace 'BrokenPromise': k is 2 where fixed_k promises 1"),
        (check_pace, NoLockstep, "pace 'NoLockstep': lockstep promises one report of every worker, and k is 1 of 3"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(check, policy, said):
    with pytest.raises(AssertionError, match=said) as caught:
        check(policy)
    assert "\n" not in str(caught.value)
