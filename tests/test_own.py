"""What users bring: complete objects are taken as they are, others are refused in one line that says why."""

import copy
import pickle

import numpy as np
import pytest

import hemiola
from hemiola.contracts import CAPABILITIES, Order, Pace, Period
from hemiola.errors import InputError
from hemiola.own import check_complete, checked_policy, checked_sequence, members
from hemiola.state import own_state, pack, stamped, unpack


class Backwards(hemiola.Order):
    def sequence(self, worker, epoch):
        return np.arange(self.sizes[worker])[::-1]


class Stranger:
    """An order that does not descend from hemiola's and has only what it must have."""

    sketch = None

    def begin(self, sizes, seed, lockstep):
        self.units = list(sizes)

    def sequence(self, worker, epoch):
        return np.roll(np.arange(self.units[worker]), epoch)

    def wants(self, worker, epoch):
        return False

    def observe(self, visits):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Alone(hemiola.Pace):
    def k(self):
        return 1


class Two(hemiola.Period):
    saved = ("steps", "table")

    def __init__(self):
        self.steps, self.table = 2, {"a": [np.arange(3.0), (1, None)]}

    def length(self, lr, progress):
        return self.steps


# --------------------------------------------------------------------------------------------------------- defaults


def test_a_subclass_has_a_default_for_everything_else():
    order = Backwards()
    order.begin([3, 2], seed=1, lockstep=True)
    assert order.sequence(0, 5).tolist() == [2, 1, 0]
    assert (order.unit, order.sketch, order.wants(0, 0), order.telemetry(), order.kind) == (
        1,
        None,
        False,
        {},
        "Backwards",
    )
    order.observe([])
    pace = Alone()
    pace.begin(4)
    assert (pace.lockstep, pace.weight(7, 0.0), pace.telemetry(), pace.fixed_k) == (False, 1.0, {"k": 1}, None)
    assert (Two().local, Two().needs_progress) == (True, False)


def test_a_subclass_of_a_built_in_policy_is_another_kind():
    class Mine(hemiola.CDGraB):
        pass

    assert (Mine.kind, hemiola.CDGraB.kind) == ("Mine", "cd-grab")
    order = Mine()
    order.begin([4], seed=0, lockstep=True)
    with pytest.raises(InputError, match=r"'Two'.*'Mine'|'Mine'.*'Two'"):
        order.load_state_dict(Two().state_dict())


def test_saved_attributes_are_the_state_and_come_back_as_they_were():
    before, after = Two(), Two()
    before.steps = 5
    before.table["a"][0] += 1
    state = before.state_dict()
    before.table["a"][0] += 1  # a state is a copy
    after.load_state_dict(state)
    assert after.steps == 5
    assert isinstance(after.table["a"][0], np.ndarray)
    assert after.table["a"][0].tolist() == [1, 2, 3]
    assert after.table["a"][1] == (1, None)


def test_what_a_state_cannot_hold_is_named():
    class Holds(Two):
        saved = ("generator",)

        def __init__(self):
            self.generator = np.random.default_rng(0)

    with pytest.raises(InputError, match=r"Holds\.generator is a Generator, which a state cannot hold; use numbers"):
        Holds().state_dict()


def test_pack_is_undone_by_unpack():
    value = {"x": [np.float32(1.5), np.bool_(True), "s", (2,)], 3: np.array([[1, 2]], dtype=np.int32)}
    back = unpack(pack(value, "x"))
    assert back["x"] == [1.5, True, "s", (2,)]
    assert back[3].dtype == np.int32


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "not the state of a 'a': its kind is None"),
        (stamped("b", 1), "not the state of a 'a': its kind is 'b'"),
        (stamped("a", 2, n=3), "the state of 'a' has version 2, this hemiola reads 1"),
        (stamped("a", 1, n=3), "the state of 'a' was saved with n = 3, this run has 4"),
    ],
)
def test_a_foreign_state_is_refused(state, said):
    with pytest.raises(InputError, match=said):
        own_state(state, "a", 1, {"n": 4})


# --------------------------------------------------------------------------------------------------------- strangers


def test_a_stranger_is_given_the_defaults_and_stays_itself():
    given = Stranger()
    order = checked_policy(given, Order, "order")
    assert order is given
    assert isinstance(order, Stranger)
    assert isinstance(order, Order)
    assert (order.kind, order.unit, order.slices) == ("Stranger", 1, False)
    order.begin([4], seed=0, lockstep=True)
    order.adopt(1, [])
    for other in (pickle.loads(pickle.dumps(order)), copy.deepcopy(order)):
        assert type(other) is type(order)
        assert other.sequence(0, 1).tolist() == [3, 0, 1, 2]
    assert checked_policy(order, Order, "order") is order


@pytest.mark.parametrize("family", [Order, Period, Pace])
def test_every_capability_is_a_member_of_its_contract(family):
    assert CAPABILITIES[family] < set(members(family))


@pytest.mark.parametrize(
    "missing", ["sketch", "begin", "sequence", "wants", "observe", "state_dict", "load_state_dict"]
)
def test_a_missing_member_is_named_with_its_signature(missing):
    parts = {key: value for key, value in vars(Stranger).items() if key != missing and not key.startswith("__")}
    with pytest.raises(InputError) as caught:
        checked_policy(type("Half", (), parts)(), Order, "order")
    written = {
        "sketch": "sketch: str | None",
        "sequence": "sequence(self, worker: int, epoch: int) -> np.ndarray",
        "observe": "observe(self, visits: Sequence[Visit]) -> None",
    }
    assert str(caught.value).startswith(f"order: Half lacks {written.get(missing, missing)}")
    assert "subclass hemiola.Order" in str(caught.value)


def test_other_arguments_are_named():
    class Short(Stranger):
        def sequence(self, epoch):
            return np.arange(3)

    class Wrong(Alone):
        k = 3

    for given, family, said in (
        (
            Short(),
            Order,
            r"order: Short\.sequence\(self, epoch\) must take the arguments of sequence\(self, worker: int",
        ),
        (Wrong(), Pace, r"pace: Wrong\.k must be a method, k\(self\) -> int, got 3"),
    ):
        with pytest.raises(InputError, match=said):
            checked_policy(given, family, family.__name__.lower())


def test_a_class_a_value_or_an_incomplete_class_is_refused():
    with pytest.raises(InputError, match=r"order: Backwards is a class, and an object is meant; make one, as in Back"):
        checked_policy(Backwards, Order, "order")
    with pytest.raises(InputError, match=r"period: must be an object such as a hemiola\.Period, got 4"):
        checked_policy(4, Period, "period")

    class Incomplete(hemiola.Period):
        pass

    with pytest.raises(
        InputError, match=r"period 'x:Incomplete': Incomplete lacks length\(self, lr: float, progress: "
    ):
        check_complete(Incomplete, Period, "period 'x:Incomplete'")


# --------------------------------------------------------------------------------------------------------- sequences


@pytest.mark.parametrize(
    ("sequence", "said"),
    [
        ([0, 1, 2], "sequence must visit each of 4 units once, got 3 visits"),
        ([0, 1, 2, 2], "sequence must visit each of 4 units once, got unit 2 2 times"),
        ([0, 1, 2, 4], "sequence must be a permutation of 0 to 3, got 4 in it"),
        ([0, 1, 2, -1], "sequence must be a permutation of 0 to 3, got -1 in it"),
        ([0.0, 1, 2, 3], "sequence must give whole numbers, got float64"),
        ([[0, 1], [2, 3]], "sequence must give whole numbers, got int64 of shape"),
    ],
)
def test_a_sequence_that_is_no_permutation_is_named_with_worker_and_epoch(sequence, said):
    class Broken(Backwards):
        def sequence(self, worker, epoch):
            return np.array(sequence)

    with pytest.raises(InputError, match=f"order 'Broken', worker 2, epoch 7: {said}"):
        checked_sequence(Broken(), 2, 7, 4)
