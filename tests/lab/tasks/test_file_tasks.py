"""The tasks that read files: on small folders in the official formats, and on the real sets where they are."""

import inspect

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, vmap

from hemiola import contracts
from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.lab.tasks import TASKS, describe_tasks, load_task, optimum
from hemiola.lab.tasks.files import SETS
from hemiola.lab.tasks.hmda import AMOUNTS, NUMBERS
from hemiola.lab.tasks.models import GPT, LSTM
from hemiola.training import Training

FROM_FILES = [name for name, entry in TASKS.items() if entry.data]


def gradients_per_example(task, count):
    """Per-example gradients two ways: torch.func, and one backward pass each."""
    torch.manual_seed(0)
    model = task.model()
    names, parameters = zip(*model.named_parameters(), strict=True)
    inputs, targets = task.train.batch(np.arange(count))

    def loss(weights, x, y):
        outputs = functional_call(model, dict(zip(names, weights, strict=True)), (x[None],))
        return task.losses(outputs, y[None])[0]

    together = vmap(grad(loss), in_dims=(None, 0, 0))(tuple(p.detach() for p in parameters), inputs, targets)
    one_by_one = [torch.autograd.grad(loss(parameters, x, y), parameters) for x, y in zip(inputs, targets, strict=True)]
    return together, one_by_one


@pytest.mark.parametrize("name", FROM_FILES)
def test_tasks_from_small_folders(folder, name):
    task = load_task(name, {}, folder)
    assert isinstance(task, contracts.TaskLike)
    assert task.name == name
    torch.manual_seed(0)
    inputs, targets = task.train.batch(np.arange(3))
    outputs = task.model()(inputs)
    losses, scores = task.losses(outputs, targets), task.scores(outputs, targets)
    assert losses.shape == scores.shape == (3,)
    assert torch.isfinite(losses).all()
    # Examples do not see each other: alone, each has the loss it has among others.
    torch.manual_seed(0)
    alone = task.losses(task.model()(inputs[1:2]), targets[1:2])
    torch.testing.assert_close(alone, losses[1:2])


@pytest.mark.parametrize("name", FROM_FILES)
def test_models_work_under_vmap_and_grad(folder, name):
    together, one_by_one = gradients_per_example(load_task(name, {}, folder), 2)
    for index, expected in enumerate(one_by_one):
        for many, one in zip(together, expected, strict=True):
            torch.testing.assert_close(many[index], one, rtol=1e-4, atol=1e-6)


def test_cifar_pictures_are_standardised_by_colour(folder):
    inputs, targets = load_task("cifar10-lenet", {}, folder).train.batch(np.array([14, 0]))
    raw = np.fromfile(folder / "cifar-10-batches-bin/data_batch_5.bin", np.uint8).reshape(3, 3073)[2, 1:]
    means, deviations = np.array([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).repeat(1024, axis=1)
    torch.testing.assert_close(inputs[0].flatten(), torch.tensor((raw / 255 - means) / deviations, dtype=torch.float32))
    assert targets.tolist() == [3, 1]


def test_windows_of_words(folder):
    task = load_task("wikitext2-lstm", {}, folder)
    assert len(task.train) == (40 * 6 - 1) // 35
    inputs, targets = task.train.batch(np.arange(len(task.train)))
    # a b c <unk> d <eos> are numbered as they first come.
    assert inputs.flatten().tolist() == [i % 6 for i in range(6 * 35)]
    assert targets.flatten().tolist() == [(i + 1) % 6 for i in range(6 * 35)]
    assert task.test.batch(np.array([0]))[0][0, :4].tolist() == [0, 3, 1, 5]  # z is unknown
    assert task.train.labels() is None
    assert task.summarise(np.log(8.0)) == pytest.approx(8.0)
    assert task.summarise(1e6) == float("inf")


def test_fewer_windows_and_words(folder):
    task = load_task("wikitext2-lstm", {"examples": 2, "words": 3}, folder)
    assert len(task.train) == 2
    # a, b and c come first of the equally frequent; the others are unknown.
    assert task.train.batch(np.array([0]))[0][0, :7].tolist() == [0, 1, 2, 3, 3, 3, 0]
    assert task.model().head.out_features == 4


@pytest.mark.parametrize(
    "name",
    [
        "cifar10-lenet",
        "cifar10-vgg",
        "mnist-mlp",
        "mnist-lenet",
        "fashion-lenet",
        "m4-mlp",
        "hmda-logistic",
        "a9a-logistic",
    ],
)
def test_examples_takes_the_first_ones(folder, name):
    few, every = load_task(name, {"examples": 2}, folder), load_task(name, {}, folder)
    assert len(few.train) == 2 < len(every.train)
    assert len(few.test) == len(every.test)
    for found, expected in zip(few.train.batch(np.arange(2)), every.train.batch(np.arange(2)), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(InputError, match="examples must be at least 0, got -1"):
        load_task(name, {"examples": -1}, folder)


def test_weeks(folder):
    task = load_task("m4-mlp", {"stride": 2}, folder)
    assert len(task.train) == 3 * 8  # starts 0, 2, ..., 14 of 40 - 26 + 1 = 15
    series = 10 + np.arange(53) % 7
    mean, deviation = series[:40].mean(), series[:40].std()
    inputs, targets = task.train.batch(np.array([9]))
    np.testing.assert_allclose(inputs[0], (series[2:22] - mean) / deviation, rtol=1e-5)
    np.testing.assert_allclose(targets[0], (series[22:28] - mean) / deviation, rtol=1e-5)
    inputs, targets = task.test.batch(np.array([1]))
    np.testing.assert_allclose(inputs[0], (series[20:40] - mean) / deviation, rtol=1e-5)
    np.testing.assert_allclose(targets[0], (series[40:46] - mean) / deviation, rtol=1e-5)


def test_weeks_as_the_authors_of_cd_grab_have_them(folder):
    task = load_task("m4-mlp", {"setting": "cd-grab"}, folder)
    # 40 weeks, starts 0, 3, .., 12 below 40 - 26 = 14: five windows of each of three series, nine tenths of them.
    assert len(task.train) == int(0.9 * 15)
    torch.manual_seed(0)
    model = task.model()
    weeks = torch.randn(2, 20)
    expected = weeks
    for _ in range(6):
        expected = torch.cat([expected, model.step(expected[:, -20:])], dim=1)
    torch.testing.assert_close(model(weeks), expected[:, 20:])


def test_drawings_come_by_writer(folder):
    task = load_task("femnist-cnn", {}, folder)
    assert task.train.groups().tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
    inputs, targets = task.train.batch(np.array([3, 8]))
    raw = np.load(folder / "femnist/femnist-128.npz")["x"][[3, 8]]
    torch.testing.assert_close(inputs.flatten(1), torch.tensor(raw / 127.5 - 1, dtype=torch.float32))
    assert targets.tolist() == [53, 58]


@pytest.mark.parametrize("pace", ["k-sync", {"name": "k-async", "k": 1}])
def test_a_run_on_natural_shards(folder, pace):
    given = {"task": "femnist-cnn", "workers": 3, "batch": 2, "stop": {"epochs": 2}, "shards": {"split": "natural"}}
    (cell,) = Experiment({**given, "order": "cd-grab", "pace": pace}).cells
    plan, make_cluster = cell.plan(folder)
    assert sorted(map(len, plan.shards)) == [2, 3, 5]
    training = Training(plan, make_cluster)
    assert training.run() == "done"
    used = [counts["used"] for counts in training.records[-1]["workers"]]
    if pace == "k-sync":  # Whose shard is through rests: every drawing is visited once an epoch.
        assert used == [2 * len(shard) for shard in plan.shards]
    assert 20 <= sum(used) <= 21


def test_drawings_that_do_not_fit_together(folder, tmp_path):
    (tmp_path / "femnist").mkdir()
    arrays = dict(np.load(folder / "femnist/femnist-128.npz"))
    np.savez(tmp_path / "femnist/femnist-128.npz", **arrays | {"writers": np.array([3, 1])})
    with pytest.raises(InputError, match="10 labels and 4 drawings of all writers do not fit together"):
        load_task("femnist-cnn", {}, tmp_path)


def test_windows_of_characters(folder):
    task = load_task("shakespeare-gpt", {"context": 20}, folder)
    text = "To be, or not to be.\n" * 60
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    cut = int(0.9 * len(text))
    assert (len(task.train), len(task.test)) == ((cut - 1) // 20, (len(text) - cut - 1) // 20)
    inputs, targets = task.train.batch(np.array([1]))
    assert inputs[0].tolist() == [numbers[each] for each in text[20:40]]
    assert targets[0].tolist() == [numbers[each] for each in text[21:41]]
    assert task.test.batch(np.array([0]))[0][0].tolist() == [numbers[each] for each in text[cut : cut + 20]]


def test_mortgages(folder):
    task = load_task("hmda-logistic", {}, folder)
    assert (len(task.train), len(task.test)) == (16, 4)  # 20 of 30 were originated or denied
    labels = np.concatenate([task.train.labels(), task.test.labels()])
    assert (labels == 1).sum() == 10
    inputs, _ = task.train.batch(np.arange(16))
    measures = inputs[:, : len(AMOUNTS + NUMBERS)]
    torch.testing.assert_close(measures.mean(0), torch.zeros(measures.shape[1]), atol=1e-6, rtol=0)
    assert set(inputs[:, len(AMOUNTS + NUMBERS) :].flatten().tolist()) == {0.0, 1.0}


def test_lstm_is_the_lstm_of_pytorch():
    torch.manual_seed(0)
    model = LSTM(11, width=8, layers=2)
    reference = torch.nn.LSTM(8, 8, 2, batch_first=True)
    with torch.no_grad():
        for layer in range(2):
            getattr(reference, f"weight_ih_l{layer}").copy_(model.inputs[layer].weight)
            getattr(reference, f"bias_ih_l{layer}").copy_(model.inputs[layer].bias)
            getattr(reference, f"weight_hh_l{layer}").copy_(model.states[layer].weight)
            getattr(reference, f"bias_hh_l{layer}").zero_()
    tokens = torch.randint(11, (3, 9))
    expected = model.head(reference(model.embedding(tokens))[0])
    torch.testing.assert_close(model(tokens), expected)


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(11, width=8, layers=2, heads=2, context=9)
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist-mlp", {"hidden": [-1]}, "hidden must be widths of at least 1, got [-1]"),
        ("wikitext2-gpt", {"width": 10, "heads": 4}, "width must be a multiple of heads, got 10 and 4"),
        ("wikitext2-gpt", {"layers": 0}, "layers must be at least 1, got 0"),
        ("m4-mlp", {"stride": 0}, "stride must be at least 1, got 0"),
        ("a9a-logistic", {"l2": -1.0}, "l2 must be at least 0, got -1.0"),
        ("wikitext2-lstm", {"words": -1}, "examples and words must be at least 0, got 0 and -1"),
        ("glue-minilm", {"examples": -1}, "examples must be at least 0, got -1"),
        ("femnist-cnn", {"channels": 0}, "channels must be at least 1, got 0"),
        ("shakespeare-gpt", {"context": 0}, "context must be at least 1, got 0"),
        ("sst2-logistic", {"examples": -1}, "examples must be at least 0, got -1"),
        ("glue-minilm", {"trained": 3}, 'trained must be "all" or a number of layers from 0 to 2, got 3'),
        ("glue-minilm", {"tokens": 65}, "tokens must be from 8 to 64, got 65"),
    ],
)
def test_impossible_options(folder, name, options, message):
    with pytest.raises(InputError) as caught:
        load_task(name, options, folder)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", FROM_FILES)
def test_missing_data(name, tmp_path, monkeypatch):
    monkeypatch.delenv("HEMIOLA_DATA", raising=False)
    data_set = TASKS[name].data[0]
    with pytest.raises(InputError, match=f"hemiola data fetch {data_set} --data {tmp_path}"):
        load_task(name, {}, tmp_path)
    with pytest.raises(InputError, match="HEMIOLA_DATA"):
        load_task(name)


def test_the_environment_names_the_data_folder(folder, monkeypatch):
    monkeypatch.setenv("HEMIOLA_DATA", str(folder))
    assert len(load_task("a9a-logistic").train) == 10


def test_a_cut_file_is_named(folder, tmp_path):
    for file in SETS["a9a"].files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("-1 1:1\n+1 2")
    with pytest.raises(InputError, match=f"cannot read {tmp_path / 'a9a/a9a'}"):
        load_task("a9a-logistic", {}, tmp_path)


def test_only_tasks_with_files_take_a_data_folder():
    for entry in TASKS.values():
        assert ("data" in inspect.signature(entry.make).parameters) == bool(entry.data)
        assert set(entry.data) <= set(SETS)


@pytest.mark.data
@pytest.mark.parametrize("record", [r for r in describe_tasks() if r.data != "bundled"], ids=lambda r: r.name)
def test_descriptions_are_true_of_the_real_sets(real_data, record):
    missing = [file for name in TASKS[record.name].data for file in SETS[name].missing(real_data)]
    if missing:
        pytest.skip(f"{missing} not in HEMIOLA_DATA")
    task = load_task(record.name, {}, real_data)
    assert (len(task.train), len(task.test), task.convex) == (record.train, record.test, record.convex)
    assert sum(p.numel() for p in task.model().parameters()) == record.parameters


@pytest.mark.data
def test_optimum_of_a9a(real_data, tmp_path, monkeypatch):
    """Against scikit-learn's solver, which does not penalise its intercept unless it is given as a feature."""
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setenv("HEMIOLA_CACHE", str(tmp_path))
    if SETS["a9a"].missing(real_data):
        pytest.skip("a9a not in HEMIOLA_DATA")
    task = load_task("a9a-logistic", {"l2": 1e-3}, real_data)
    x, y = (part.numpy() for part in task.train.batch(np.arange(len(task.train))))
    x = np.hstack([x, np.ones((len(x), 1))]).astype(np.float64)
    solver = LogisticRegression(C=1 / (1e-3 * len(x)), fit_intercept=False, tol=1e-8, max_iter=1000).fit(x, y)
    w = solver.coef_[0]
    value = np.logaddexp(0, -(2 * y - 1) * (x @ w)).mean() + 5e-4 * w @ w
    assert optimum(task) == pytest.approx(value, abs=1e-9)
