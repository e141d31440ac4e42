"""Numbers, settings and policies in words for people."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hemiola.lab.report.log import Point, table
from hemiola.lab.results import BY_NAME

# Below this there are no powers of ten left to divide by; a deviation that small is rounding.
SMALLEST = sys.float_info.min

# What an objective is called within a sentence.
OBJECTIVES = {"train_gap": "gap", "train_loss": "training loss"}

_TIME = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "days"))
_SIZE = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"), (1e15, "PB"))


def figure(value: float) -> str:
    """Three significant digits: 0.00132, 1.32e-5, 12.3, 1,234; a dash for what is not a number."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(float(f"{value:.3g}"))
    if value == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"{mantissa}e{int(exponent)}"
    elif size >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
        if value == int(value) and "." in text:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−") if value < 0 and not text.startswith("−") and "e" not in text else text


def time_unit(largest: float) -> tuple[float, str]:
    """The unit to show times up to this many seconds in: (its seconds, its name)."""
    return _unit(largest, _TIME, headroom=2.0)


def size_unit(largest: float) -> tuple[float, str]:
    """The unit to show sizes up to this many bytes in: (its bytes, its name)."""
    return _unit(largest, _SIZE, headroom=1.0)


def _unit(largest: float, units: tuple[tuple[float, str], ...], headroom: float) -> tuple[float, str]:
    """The largest unit of which there is at least one; two for minutes and up: "90 s" reads better than "1.5 min"."""
    fitting = [unit for unit in units if abs(largest) >= unit[0] * (headroom if unit[0] > 1 else 1)]
    if largest == 0 or not math.isfinite(largest):
        return next(unit for unit in units if unit[0] == 1.0)
    return fitting[-1] if fitting else units[0]


def amount(measure: str, value: float) -> str:
    """A value of a measure with its unit: ``"90 s"``, ``"3.5 h"``, ``"31.9 MB"``, ``"0.00132"``."""
    unit, name = unit_of(measure, value)
    return f"{figure(value / unit)} {name}" if name and math.isfinite(value) else figure(value)


def unit_of(measure: str, largest: float) -> tuple[float, str]:
    """The unit of a column whose largest value is this: (divisor, name); (1, "") for a plain number."""
    unit = BY_NAME[measure].unit if measure in BY_NAME else ""
    return time_unit(largest) if unit == "seconds" else size_unit(largest) if unit == "bytes" else (1.0, "")


def with_deviation(mean: float, deviation: float) -> tuple[str, str]:
    """A mean and its deviation, both to the second digit of the deviation: ``("0.1110", "0.0011")``.

    The mean has at most six digits; the deviation is empty where there is none worth the name.
    """
    if not (math.isfinite(mean) and math.isfinite(deviation)) or deviation <= max(abs(mean) * 1e-9, SMALLEST):
        return figure(mean), ""
    mean_text, deviation_text = _alike((mean, deviation), deviation, 2)
    return mean_text, deviation_text


def plus_minus(mean: float, deviation: float) -> str:
    """A mean with its deviation where there is one: ``"0.1110 ± 0.0011"``."""
    return " ± ".join(filter(None, with_deviation(mean, deviation)))


def ends(low: float, mean: float, high: float) -> tuple[str, str, str]:
    """A mean and the ends of its interval, with as many digits as the interval leaves certain: 1.8, 2.1, 2.5."""
    half = (high - low) / 2
    if not math.isfinite(half) or half <= max(abs(mean) * 1e-9, SMALLEST):
        low_text, mean_text, high_text = (
            f"{value:.3g}" if 1e-3 < value < 1000 else figure(value) for value in (low, mean, high)
        )
        return low_text, mean_text, high_text
    # An interval of ±0.12 leaves a second digit worth telling, one of ±0.7 does not.
    first = half / 10.0 ** math.floor(math.log10(half))
    low_text, mean_text, high_text = _alike((low, mean, high), half, 2 if first < 2 else 1)
    return low_text, mean_text, high_text


def ratios(low: float, mean: float, high: float) -> tuple[str, str, str]:
    """`ends` of logarithms of ratios, as ratios; where the interval spans decades, two digits of each."""
    values = tuple(_exp(value) for value in (low, mean, high))
    if math.isnan(low) or values[2] > 5 * values[0]:
        low_text, mean_text, high_text = (_two_digits(value) for value in values)
    else:
        low_text, mean_text, high_text = ends(*values)
    return low_text, f"{mean_text}x", high_text


def ratio(mean: float) -> str:
    """The ratio of a logarithm, to two digits: ``"2.1x"``."""
    return f"{_two_digits(_exp(mean))}x"


def _exp(value: float) -> float:
    return math.exp(max(-700.0, min(700.0, value)))


def _two_digits(value: float) -> str:
    if not 1e-4 < value < 100:
        return figure(value)
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 0.995 else 1 - math.floor(math.log10(value))}f}"


def level(value: float) -> str:
    """A target in full, it was rounded when it was chosen: 0.067, 2.2345, 1.2e-7."""
    mantissa, _, exponent = f"{value:.10g}".partition("e")
    return mantissa.replace("-", "−") + (f"e{int(exponent)}" if exponent else "")


def _alike(values: Sequence[float], scale: float, digits: int) -> list[str]:
    """The values to so many digits of the scale, but to at most six digits of the largest."""
    largest = max(map(abs, values))
    power = math.floor(math.log10(largest))
    decimals = min(digits - 1 - math.floor(math.log10(scale)), 5 - power)
    if -4 <= power < 7:
        return [_fixed(round(value, decimals), max(0, decimals)) for value in values]
    return [f"{_fixed(value / 10.0**power, max(0, min(5, decimals + power)))}e{power}" for value in values]


def _fixed(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}".replace("-", "−")


def measure_name(measure: str, task: Mapping[str, Any]) -> str:
    """What a column or an axis is called; the metric by its own name."""
    if measure == "test_metric" and task.get("metric"):
        return f"test {task['metric']}"
    return BY_NAME[measure].title


def titled(measure: str, unit: str) -> str:
    """The title of an axis or a column: ``"cluster time (s)"``."""
    return BY_NAME[measure].title + (f" ({unit})" if unit else "")


def key(name: str) -> str:
    """A swept key for people: ``optimizer.lr`` is the learning rate; of others the last part is enough."""
    last = name.rsplit(".", 1)[-1]
    return {"lr": "learning rate", "k": "K", "p": "period"}.get(last, last.replace("_", " "))


def listed(items: list[str]) -> str:
    """``"a"``, ``"a and b"``, ``"a, b and c"``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def called(run: str) -> str:
    """A run's name within a sentence: in quotes where it would read as part of it."""
    return f"“{run}”" if " " in run else run


def point(at: Point) -> str:
    """A point of the sweep: ``"lr 0.1"``, with only the last part of each key."""
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in at)


_ORDERS = {
    "rr": "a fresh random order every epoch",
    "shuffle-once": "one random order, kept",
    "in-order": "the order of the data",
    "grab": "GraB: gradients balanced around their mean",
    "id-grab": "ID-GraB: every worker balances its own gradients",
    "id-pair-grab": "ID-GraB in pairs: every worker balances its own pairs",
    "cd-grab": "CD-GraB: pairs balanced across all workers",
    "scored": "by a score of each example, or its last loss",
}
_PERIODS = {
    "full": "exchange at every step",
    "constant": "average at a constant period",
    "adaptive": "ADPSGD: a period that follows the measured spread",
    "decreasing": "a decreasing period",
    "post-local": "often first, a longer period later",
    "qsr": "QSR: a period that follows the learning rate",
    "budget": "a period that spends a communication budget best",
    "clocked": "averagings by the clock, behind the computation: nobody waits",
    "fda": "FDA: average when the workers are far apart",
}
_PACES = {
    "k-sync": "wait for the first K workers, cancel the others",
    "k-batch-sync": "wait for the first K batches, cancel the rest",
    "k-async": "wait for the first K workers, let the others go on",
    "k-batch-async": "wait for the first K batches, let the rest go on",
}
_DEFAULTS = {"order": "rr", "period": "full", "pace": "k-sync"}


def policy(kind: str, settings: Mapping[str, Any]) -> str:
    """One policy of a run in words, with the options that were given."""
    given = settings.get(kind)
    options = {"name": given} if isinstance(given, str) else table(given)
    name = str(options.pop("name", _DEFAULTS[kind]))
    if kind == "pace" and name == "k-sync" and options.get("k", settings.get("workers")) == settings.get("workers"):
        return "wait for every worker (k-sync)"
    words = {"order": _ORDERS, "period": _PERIODS, "pace": _PACES}[kind].get(name, "")
    detail = ", ".join([name, *(_option(key, value) for key, value in options.items() if value is not None)])
    return f"{words} ({detail})" if words else detail


def options(given: object) -> str:
    """A table of options in words, its name first: ``"SGD, lr 0.2, momentum 0.9"``."""
    if not isinstance(given, Mapping):
        return _value(given)
    rest = table(given)
    name = rest.pop("name", None)
    words = [_option(key, value) for key, value in rest.items() if value is not None]
    return ", ".join(([str(name)] if name else []) + words)


def _option(name: str, value: object) -> str:
    if name == "slow" and isinstance(value, Mapping):
        return listed([f"worker {worker} takes {_value(factor)}x as long" for worker, factor in value.items()])
    return f"{name} {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return f"({options(value)})"
    if isinstance(value, list):
        return " / ".join(_value(item) for item in value)
    return str(value)
