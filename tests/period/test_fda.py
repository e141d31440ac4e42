"""FDA by hand: when it is due, and the thresholds that follow from rounds."""

import math

import pytest

from hemiola.contracts import Averaging
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.period import FDA


def averaging(spread, steps):
    return Averaging(step=0, progress=0.0, lr=0.1, spread=spread, movement=1.0, loss=1.0, local_steps=steps)


def test_thresholds_follow_from_rounds():
    period = FDA(most=16)
    assert period.length(0.1, 0.0) == 8  # nothing is known: half of the longest
    assert not period.due(1e9)
    period.averaged(averaging(spread=4.0, steps=8))  # the aim itself
    assert period.threshold == 4.0
    assert period.length(0.1, 0.0) == 16
    assert [period.due(spread) for spread in (3.9, 4.0, 4.1, math.nan, math.inf)] == [False, False, True, True, True]
    period.averaged(averaging(spread=4.2, steps=4))  # too soon: twice as far is allowed
    assert period.threshold == 8.4
    period.averaged(averaging(spread=6.0, steps=16))  # it took the longest: half as far
    assert period.threshold == 3.0
    period.averaged(averaging(spread=0.0, steps=16))  # one rank alone says nothing
    assert period.threshold == 3.0
    again = FDA(most=16)
    again.load_state_dict(period.state_dict())
    assert again.threshold == 3.0


def test_bad_input_is_one_line():
    with pytest.raises(InputError, match="most must be at least 2, got 1"):
        FDA(most=1)
    with pytest.raises(InputError, match="FDA decides within a stint, which only hemiola"):
        Experiment({"task": "digits-logistic", "period": FDA(), "cluster": "ray"})
