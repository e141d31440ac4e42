"""The page as text: what is in it, what is not, and that no folder breaks it."""

import json
import math
import re
import shutil
import tomllib
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hemiola.lab.report import marks, summary_of, write_report
from hemiola.lab.report.conclusion import sentences
from hemiola.lab.report.page import render
from hemiola.lab.report.terminal import table

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
        if self.open and self.open[-1][0] in ("h2", "h3"):
            self.headings.append(data)
        if self.open and self.open[-1][1].get("id") == "data":
            self.payload = json.loads(data, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def page(folder):
    return Page(render(summary_of(folder)))


def rows(made, place, **when):
    """The rows of a chart of the page, as the script puts them together."""
    (chart,) = [one for one in made.payload["charts"] if one["place"] == place and one["when"] == when]
    columns = {name: made.payload["columns"][at] for name, at in chart["rows"].items()}
    columns = {
        name: [one["words"][word] for word in one["at"]] if isinstance(one, dict) else one
        for name, one in columns.items()
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_everything_there_is_has_its_section(demo):
    assert page(demo).headings == [
        "Results",
        "How sure that is",
        "Against ordinary",
        "Progress",
        "What the policies decided",
        "What the workers did",
        "Time and work in numbers",
        "Predicted and measured",
        "Staleness",
        "Whose units were used",
        "What each run was",
        "The same for all",
    ]


def test_a_section_without_content_is_not_there(tmp_path, folders):
    folder = folders.realistic(tmp_path, {"ordinary": {}, "other": {"batch": 2}}, seeds=1, epochs=3)
    about = json.loads((folder / "experiment.json").read_text())
    del about["predicted"]
    (folder / "experiment.json").write_text(json.dumps(about))
    made = page(folder)
    assert made.headings == [
        "Results",
        "How sure that is",
        "Against ordinary",
        "Progress",
        "What the workers did",
        "Time and work in numbers",
        "What each run was",
        "The same for all",
    ]
    assert {chart["place"] for chart in made.payload["charts"]} == {
        "target-0",
        "against-epochs",
        "against-seconds",
        "against-bytes",
    }


def test_the_conclusion_and_the_picture_come_first(demo):
    html = render(summary_of(demo))
    body = html[html.index("<body>") :]
    places = [body.index(part) for part in ('class="conclusion"', 'id="target-0"', "<h2>Results</h2>", "<h2>Progress")]
    assert places == sorted(places)
    made = page(demo)
    assert made.payload["state"] == {"scale": "log", "cost": "seconds", "measure": "train_gap"}
    bars = [row for row in rows(made, "target-0", cost="seconds") if row["text"]]
    assert [row["run"] for row in bars] == ["ordinary", "CD-GraB", "ADPSGD", "AdaSync", "all three"]
    assert len([row for row in rows(made, "target-0", cost="seconds") if row["seed"] is not None]) == 15


def test_an_accuracy_is_never_drawn_on_a_logarithmic_axis(demo, tmp_path):
    def scales(made):
        charts = made.payload["charts"]
        return {scale for chart in charts if chart["when"].get("measure") == "test_metric" for scale in chart["specs"]}

    assert scales(page(demo)) == {"linear"}
    folder = shutil.copytree(demo, tmp_path / "perplexity")
    about = json.loads((folder / "experiment.json").read_text())
    about["task"] |= {"metric": "perplexity", "higher_is_better": False}
    (folder / "experiment.json").write_text(json.dumps(about))
    assert scales(page(folder)) == {"linear", "log"}


def test_no_table_has_a_column_of_nothing(demo, tmp_path):
    folder = shutil.copytree(demo, tmp_path / "copy")
    about = json.loads((folder / "experiment.json").read_text())
    about["experiment"] |= {"title": None, "seeds": [0, 1, 2]}
    (folder / "experiment.json").write_text(json.dumps(about))
    html = render(summary_of(folder))
    assert "title" not in re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', html)
    for body in re.findall(r"<table.*?</table>", html, re.DOTALL):
        columns = [re.findall(r"<td.*?</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)[1:]]
        for cells in zip(*columns, strict=True):
            assert any(re.sub("<[^>]*>", "", cell) not in ("", "–") for cell in cells)


def test_every_cell_says_on_a_phone_what_it_is(demo):
    for tag, attributes in page(demo).attributes:
        assert tag != "td" or attributes.get("data-label") or attributes.get("class", "") in ("", "number")


def test_a_sweep_is_shown_whole(tmp_path, folders):
    folder = folders.realistic(tmp_path, {"ordinary": {}}, seeds=2, epochs=3, sweep={"optimizer.lr": [0.05, 0.1, 0.2]})
    html = render(summary_of(folder))
    made = Page(html)
    assert "The sweep" in made.headings
    assert all(f'<th scope="row">lr {lr}</th>' in html for lr in (0.05, 0.1, 0.2))
    curve = rows(made, "sweep-0")
    assert [row["x"] for row in curve] == [0.05, 0.1, 0.2]
    assert all(row["low"] <= row["mean"] <= row["high"] for row in curve)
    # What was swept is not shown as if it had one value.
    settings = html[html.index("The same for all") :]
    assert "<dt>learning rate, swept</dt><dd>0.05 / 0.1 / 0.2</dd>" in settings
    assert "SGD, momentum 0.9, schedule" in settings
    assert "worker 3 takes 5x as long" in settings


def test_two_swept_keys_have_a_curve_each_at_the_best_of_the_other(tmp_path, folders):
    gaps = {(0.1, 1): 0.5, (0.1, 2): 0.4, (0.2, 1): 0.3, (0.2, 2): 0.6}
    finished = [
        {"run": "a", "seed": 0, "status": "done", "train_gap": gap, "optimizer.lr": lr, "batch": batch}
        for (lr, batch), gap in gaps.items()
    ]
    about = folders.about({"a": {}}, sweep={"optimizer.lr": [0.1, 0.2], "batch": [1, 2]})
    made = page(folders.write(tmp_path, about, finished, []))
    ends = {place: {row["x"]: row["mean"] for row in rows(made, place)} for place in ("sweep-0", "sweep-1")}
    assert ends == {"sweep-0": {1: 0.3, 2: 0.4}, "sweep-1": {0.1: 0.4, 0.2: 0.3}}


def test_the_page_says_what_it_is(demo):
    html = render(summary_of(demo))
    assert html.startswith('<!doctype html>\n<html lang="en">')
    assert "<title>digits-logistic: 5 runs compared · hemiola</title>" in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert f'<p class="conclusion">{sentences(summary_of(demo))[0]}</p>' in html


def test_the_page_fetches_nothing(demo):
    made = page(demo)
    for tag, attributes in made.attributes:
        for key in ("src", "href", "srcset", "data"):
            value = attributes.get(key) or ""
            assert tag == "a" or not value or value.startswith(("data:", "#")), (tag, value)
    assert "@import" not in render(summary_of(demo))
    assert "url(" not in render(summary_of(demo)).split("</style>")[0]


def test_the_page_stays_small_however_long_the_log(tmp_path, folders):
    short = folders.realistic(tmp_path / "short", seeds=1, epochs=40)
    long = folders.realistic(tmp_path / "long", seeds=1, epochs=300)
    sizes = [write_report(folder).stat().st_size for folder in (short, long)]
    assert sizes[1] < 700_000
    assert len(rows(page(long), "against-epochs", measure="train_gap")) < 5 * 620


def test_names_cannot_break_out_of_the_page(tmp_path, folders):
    name = '</script><script>alert("&")</script>'
    about = folders.about({name: {"order": {"name": name}}}, title=name)
    about["task"]["name"] = name
    rows = [{"run": name, "seed": 0, "status": "done", "train_gap": 1, "train_loss": 1, "epochs": 1}]
    log = [folders.line(name, 0, updates=0, epochs=1, seconds=1, bytes_per_worker=1, train_loss=1, train_gap=1)]
    html = render(summary_of(folders.write(tmp_path, about, rows, log)))
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
    assert {row["run"] for row in rows(made, "against-epochs", measure="train_gap")} == {"a", "b"}
    assert "b has not finished yet." in sentences(summary_of(folder))


def test_an_empty_folder_still_says_what_was_planned(tmp_path, folders):
    assert page(folders.write(tmp_path, folders.about({"a": {}}), [], [])).headings == [
        "What each run was",
        "The same for all",
    ]


def test_a_report_says_how_to_reproduce_it(tmp_path, folders):
    given = {"task": "digits-logistic", "sweep": {"optimizer.lr": [0.1, 0.2]}, "run": [{"name": "a <b>"}]}
    about = folders.about({"a": {}}) | {"given": given, "machine": {"torch": "2.13"}}
    html = render(summary_of(folders.write(tmp_path, about, [], [])))
    text = unescape(
        re.search(r"<details><summary>experiment.toml</summary><pre><code>(.*?)</code>", html, re.DOTALL)[1]
    )
    assert tomllib.loads(text) == given
    assert "<dt>torch</dt><dd>2.13</dd>" in html


def test_several_folders_make_one_page(tmp_path, folders):
    paths = [folders.realistic(tmp_path / name, {"ordinary": {}, name: {}}, seeds=3, epochs=4) for name in ("x", "y")]
    path = write_report(paths, tmp_path / "both.html")
    assert path == tmp_path / "both.html"
    made = Page(path.read_text())
    assert made.payload["runs"] == ["ordinary · x", "x", "ordinary · y", "y"]
    assert "How to reproduce it" in made.headings
    assert not (paths[0] / "report.html").exists()


def test_hundreds_of_runs_are_all_in_the_table_and_the_best_in_the_charts(tmp_path, folders):
    runs = {f"r{i}": [[(0, 0, 0, 1.0), (1, 1, 1, 0.5), (2, 2, 2, 0.5 - i / 1000)]] for i in range(300)}
    html = render(summary_of(folders.small(tmp_path, runs)))
    made = Page(html)
    drawn = {row["run"] for row in rows(made, "against-epochs", measure="train_gap")}
    assert drawn == {"r0", *(f"r{i}" for i in range(281, 300))}
    assert all(f">r{i}<small>" in html for i in range(300))
    assert "Charts show 20 of the 300 runs" in html


def test_two_rounds_of_colours_are_told_apart_by_their_dashes():
    looks = {(marks.colour(place), tuple(marks.dash(place))) for place in range(14)}
    assert len(looks) == 14
    assert len({marks.dash(place)[0] for place in range(2)}) == 2


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0103, 2.2], [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
        ([0.001, 30], [0.001, 0.01, 0.1, 1, 10]),
        ([1e-20, 1], [1e-20, 1e-17, 1e-14, 1e-11, 1e-8, 1e-5, 0.01]),
        ([3.0], []),
        ([], []),
    ],
)
def test_ticks_of_a_logarithmic_axis(values, ticks):
    assert marks.log_ticks(values, 7) == ticks


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
                        st.fixed_dictionaries({"step": WEIRD, "period": WEIRD, "spread": WEIRD, "seconds": WEIRD}),
                        max_size=3,
                    )
                }
            ),
        ),
        "pace": st.one_of(
            WEIRD,
            st.fixed_dictionaries(
                {
                    "staleness": st.dictionaries(st.sampled_from(["0", "1", "300", "x", "-1", "nan", "inf"]), WEIRD),
                    "k": WEIRD,
                    "changes": st.one_of(WEIRD, st.lists(st.lists(WEIRD, max_size=3), max_size=2)),
                }
            ),
        ),
        "lr": WEIRD,
        "labels": st.one_of(WEIRD, st.dictionaries(st.sampled_from("01"), st.one_of(WEIRD, st.just({"used": 1})))),
        "timeline": st.one_of(
            WEIRD,
            st.dictionaries(
                st.sampled_from(["computes", "?"]), st.one_of(WEIRD, st.lists(st.lists(WEIRD, max_size=4)))
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
    summary = summary_of(folder)
    made = Page(render(summary))
    assert made.payload["state"]["scale"] in ("log", "linear")
    assert table(summary)
    assert all(sentences(summary))


def test_a_headline_takes_the_place_of_the_conclusion(demo):
    made = summary_of(demo)
    html = render(made, "Everything together is 5 < 6 times sooner.")
    assert '<p class="conclusion">Everything together is 5 &lt; 6 times sooner.</p>' in html
    assert html.count('class="conclusion"') == 1
    assert sentences(made)[0] not in html.split("</header>")[0]
