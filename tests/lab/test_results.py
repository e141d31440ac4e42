"""The one table of columns: what writes, reads, shows and documents them agrees with it."""

import csv
import io
from pathlib import Path

from hemiola.lab.report import read, summary, words
from hemiola.lab.results import COLUMNS, SCHEMA, columns_for_people, csv_text

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_table_as_it_is():
    assert columns_for_people() in (ROOT / "docs" / "experiments.md").read_text()


def test_every_number_has_a_place_in_the_report():
    shown = {*summary.RESULTS, *summary.POLICIES}
    assert shown == {column.name for column in SCHEMA if column.title}
    assert {*COLUMNS} - shown == {"run", "seed", "workers", "status"}
    for name in shown:
        assert words.measure_name(name, {}) == next(column.title for column in SCHEMA if column.name == name)


def test_units_come_from_the_table():
    for column in SCHEMA:
        large = {"seconds": (60.0, "min"), "bytes": (1e3, "kB"), "": (1.0, "")}[column.unit]
        assert words.unit_of(column.name, 2000.0 if column.unit == "bytes" else 150.0) == large


def test_what_is_written_is_read_back():
    row = dict.fromkeys(COLUMNS, 0.1) | {
        "run": "a",
        "seed": 3,
        "status": "done",
        "train_gap": None,
        "lr": 0.2,
    }
    text = csv_text([row], ["lr"])
    (line,) = csv.DictReader(io.StringIO(text))
    (back,) = read.folder_of({}, [line], []).rows
    assert (back.run, back.seed, back.status, back.point) == ("a", "3", "done", (("lr", "0.2"),))
    assert back.numbers["seconds"] == 0.1
    assert back.numbers["train_gap"] != back.numbers["train_gap"]  # empty is not a number
