"""The experiment file: what is right is understood, what is wrong is one clear line."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hemiola.errors import InputError
from hemiola.lab.execute import check_with_data
from hemiola.lab.experiment import Experiment, parse_change

pytestmark = pytest.mark.slow

GOOD = """
task = "digits-logistic"
workers = 4
batch = 2
seeds = [0, 1]
stop = { epochs = 1 }
evaluate = { every_epochs = 1 }
[optimizer]
name = "SGD"
lr = 0.2
schedule = { name = "MultiStepLR", milestones = [0.5, 0.75], gamma = 0.1 }
[shards]
split = { dirichlet = 0.3 }
[cluster]
name = "simulated"
delay = "exponential(1.0)"
slow = { 3 = 5.0 }
link = { bandwidth = "10 Gbit/s", latency = "50 us" }
[sweep]
"optimizer.lr" = [0.05, 0.1, 0.2]
[[run]]
name = "CD-GraB"
order = { name = "cd-grab" }
[[run]]
name = "ADPSGD"
period = { name = "adaptive", start = 4, low = 0.7, high = 1.3, sample = 0.25 }
[[run]]
name = "AdaSync"
pace = { name = "k-async", k = "adasync", start = 2 }
"""


def load(tmp_path: Path, text: str, changes: dict | None = None) -> Experiment:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return Experiment.load(path, changes)


def test_the_designs_example_gives_its_grid(tmp_path):
    experiment = load(tmp_path, GOOD)
    assert experiment.runs == ["CD-GraB", "ADPSGD", "AdaSync"]
    assert len(experiment.cells) == 3 * 3 * 2
    assert [(c.run, c.point["optimizer.lr"], c.seed) for c in experiment.cells[:3]] == [
        ("CD-GraB", 0.05, 0),
        ("CD-GraB", 0.05, 1),
        ("CD-GraB", 0.1, 0),
    ]
    plan, _ = experiment.cells[0].plan(None)
    assert plan.optimizer.rate(0.6) == pytest.approx(0.005)
    assert len(plan.shards) == 4


def test_runs_replace_policies_and_add_to_other_tables(tmp_path):
    text = GOOD.replace(
        '[[run]]\nname = "ADPSGD"',
        '[[run]]\nname = "ADPSGD"\nworkers = 2\ncluster = "simulated"\noptimizer = { momentum = 0.9 }',
    )
    cell = next(c for c in load(tmp_path, text).cells if c.run == "ADPSGD")
    assert cell.settings.workers == 2
    assert cell.settings.cluster == "simulated"
    assert cell.settings.optimizer["momentum"] == 0.9
    assert cell.settings.optimizer["schedule"]["name"] == "MultiStepLR"


def test_set_replaces_values_even_inside_a_shorthand(tmp_path):
    text = 'task = "digits-logistic"\npace = "k-sync"\nstop = { epochs = 1 }'
    changes = dict(parse_change(change) for change in ("pace.k=2", "workers=3", "task=breast-cancer-logistic"))
    (cell,) = load(tmp_path, text, changes).cells
    assert cell.settings.pace == {"name": "k-sync", "k": 2}
    assert cell.settings.workers == 3
    assert cell.settings.task == "breast-cancer-logistic"


MISTAKES = [
    ("task =", "not a TOML file"),
    (GOOD.replace("workers = 4", "wrokers = 4"), "unknown key 'wrokers'; did you mean 'workers'? Known: task, workers"),
    (GOOD.replace("workers = 4", "workers = 0"), "workers: must be greater than or equal to 1, got 0"),
    (GOOD.replace("workers = 4", 'workers = "four"'), "workers: must be a valid integer, got 'four'"),
    (GOOD.replace("batch = 2", "batch = 2.5"), "batch: must be a valid integer"),
    (
        GOOD.replace("[0.05, 0.1, 0.2]", "[0.05, -1]"),
        "must be a positive number of at most 1e+30, got -1",
    ),
    (
        GOOD.replace("[0.05, 0.1, 0.2]", "[1e308]"),
        "must be a positive number of at most 1e+30, got 1e+308",
    ),
    (GOOD.replace("[0.05, 0.1, 0.2]", '["big"]'), "optimizer.lr: must be a positive number, got 'big'"),
    (GOOD.replace('name = "SGD"', 'name = "SDG"'), "unknown optimizer 'SDG'; did you mean 'SGD'?"),
    (
        GOOD.replace('name = "SGD"', 'name = "SGD"\nmomentun = 0.9'),
        "optimizer: for SGD, unknown argument 'momentun'; did you mean 'momentum'? Known: momentum",
    ),
    (GOOD.replace('name = "SGD"', 'name = "SGD"\nmomentum = -1.0'), "SGD refuses its arguments"),
    (GOOD.replace("MultiStepLR", "MultiStep"), "unknown schedule 'MultiStep'; did you mean 'MultiStepLR'?"),
    (GOOD.replace("milestones = [0.5, 0.75]", "milestones = [100]"), "milestones must be a share of the run"),
    (GOOD.replace('"cd-grab"', '"cd-grub"'), "unknown order 'cd-grub'; did you mean 'cd-grab'?"),
    (
        GOOD.replace('{ name = "cd-grab" }', '{ name = "cd-grab", unti = 2 }'),
        "order: unknown option 'unti'; did you mean 'unit'? Known: unit",
    ),
    (
        GOOD.replace('{ name = "cd-grab" }', '{ name = "cd-grab", unit = "a" }'),
        "order.unit: must be a valid integer, got 'a'",
    ),
    (GOOD.replace('"adaptive"', '"adaptative"'), "unknown period 'adaptative'; did you mean 'adaptive'?"),
    (GOOD.replace("start = 4", "start = 0"), "period: start"),
    (GOOD.replace('"k-async"', '"k-asink"'), "unknown pace 'k-asink'; did you mean 'k-async'?"),
    (GOOD.replace('k = "adasync", start = 2', "k = 9"), "k must be between 1 and the number of workers, 4"),
    (
        GOOD.replace("exponential(1.0)", "exponental(1.0)"),
        "cluster: unknown delay law 'exponental'; did you mean 'exponential'?",
    ),
    (GOOD.replace("slow = { 3 = 5.0 }", "slow = { 7 = 5.0 }"), "slow names worker 7"),
    (GOOD.replace("slow = { 3 = 5.0 }", "slow = { x = 5.0 }"), "slow: must map worker numbers"),
    (GOOD.replace("10 Gbit/s", "10 Gigs"), "link.bandwidth must be a number and a unit"),
    (GOOD.replace("bandwidth =", "bandwith ="), "did you mean 'bandwidth'?"),
    (GOOD.replace('name = "simulated"', 'name = "simulatd"'), "unknown cluster 'simulatd'; did you mean 'simulated'?"),
    (GOOD.replace("{ epochs = 1 }", "{ epochs = 0 }"), "stop.epochs: must be greater than 0, got 0"),
    (
        GOOD.replace("{ epochs = 1 }", "{ epochs = 1, updates = 3 }"),
        "stop: give exactly one of epochs, updates and seconds",
    ),
    (
        GOOD.replace("{ epochs = 1 }", "{ epoch = 1 }"),
        "stop: unknown key 'epoch'; did you mean 'epochs'? Known: epochs, updates, seconds",
    ),
    (GOOD.replace("{ dirichlet = 0.3 }", '"sorted"'), "shards.split"),
    (GOOD.replace("{ dirichlet = 0.3 }", "{ dirichlet = -1 }"), "ALPHA above 0"),
    (GOOD.replace("seeds = [0, 1]", "seeds = [0, 0]"), "seeds: must be a list of different whole numbers"),
    (GOOD.replace("seeds = [0, 1]", "seeds = []"), "seeds: must be a list"),
    (
        GOOD.replace('"optimizer.lr" = [0.05, 0.1, 0.2]', '"optimiser.lr" = [1]'),
        "sweep: unknown key 'optimiser'; did you mean 'optimizer'?",
    ),
    (GOOD.replace('"optimizer.lr" = [0.05, 0.1, 0.2]', '"optimizer.lr" = 1'), "must be a list of at least one value"),
    (GOOD.replace('"ADPSGD"', '"CD-GraB"'), "two runs called 'CD-GraB'"),
    (GOOD.replace('task = "digits-logistic"', ""), "task: is required"),
    ('run = 3\ntask = "digits-logistic"', "run: must be one or more [[run]] tables"),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=[said[:40] for _, said in MISTAKES])
def test_a_mistake_is_one_clear_line_that_names_the_file(tmp_path, text, said):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert said in message
    assert message.startswith(str(tmp_path / "experiment.toml"))
    assert "\n" not in message


RUNS = 'task = "digits-logistic"\nstop = {{ epochs = 1 }}\n{top}\n[[run]]\nname = "a"\n[[run]]\nname = "b"\n{own}\n'
SWEPT = '\n[sweep]\n"optimizer.lr" = [0.1, -1]'


@pytest.mark.parametrize(
    ("top", "own", "place"),
    [
        ("workers = 0", "", "workers: must be"),
        ("wrokers = 3", "", "unknown key 'wrokers'"),
        ('pace = "zzz"', "", "pace.name: unknown pace 'zzz'. Known: k-sync"),
        ("", "workers = 0", "run 'b': workers: must be"),
        ("", 'pace = "zzz"', "run 'b': pace.name: unknown pace 'zzz'. Known: k-sync"),
        (SWEPT, "", "sweep (optimizer.lr = -1): optimizer.lr: must be"),
        ("[sweep]\nworkers = [2, 4]", 'pace = { name = "k-sync", k = 3 }', "run 'b' (workers = 2): pace: k must be"),
    ],
)
def test_a_mistake_is_blamed_on_the_place_where_it_is(tmp_path, top, own, place):
    with pytest.raises(InputError) as caught:
        load(tmp_path, RUNS.format(top=top, own=own))
    assert str(caught.value).startswith(f"{tmp_path / 'experiment.toml'}: {place}")


def test_a_mistake_that_only_the_data_show_is_blamed_as_well(tmp_path):
    for top, own, place in (("workers = 1501", "", ""), ("", "workers = 1501", "run 'b': ")):
        with pytest.raises(InputError) as caught:
            check_with_data(load(tmp_path, RUNS.format(top=top, own=own)), None)
        assert str(caught.value).startswith(f"{place}workers: 1501 workers cannot share 1500")


def test_a_name_may_stand_for_its_table(tmp_path):
    text = 'task = "digits-logistic"\n[optimizer]\nlr = 0.5\nschedule = "CosineAnnealingLR"'
    (cell,) = load(tmp_path, text).cells
    assert cell.optimizer(1.0).rate(0.5) == pytest.approx(0.25)
    experiment = load(tmp_path, RUNS.format(top='optimizer = "Adam"', own="optimizer = { lr = 0.5 }"))
    assert [cell.optimizer(1.0).name for cell in experiment.cells] == ["Adam", "Adam"]
    assert [cell.optimizer(1.0).lr for cell in experiment.cells] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('stop = "10 epochs"', "stop: must be a table, as in stop = { epochs = 10 }, got '10 epochs'"),
        ('shards = "iid"', "shards: must be a table, as in shards = { split = \"iid\" }, got 'iid'"),
        ("evaluate = 3", "evaluate: must be a table, as in evaluate = { every_epochs = 1 }, got 3"),
        ("optimizer = { schedule = 3 }", "optimizer.schedule: must be a name or a table with one"),
        ('optimizer = { schedule = "Cosine" }', "optimizer.schedule: unknown schedule 'Cosine'. Known: constant"),
        ("optimizer = { schedule = { end = 0.1 } }", "optimizer.schedule: unknown schedule None. Known: constant"),
        ("optimizer = 3", "optimizer: must be a valid dictionary, got 3"),
        ("period = 3", "period"),
        ("outer = 3", "outer: must be a valid dictionary, got 3"),
        ('outer = "dilco"', "outer: unknown outer optimizer 'dilco'; did you mean 'diloco'?"),
        ("outer = { lr = 0.7 }", "outer must be a name such as 'diloco', or a table"),
        ('outer = { name = "SGD", momentun = 0.9 }', "outer optimizer: for SGD, unknown argument 'momentun'"),
        ('outer = "diloco"', "outer = 'diloco' works on the change of local steps, and full communication has none"),
        ('outer = "diloco"\nperiod = "clocked"', "outer = 'diloco' is not for averagings that follow the clock"),
        ('cluster = { name = "simulated", link = "10 Gbit/s" }', "cluster.link: must be a valid dictionary"),
        ('cluster = { name = "simulated", slow = 3 }', "cluster.slow: must be a valid dictionary"),
    ],
)
def test_what_cannot_stand_for_a_table_is_one_clear_line(tmp_path, line, said):
    with pytest.raises(InputError) as caught:
        load(tmp_path, f'task = "digits-logistic"\n{line}')
    assert str(caught.value).startswith(f"{tmp_path / 'experiment.toml'}: {said}")


@pytest.mark.parametrize(
    "change", ['sweep."optimizer.lr"=[0.1, 0.2]', "sweep.optimizer.lr=[0.1, 0.2]", 'sweep={"optimizer.lr"=[0.1, 0.2]}']
)
def test_a_sweep_may_be_set(tmp_path, change):
    changes = dict([parse_change(change)])
    for text in ('task = "digits-logistic"', 'task = "digits-logistic"\n[sweep]\n"optimizer.lr" = [1.0]'):
        experiment = load(tmp_path, text, changes)
        assert [cell.point for cell in experiment.cells] == [{"optimizer.lr": 0.1}, {"optimizer.lr": 0.2}]
        assert [cell.settings.optimizer["lr"] for cell in experiment.cells] == [0.1, 0.2]
    (tmp_path / "dotted.toml").write_text('task = "digits-logistic"\n[sweep]\noptimizer.lr = [0.1, 0.2]')
    assert [cell.point for cell in Experiment.load(tmp_path / "dotted.toml").cells] == [
        {"optimizer.lr": 0.1},
        {"optimizer.lr": 0.2},
    ]


DATA_MISTAKES = [
    ({"task": "digits-logstic"}, "did you mean 'digits-logistic'?"),
    ({"task": {"name": "digits-mlp", "hiden": [3]}}, "hiden"),
    ({"task": {"hidden": [3]}}, "a table needs a name"),
    ({"workers": 1501}, "cannot share 1500 training examples"),
    ({"workers": 100, "batch": 16}, "batch: 16 is larger than the smallest worker's shard of 15"),
    ({"order": {"name": "rr", "unit": 3}, "batch": 4}, "batch must be a multiple of order.unit = 3, got 4"),
    ({"task": "no.such.module:task"}, "no.such"),
]


@pytest.mark.parametrize(("fields", "said"), DATA_MISTAKES, ids=[said[:30] for _, said in DATA_MISTAKES])
def test_mistakes_that_only_the_data_show(fields, said):
    experiment = Experiment({"task": "digits-logistic", **fields})
    with pytest.raises(InputError) as caught:
        experiment.cells[0].plan(None)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Experiment.load(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="cannot be read"):
        Experiment.load(tmp_path)


# --------------------------------------------------------------------------------------------------------------- fuzz

KEYS = [
    "task",
    "workers",
    "batch",
    "seeds",
    "stop",
    "evaluate",
    "optimizer",
    "shards",
    "cluster",
    "sweep",
    "run",
    "order",
    "period",
    "pace",
    "name",
    "k",
    "unit",
    "epochs",
    "lr",
    "schedule",
    "delay",
    "slow",
    "link",
    "split",
    "title",
    "x",
]
NAMES = [
    "digits-logistic",
    "rr",
    "cd-grab",
    "adaptive",
    "constant",
    "k-async",
    "adasync",
    "simulated",
    "SGD",
    "exponential(1)",
    "",
    "MultiStepLR",
    "\x00",
    "trace(nowhere)",
    "iid",
]
scalars = st.one_of(
    st.integers(-5, 2**70), st.floats(), st.booleans(), st.sampled_from(NAMES), st.none(), st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=1500, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(given_=st.dictionaries(st.sampled_from(KEYS), values, max_size=8), with_task=st.booleans())
def test_no_malformed_experiment_ever_gives_a_traceback(given_, with_task):
    try:
        Experiment({"task": "digits-logistic", **given_} if with_task else given_)
    except InputError as error:
        message = str(error)
    else:
        return
    assert message.strip()
    assert len(message) < 1000


@settings(
    max_examples=1500, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(position=st.integers(0, len(GOOD) - 1), removed=st.integers(0, 12), inserted=st.text(max_size=4))
def test_no_damaged_file_ever_gives_a_traceback(tmp_path, position, removed, inserted):
    text = GOOD[:position] + inserted + GOOD[position + removed :]
    path = tmp_path / "damaged.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        Experiment.load(path)
    except InputError as error:
        message = str(error)
    else:
        return
    assert "\n" not in message
    assert str(path) in message


def test_the_fuzz_does_reach_good_files():
    assert tomllib.loads(GOOD)["workers"] == 4
