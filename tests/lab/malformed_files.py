"""Experiment files, malformed in every way we could think of: each runs, or is refused with one line.

``python tests/lab/malformed_files.py 10000`` tries so many. A file that is still right after all trains for one update.
"""

from __future__ import annotations

import copy
import datetime
import json
import random
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from hemiola.errors import InputError
from hemiola.lab.experiment import Experiment
from hemiola.training import Training

HERE = Path(__file__).parent
SECONDS = 60  # that reading a file and its first update may take

BASE: dict[str, Any] = {
    "task": {"name": "tiny_task:make"},
    "workers": 2,
    "batch": 4,
    "seeds": [0, 1],
    "stop": {"epochs": 1},
    "evaluate": {"every_epochs": 1, "train_examples": 8, "test_examples": 8},
    "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9, "schedule": {"name": "MultiStepLR", "milestones": [0.5]}},
    "shards": {"split": "iid"},
    "cluster": {
        "name": "simulated",
        "delay": "exponential(1.0)",
        "slow": {"1": 5.0},
        "link": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
    },
    "sweep": {"optimizer.lr": [0.05, 0.1]},
}
RUNS: list[dict[str, Any]] = [
    {"name": "ordinary"},
    {
        "name": "order",
        "order": {"name": "cd-grab", "unit": 2, "sketch": "fold:16", "every": 2, "signs": "probabilistic"},
    },
    {
        "name": "period",
        "period": {"name": "adaptive", "start": 4, "low": 0.7, "high": 1.3, "sample": 0.5, "wire": "int8"},
    },
    {"name": "constant", "period": {"name": "constant", "p": 3, "overlap": 1, "momentum": "average"}},
    {"name": "budget", "period": {"name": "budget", "start": 2, "cap": 8}},
    {"name": "qsgd", "period": {"name": "full", "quantise": 8}},
    {"name": "pace", "pace": {"name": "k-async", "k": 1, "max_staleness": 3, "stale_rate": "delay"}},
    {"name": "adasync", "pace": {"name": "k-batch-sync", "k": "adasync", "start": 1}},
    {"name": "clocked", "period": {"name": "clocked", "every": "0 s", "mix": 0.5}, "shards": {"deal": "deck"}},
]
VALUES: list[Any] = [
    *(-1, 0, 1, 2, 3, 0.5, -0.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf"), 2**40, 2**70, True, False),
    *(
        "",
        " ",
        "zzz",
        "adasync",
        "10 Gbit/s",
        "-1 s",
        "1 s",
        "0",
        "NaN",
        "exponential(",
        "trace(nowhere.csv)",
        "fold:0",
    ),
    *(
        "ghost:99999999999",
        "[/bold]",
        "\x1b[31m",
        "naïve\u2028",
        "x" * 5000,
        "../../etc",
        "os:system",
        "tiny_task:nope",
    ),
    *(
        [],
        [1],
        [[1]],
        ["a", 1],
        [{}],
        {},
        {"name": "zzz"},
        {"name": 1},
        {"": 1},
        {"name": "rr", "nmae": 1},
        {"a": {"b": {}}},
    ),
    *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 12), datetime.time(12)),
]


def malformed(rng: random.Random) -> bytes:
    """An experiment file with one to three things wrong, most likely."""
    given = copy.deepcopy(BASE)
    given["run"] = copy.deepcopy(rng.sample(RUNS, rng.randint(1, 3)))
    for _ in range(rng.randint(1, 3)):
        _spoil_a_value(given, rng)
    data = toml(given).encode("utf-8", "surrogatepass")
    return _spoil_the_text(data, rng) if rng.random() < 0.3 else data


def _spoil_a_value(given: dict[str, Any], rng: random.Random) -> None:
    table: Any = given
    for _ in range(rng.randint(0, 3)):
        inner = [
            each for each in (table.values() if isinstance(table, dict) else table) if isinstance(each, dict | list)
        ]
        if not inner:
            break
        table = rng.choice(inner)
    keys = list(table) if isinstance(table, dict) else list(range(len(table)))
    value = copy.deepcopy(rng.choice(VALUES))
    if not keys:
        if isinstance(table, dict):
            table["extra"] = value
        else:
            table.append(value)
        return
    key = rng.choice(keys)
    match rng.choice(["replace", "replace", "replace", "delete", "misspell", "add", "wrap", "swap"]):
        case "replace":
            table[key] = value
        case "delete":
            del table[key]
        case "misspell" if isinstance(key, str):
            table[key[:-1] + rng.choice("xyz_.")] = table.pop(key)
        case "add" if isinstance(table, dict):
            table[rng.choice(["extra", "order", "period", "pace", "task", "k", "name", "unit", "", "a.b"])] = value
        case "wrap":
            table[key] = rng.choice([[table[key]], {"name": table[key]}])
        case _:
            other = rng.choice(keys)
            table[key], table[other] = table[other], table[key]


def _spoil_the_text(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data)), rng.randint(1, 20)
    match rng.choice(["cut", "delete", "insert", "flip", "twice"]):
        case "cut":
            return data[:at]
        case "delete":
            return data[:at] + data[at + length :]
        case "insert":
            return data[:at] + bytes(rng.randrange(256) for _ in range(length)) + data[at:]
        case "flip":
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return data + data[:at]


def toml(given: dict[str, Any]) -> str:
    """The tables as a file: every value inline."""
    return "".join(f"{_key(key)} = {_inline(value)}\n" for key, value in given.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    return str(value).lower()


def _key(key: Any) -> str:
    return json.dumps(str(key))


class _TooLongError(Exception):
    """It took longer than `SECONDS`."""


def attempt(data: bytes, folder: Path) -> str:
    """What comes of a file: ``runs`` or ``refused``; else what is wrong with how it was taken."""
    file = folder / "experiment.toml"
    file.write_bytes(data)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        experiment = Experiment.load(file)
        for cell in experiment.cells[:3]:
            plan, make = cell.plan(None)
            training = Training(plan, make)
            training.run(lambda _: False)
            training.close()
        return "runs"
    except InputError as error:
        said = str(error)
        if not said.strip() or "\n" in said or len(said) > 600:
            return f"not one clear line: {said[:200]!r}"
        return "refused"
    except _TooLongError:
        return f"took more than {SECONDS} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise _TooLongError


def main(count: int, first: int = 0) -> Counter[str]:
    """Try so many files; print those that were taken wrongly."""
    sys.path.insert(0, str(HERE))
    warnings.simplefilter("ignore")
    results: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            data = malformed(random.Random(seed))
            result = attempt(data, Path(folder))
            results[result if result in ("runs", "refused") else "wrong"] += 1
            if result not in ("runs", "refused"):
                print(f"seed {seed}: {result}")
    return results


if __name__ == "__main__":
    print(dict(main(*map(int, sys.argv[1:]))))
