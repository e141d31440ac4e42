"""Orders from scores: their shapes, where scores come from, and losses on every cluster."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hemiola
from hemiola.contracts import Visit
from hemiola.errors import InputError
from hemiola.gradients.sketch import decode_rows, encode_rows
from hemiola.lab.experiment import Experiment
from hemiola.lab.named import make_order
from hemiola.lab.tasks.task import Task, TensorExamples
from hemiola.order import Scored
from hemiola.order.scored import SHAPES, unit_means
from hemiola.training import Training


def make(sizes, seed=0, scores=None, **options):
    order = Scored(**options)
    order.begin(sizes, seed, True)
    count = sum(sizes) * order.unit
    order.meet(np.split(np.arange(count), np.cumsum(sizes)[:-1] * order.unit), count, scores)
    return order


# --------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ("sorted", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("folded", [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]),
        ("zigzag", [0, 3, 6, 9, 10, 7, 4, 1, 2, 5, 8, 11]),
        ("saw", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),  # two units around a border are no zigzag
    ],
)
def test_shapes_by_hand(shape, ranks):
    assert SHAPES[shape](12, 3).tolist() == ranks
    scores = np.random.default_rng(0).permutation(12).astype(float)
    assert scores[make([12], scores=scores, by="score", shape=shape).sequence(0, 0)].tolist() == ranks


def test_a_saw_by_hand():
    """30 units in thirds: 3 on either side of the borders at 10 and 20 in a zigzag of 3 layers."""
    expected = [*range(7), 7, 10, 11, 8, 9, 12, *range(13, 17), 17, 20, 21, 18, 19, 22, *range(23, 30)]
    assert SHAPES["saw"](30, 3).tolist() == expected


def slow_saw(ranks, sections, share, layers):
    """As the authors' repository describes it, on lists: sorted stretches, and a zigzag around each border."""
    out, cursor, radius = [], 0, round(len(ranks) * share)
    for split in [round(len(ranks) * number / sections) for number in range(1, sections)]:
        start, stop = max(cursor, split - radius), min(len(ranks), split + radius)
        out += ranks[cursor:start]
        for layer in range(layers):
            part = ranks[start:stop][layer::layers]
            out += part[::-1] if layer % 2 else part
        cursor = stop
    return out + ranks[cursor:]


@given(count=st.integers(1, 200), layers=st.integers(1, 9))
def test_every_shape_is_a_permutation(count, layers):
    for shape in SHAPES.values():
        assert sorted(shape(count, layers).tolist()) == list(range(count))
    assert SHAPES["saw"](count, layers).tolist() == slow_saw(list(range(count)), 3, 0.1, layers)
    for shape in ("folded", "zigzag"):
        assert SHAPES[shape](count, 1).tolist() == list(range(count))  # one layer is no fold


# --------------------------------------------------------------------------------------------------------------- scores


def test_each_worker_sorts_its_own_and_a_units_score_is_its_mean():
    scores = np.array([9, 9, 1, 2, 5, 4, 0, 100, 3, 3, 2, 2.0])
    order = make([3, 3], scores=scores, by="score", unit=2)
    assert [order.sequence(worker, 0).tolist() for worker in (0, 1)] == [[1, 2, 0], [2, 1, 0]]
    assert unit_means(np.array([1, 3, 8.0]), 2).tolist() == [2, 8]


def test_equal_scores_come_in_another_random_order_every_epoch():
    order, same = (make([40], scores=np.repeat([1.0, 0.0], 20), by="score") for _ in range(2))
    first, second = order.sequence(0, 0), order.sequence(0, 1)
    assert set(first[:20]) == set(second[:20]) == set(range(20, 40))
    assert not np.array_equal(first, second)
    assert np.array_equal(same.sequence(0, 0), first)


def tell(order, worker, epoch, losses):
    units = np.arange(len(losses))
    order.observe([Visit(worker, epoch, units, None, 1, np.array(losses, float))])


def test_losses_sort_the_next_epoch_and_the_first_is_random():
    order, random = make([6]), hemiola.RandomReshuffling()
    random.begin([6], 0, True)
    assert order.wants(0, 0)
    assert order.sketch is None
    assert np.array_equal(order.sequence(0, 0), random.sequence(0, 0))
    tell(order, 0, 0, [3, 1, 5, 0, 2, 4])
    assert order.sequence(0, 1).tolist() == [3, 1, 4, 0, 5, 2]
    tell(order, 0, 1, [0, 1, 2, 3, 4, 5])  # comes while epoch 1 runs: asking again gives the same
    assert order.sequence(0, 1).tolist() == [3, 1, 4, 0, 5, 2]
    assert order.sequence(0, 2).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="the order of epoch 1 is gone"):
        order.sequence(0, 1)


def test_losses_that_are_not_finite_are_left_out():
    order = make([5])
    tell(order, 0, 0, [4, 3, 2, 1, 0])
    order.sequence(0, 0)
    tell(order, 0, 1, [np.nan, np.inf, 20, -np.inf, 10])
    assert order.sequence(0, 1).tolist() == [3, 1, 0, 4, 2]  # units 0, 1 and 3 keep what they had
    assert order.telemetry() == {"skipped": 3}
    unknown = make([5])
    tell(unknown, 0, 0, [4, 3, np.nan, 1, 0])
    assert unknown.sequence(0, 1).tolist()[2] == 2  # never known: in the middle


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    shape=st.sampled_from(list(SHAPES)),
    layers=st.integers(1, 5),
    epochs=st.lists(st.lists(st.floats(width=32), min_size=36, max_size=36), max_size=4),
    restart=st.integers(0, 4),
)
def test_always_a_permutation_and_restarts_do_not_show(sizes, shape, layers, epochs, restart):
    one, other = (make(sizes, shape=shape, layers=layers) for _ in range(2))
    for epoch, losses in enumerate(epochs):
        for worker, size in enumerate(sizes):
            sequence = one.sequence(worker, epoch)
            assert sorted(sequence.tolist()) == list(range(size))
            assert np.array_equal(sequence, other.sequence(worker, epoch))
            for order in (one, other):
                tell(order, worker, epoch, losses[12 * worker : 12 * worker + size])
        if epoch == restart:
            file = io.BytesIO()
            torch.save(other.state_dict(), file)
            file.seek(0)
            other = make(sizes, shape=shape, layers=layers)
            other.load_state_dict(torch.load(file, weights_only=True))
    assert one.telemetry() == other.telemetry()


def test_another_number_of_workers_runs_what_was_learnt_once_more():
    order = make([4])
    order.adopt(3, [np.array([2, 0, 1, 3])])
    assert order.sequence(0, 3).tolist() == [2, 0, 1, 3]
    known = make([4], scores=np.arange(4.0), by="score")
    known.adopt(3, [np.array([2, 0, 1, 3])])
    assert known.sequence(0, 3).tolist() == [0, 1, 2, 3]


def test_scores_from_a_file(tmp_path):
    path = tmp_path / "scores.txt"
    path.write_text("0.5\n-1\n3e2\n0\n\n")
    assert make([4], by="file", file=str(path)).sequence(0, 0).tolist() == [1, 3, 0, 2]
    with pytest.raises(InputError, match="one number for each of 5 examples, got 4"):
        make([5], by="file", file=str(path))
    saved = make([4], by="file", file=str(path)).state_dict()
    path.write_text("0\n1\n2\n3\n")
    with pytest.raises(InputError, match="saved with scores = "):
        make([4], by="file", file=str(path)).load_state_dict(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\nhard\n", r"line 2 of .*scores.txt must be a number, got 'hard'"),
        ("1\n\n2\n", r"line 2 of .*scores.txt must be a number, got ''"),
        ("nan\n", r"line 1 of .*scores.txt must be a finite number, got 'nan'"),
    ],
)
def test_files_that_are_no_scores(tmp_path, text, message):
    (tmp_path / "scores.txt").write_text(text)
    with pytest.raises(InputError, match=message):
        Scored(by="file", file=str(tmp_path / "scores.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "length"}, "by must be one of loss, score, file, got 'length'"),
        ({"shape": "fold"}, "shape must be one of sorted, folded, zigzag, saw, got 'fold'"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"by": "file"}, "by = 'file' needs a file, as in file = 'scores.txt'"),
        ({"file": "scores.txt"}, "file = 'scores.txt' needs by = 'file', got by = 'loss'"),
        ({"by": "file", "file": "/nowhere/scores.txt"}, "file: cannot read /nowhere/scores.txt"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(InputError, match=message):
        Scored(**options)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (None, "by = 'score' needs examples that have scores, and these have none; use 'loss' or 'file'"),
        (np.zeros(3), "one number for each of 4 examples, got 3"),
        (np.zeros((4, 2)), r"one number for each example, got float64 of shape \(4, 2\)"),
        (np.array([0, 1, np.inf, 2]), "scores must be finite, got inf for example 2"),
    ],
)
def test_impossible_scores(scores, message):
    with pytest.raises(InputError, match=message):
        make([4], by="score", scores=scores)


# -------------------------------------------------------------------------------------------------------------- in runs


STILL = 1e-9  # a learning rate


def squared(outputs, targets):
    return (outputs - targets) ** 2


def linear(examples=30, features=4):
    """Least squares; losses of each example can be computed by hand."""
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, features, generator=draws)
    targets = inputs.sum(1) + torch.arange(examples) / 3.0
    return Task(
        name="linear",
        model=lambda: torch.nn.Sequential(torch.nn.Linear(features, 1), torch.nn.Flatten(0)),
        losses=squared,
        scores=squared,
        train=TensorExamples(inputs, targets, scores=targets.numpy()),
        test=(inputs, targets),
        lr=STILL,
        batch=2,
    )


class Remembering(Scored):
    """Keeps what it was told, and wants sketches beside losses where that is said."""

    kind = "remembering"

    def __init__(self, sketch=None, unit=1):
        super().__init__(unit=unit)
        self.sketch = sketch
        self.seen = []

    def observe(self, visits):
        self.seen += visits
        super().observe(visits)


ROWS = [
    {},
    {"workers": 1},
    {"order": Remembering(unit=2), "batch": 4},
    {"order": Remembering("fold:4")},
    {"order": Remembering("fold:4:int8"), "period": {"name": "constant", "p": 2}},
    {"period": {"name": "constant", "p": 3}},
    {"shards": {"deal": "deck"}},
    {"shards": {"deal": "deck"}, "pace": {"name": "k-batch-async", "k": 2}},
    {"period": {"name": "clocked"}, "shards": {"deal": "deck"}},
    {"pace": {"name": "k-async", "k": 2}, "cluster": {"name": "simulated", "delay": "exponential(1.0)"}},
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_orders_are_told_the_loss_of_every_visited_unit(row):
    """At this learning rate the model stays, so that every loss is known beforehand."""
    task = linear()
    given = {"task": task, "workers": 3, "batch": 2, "order": Remembering(), "optimizer": {"lr": STILL}}
    (cell,) = Experiment({**given, "stop": {"epochs": 2}, **row}).cells
    run = Training(*cell.plan(None))
    assert run.run() == "done"
    order, model = run.plan.order, task.model()
    torch.nn.utils.vector_to_parameters(run.read(run.version), model.parameters())
    inputs, targets = task.train.batch(np.arange(30))
    with torch.no_grad():
        losses = task.losses(model(inputs), targets).numpy()
    visited = [np.zeros(size) for size in run.sizes]
    for visit in order.seen:
        expected = unit_means(losses[run.plan.shards[visit.worker]], order.unit)[visit.units]
        np.testing.assert_allclose(visit.losses, expected, rtol=1e-4)
        assert (visit.sketches is None) == (order.sketch is None)
        assert visit.sketches is None or visit.sketches.shape[1] in (4, 5)
        visited[visit.worker][visit.units] += 1
    assert all((counts >= 1).all() for counts in visited)


def test_a_sorted_order_visits_low_losses_first_on_the_simulated_cluster():
    given = {"task": linear(), "workers": 2, "batch": 2, "optimizer": {"lr": STILL}, "stop": {"epochs": 3}}
    (cell,) = Experiment({**given, "order": {"name": "scored", "by": "loss"}}).cells
    run = Training(*cell.plan(None))
    run.run()
    for worker, scores in enumerate(run.plan.order._scores):
        assert (np.diff(scores[run.plan.order.sequence(worker, 2)]) >= 0).all()


def test_a_tasks_own_scores_and_a_file_beside_the_experiment(tmp_path):
    given = {"task": linear(), "workers": 2, "batch": 2, "stop": {"epochs": 1}}
    targets = given["task"].train.targets.numpy()
    (cell,) = Experiment({**given, "order": {"name": "scored", "by": "score"}}).cells
    run = Training(*cell.plan(None))
    shard = run.plan.shards[1]
    assert (np.diff(targets[shard[run.plan.order.sequence(1, 0)]]) >= 0).all()
    digits = given | {"task": "digits-logistic", "order": {"name": "scored", "by": "score"}}
    with pytest.raises(InputError, match="by = 'score' needs examples that have scores"):
        Training(*Experiment(digits).cells[0].plan(None))
    np.savetxt(tmp_path / "scores.txt", -targets)
    order = make_order({"name": "scored", "by": "file", "file": "scores.txt"}, tmp_path)
    order.begin([30], 0, True)
    order.meet([np.arange(30)], 30, None)
    assert (np.diff(targets[order.sequence(0, 0)]) <= 0).all()


def test_int8_rows_leave_losses_as_they_are():
    rows = torch.cat([torch.randn(5, 8), torch.tensor([[1e-3], [1e3], [float("nan")], [0.1], [float("inf")]])], 1)
    payload = encode_rows(rows, 1)
    found = decode_rows(payload, 1)
    assert payload.shape == (5, 8 + 4 + 4)
    assert torch.equal(found[:, -1].nan_to_num(7), rows[:, -1].nan_to_num(7))
    assert torch.equal(found[:, :-1], decode_rows(encode_rows(rows[:, :-1])))
