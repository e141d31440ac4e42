"""The page as text: what is in it, what is not, and that no folder breaks it."""

import json
import math
import re
import shutil
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hemiola.lab.report import headline, summary_table, write_report
from hemiola.lab.report.page import render
from hemiola.lab.report.read import read_folder

VOID = {"meta", "link", "path", "br"}


class Page(HTMLParser):
    """Checks that elements close in order, and keeps what is asked for below."""

    def __init__(self, html):
        super().__init__()
        self.open, self.headings, self.attributes, self.payload = [], [], [], {}
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "h2":
            self.headings.append(data)
        if self.open and self.open[-1][1].get("id") == "data":
            self.payload = json.loads(data, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def page(folder):
    return Page(render(read_folder(folder)))


def test_every_monitor_has_its_section(demo):
    assert page(demo).headings == [
        "Results",
        "Progress",
        "Order: the herding bound",
        "Period: when the workers averaged",
        "Pace: staleness",
        "Pace: the ledger",
        "Pace: predicted against measured",
        "What the policies did",
        "What each run was",
        "The experiment",
    ]


def test_a_monitor_without_data_has_none(tmp_path, folders):
    folder = folders.realistic(tmp_path, {"ordinary": {}, "other": {"batch": 2}}, seeds=1, epochs=3)
    about = json.loads((folder / "experiment.json").read_text())
    del about["predicted"]
    (folder / "experiment.json").write_text(json.dumps(about))
    made = page(folder)
    assert made.headings == ["Results", "Progress", "What the policies did", "What each run was", "The experiment"]
    assert [chart["id"] for chart in made.payload["charts"]] == [
        "against-epochs",
        "against-seconds",
        "against-bytes_per_worker",
    ]


def test_a_sweep_is_shown_whole(tmp_path, folders):
    folder = folders.realistic(tmp_path, {"ordinary": {}}, seeds=2, epochs=3, sweep={"optimizer.lr": [0.05, 0.1, 0.2]})
    html = render(read_folder(folder))
    assert "The sweep" in Page(html).headings
    assert all(f'<th scope="row">lr {lr}</th>' in html for lr in (0.05, 0.1, 0.2))


def test_the_page_says_what_it_is(demo):
    html = render(read_folder(demo))
    assert html.startswith('<!doctype html>\n<html lang="en">')
    assert "<title>digits-logistic: 5 runs compared · hemiola</title>" in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    for line in headline(demo):
        assert line in html.replace("&quot;", '"')


def test_the_page_fetches_nothing(demo):
    made = page(demo)
    for tag, attributes in made.attributes:
        for key in ("src", "href", "srcset", "data"):
            value = attributes.get(key) or ""
            assert tag == "a" or not value or value.startswith(("data:", "#")), (tag, value)
    assert "@import" not in render(read_folder(demo))
    assert "url(" not in render(read_folder(demo)).split("</style>")[0]


def test_the_page_stays_small_however_long_the_log(tmp_path, folders):
    short = folders.realistic(tmp_path / "short", seeds=1, epochs=40)
    long = folders.realistic(tmp_path / "long", seeds=1, epochs=300)
    sizes = [write_report(folder).stat().st_size for folder in (short, long)]
    assert sizes[1] < 700_000
    rows = page(long).payload["tables"]["curves"]["rows"]
    assert len({tuple(row) for row in rows}) == len(rows) < 5 * 600


def test_names_cannot_break_out_of_the_page(tmp_path, folders):
    name = '</script><script>alert("&")</script>'
    about = folders.about({name: {"order": {"name": name}}}, title=name)
    about["task"]["name"] = name
    rows = [{"run": name, "seed": 0, "status": "done", "train_gap": 1, "train_loss": 1, "epochs": 1}]
    log = [folders.line(name, 0, updates=0, epochs=1, seconds=1, bytes_per_worker=1, train_loss=1, train_gap=1)]
    html = render(read_folder(folders.write(tmp_path, about, rows, log)))
    assert Page(html).payload["runs"] == [name]
    assert html.count("<script") == 3


def test_a_report_replaces_an_older_one(demo, tmp_path):
    folder = shutil.copytree(demo, tmp_path / "copy")
    (folder / "report.html").write_text("old")
    assert write_report(folder) == folder / "report.html"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in folder.iterdir()) == [
        "experiment.json",
        "log.jsonl",
        "report.html",
        "results.csv",
    ]


def test_a_folder_of_a_run_in_progress(tmp_path, folders):
    points = [(0, 0, 0, 1.0), (1, 10, 10, 0.1)]
    status = {("a", 1): "running", ("b", 0): "running", ("b", 1): "running"}
    folder = folders.small(tmp_path, {"a": [points] * 2, "b": [points] * 2, "c": []}, status=status)
    made = page(folder)
    assert made.payload["runs"] == ["a", "b", "c"]
    assert {row[0] for row in made.payload["tables"]["curves"]["rows"]} == {0, 1}
    assert headline(folder)[1] == "b has not finished yet."


def test_an_empty_folder_still_says_what_was_planned(tmp_path, folders):
    assert page(folders.write(tmp_path, folders.about({"a": {}}), [], [])).headings == [
        "What each run was",
        "The experiment",
    ]


def test_two_rounds_of_colours_are_told_apart_by_their_dashes():
    from hemiola.lab.report import charts

    looks = {(charts.colour(place), tuple(charts.dash(place))) for place in range(14)}
    assert len(looks) == 14
    assert len({charts.dash(place)[0] for place in range(2)}) == 2


WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.sampled_from([0, -1, 1, 10**400, 1e308, -1e308, 5e-324, math.inf, math.nan]),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)
LINE = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            [
                "seed",
                "updates",
                "epochs",
                "seconds",
                "train_loss",
                "train_gap",
                "test_loss",
                "test_metric",
                "bytes_per_worker",
            ],
            WEIRD,
        ),
        "sweep": st.one_of(WEIRD, st.dictionaries(st.sampled_from(["lr", "batch"]), WEIRD, max_size=2)),
        "order": st.one_of(WEIRD, st.fixed_dictionaries({"herding": WEIRD, "skipped": WEIRD})),
        "period": st.one_of(
            WEIRD,
            st.fixed_dictionaries(
                {
                    "history": st.lists(
                        st.fixed_dictionaries({"step": WEIRD, "period": WEIRD, "spread": WEIRD}), max_size=3
                    )
                }
            ),
        ),
        "pace": st.one_of(
            WEIRD,
            st.fixed_dictionaries(
                {"staleness": st.dictionaries(st.sampled_from(["0", "1", "300", "x", "-1", "nan", "inf"]), WEIRD)}
            ),
        ),
        "workers": st.one_of(WEIRD, st.lists(st.fixed_dictionaries({"used": WEIRD, "dropped": WEIRD}), max_size=3)),
    },
)
CELL = WEIRD.map(lambda value: str(value).replace("\x00", ""))
ROW = st.fixed_dictionaries(
    {"run": st.sampled_from(["a", "b"]), "status": st.sampled_from(["done", "diverged", "failed", "?"])},
    optional=dict.fromkeys(
        ("seed", "train_loss", "train_gap", "test_metric", "seconds", "bytes_per_worker", "lr"), CELL
    ),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), LINE), max_size=6),
    st.lists(ROW, max_size=4),
    st.dictionaries(
        st.sampled_from(["stop", "cluster", "workers", "seeds", "run", "order", "optimizer", "title"]),
        WEIRD,
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(["name", "metric", "convex", "examples", "parameters"]), WEIRD, max_size=4),
    WEIRD,
)
def test_no_value_anywhere_breaks_the_report(tmp_path, folders, log, rows, experiment, task, predicted):
    about = {
        "experiment": {"sweep": {"lr": [1]}, **experiment},
        "task": task,
        "predicted": {"a": {"staleness": predicted}},
    }
    folder = folders.write(tmp_path, about, rows, [{"run": run, **fields} for run, fields in log])
    made = page(folder)
    assert re.match(r"\w+", made.payload["scale"])
    assert summary_table(folder)
    assert all(headline(folder))
