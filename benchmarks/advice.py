"""Is the advice right? Cluster conditions that nothing was tuned on: the advice first, then every candidate of it with
new seeds at the rate it was given.

    HEMIOLA_DATA=... python benchmarks/advice.py --out out/advice

One JSON file a condition in the folder; what is there is not run again. Minutes are processor minutes of two processes,
so that a busy machine gets the same advice as an idle one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from statistics import fmean
from typing import Any

from hemiola.lab.advise.advice import Advice, Candidate
from hemiola.lab.advise.candidates import ORDINARY
from hemiola.lab.advise.laps import Lap, run_lap
from hemiola.lab.advise.race import advise

SEEDS = (1000, 1001, 1002)
WITHIN = 1.2

SLOW = {"bandwidth": "5 Mbit/s", "latency": "2 ms"}
MEDIUM = {"bandwidth": "50 Mbit/s", "latency": "1 ms"}
FAST = {"bandwidth": "10 Gbit/s", "latency": "50 us"}
TRACES = Path(os.environ.get("HEMIOLA_DATA", "data")) / "traces"

LOGISTIC = {"task": "digits-logistic", "batch": 16, "epochs": 6.0}
MLP = {"task": "digits-mlp", "batch": 16, "epochs": 6.0}
LENET = {"task": "mnist-lenet", "batch": 32, "epochs": 0.1, "minutes": 6.0}

CONDITIONS: dict[str, dict[str, Any]] = {
    "logistic, 4, even, fast": {**LOGISTIC, "workers": 4, "delay": "constant(0.01)", "link": FAST},
    "logistic, 4, even, slow": {**LOGISTIC, "workers": 4, "delay": "constant(0.01)", "link": SLOW},
    "logistic, 8, lognormal, medium": {**LOGISTIC, "workers": 8, "delay": "lognormal(0.01, 0.5)", "link": MEDIUM},
    "logistic, 12, exponential, free": {**LOGISTIC, "workers": 12, "delay": "exponential(0.02)", "link": None},
    "logistic, 8, pareto, slow": {**LOGISTIC, "workers": 8, "delay": "pareto(2.2, 0.02)", "link": SLOW},
    "logistic, 4, trace AR, medium": {**LOGISTIC, "workers": 4, "delay": "trace(bytedance-AR.csv)", "link": MEDIUM},
    "mlp, 6, even, slow": {**MLP, "workers": 6, "delay": "constant(0.02)", "link": SLOW},
    "mlp, 8, exponential, medium": {**MLP, "workers": 8, "delay": "exponential(0.02)", "link": MEDIUM},
    "mlp, 16, shifted, slow": {**MLP, "workers": 16, "delay": "shifted-exponential(0.01, 0.02)", "link": SLOW},
    "mlp, 4, hyperexponential, fast": {
        **MLP,
        "workers": 4,
        "delay": "hyperexponential(0.1, 0.1, 0.01)",
        "link": FAST,
    },
    "mlp, 16, trace SE, medium": {**MLP, "workers": 16, "delay": "trace(bytedance-SE.csv)", "link": MEDIUM},
    "mlp, 2, trace ST, free": {**MLP, "workers": 2, "delay": "trace(bytedance-ST.csv)", "link": None},
    "lenet, 4, exponential, medium": {**LENET, "workers": 4, "delay": "exponential(0.02)", "link": MEDIUM},
    "lenet, 8, even, slow": {**LENET, "workers": 8, "delay": "constant(0.02)", "link": SLOW},
}


def measured(asked: Advice, candidate: Candidate, until: float) -> float:
    """Mean cluster seconds to the target over new seeds; infinite where one of them does not arrive."""
    expected = candidate.seconds if math.isfinite(candidate.seconds) else until
    laps = [
        Lap(
            candidate.name,
            candidate.table,
            candidate.lr,
            seed,
            asked.given,
            "seconds",
            until,
            expected / 30,
            asked.target,
            math.inf,
            "processor",
            data_folder(),
            TRACES.absolute(),
        )
        for seed in SEEDS
    ]
    return fmean(run_lap(lap).seconds_to(asked.target) for lap in laps)


def data_folder() -> Path | None:
    return Path(os.environ["HEMIOLA_DATA"]) if "HEMIOLA_DATA" in os.environ else None


def check(condition: dict[str, Any]) -> dict[str, Any]:
    asked = advise(**condition, clock="processor", data=data_folder(), base=TRACES)
    ordinary = asked.ordinary.seconds if math.isfinite(asked.ordinary.seconds) else asked.ordinary.until
    seconds = {ORDINARY: measured(asked, asked.ordinary, 3 * ordinary)}
    # Who is slower than twice the fastest is not the best one, however much slower it is.
    for each in asked.candidates:
        if each.name != ORDINARY:
            fastest = min(seconds.values())
            seconds[each.name] = measured(asked, each, min(3 * ordinary, 2 * fastest))
    return {
        "advised": asked.best.name,
        "lr": asked.best.lr,
        "predicted": asked.best.seconds,
        "target": asked.target,
        "minutes": asked.minutes,
        "assumed": asked.assumed,
        "measured": {name: value if math.isfinite(value) else None for name, value in seconds.items()},
        "advice": [[each.name, each.lr, each.seeds] for each in asked.candidates],
    }


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| task, workers, steps, link | advised | over the best | over ordinary | predicted / measured | minutes |",
        "|---|---|---|---|---|---|",
    ]
    close = never_worse = 0
    errors = []
    for name, each in found.items():
        times = {who: math.inf if value is None else value for who, value in each["measured"].items()}
        mine = times[each["advised"]]
        best = min(times, key=times.__getitem__)
        over, gain = mine / times[best], times[ORDINARY] / mine
        close += over <= WITHIN
        never_worse += gain >= 1
        errors.append(abs(each["predicted"] / mine - 1))
        best_said = "" if best == each["advised"] else f" ({best})"
        sooner = f"{gain:.2f}" if math.isfinite(gain) else "ordinary does not arrive"
        lines.append(
            f"| {name} | {each['advised']}, lr {each['lr']:g} | {over:.2f}{best_said} | {sooner} | "
            f"{each['predicted'] / mine:.2f} | {each['minutes']:.1f} |"
        )
    lines += [
        "",
        f"Within 20 % of the best: {close} of {len(found)}. Not worse than ordinary: {never_worse} of {len(found)}. "
        f"Prediction off by {100 * fmean(errors):.0f} % on average.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/advice"))
    parser.add_argument("--only", help="conditions whose names contain this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, condition in CONDITIONS.items():
        file = options.out / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not file.exists() and (options.only is None or options.only in name):
            file.write_text(json.dumps(check(condition), indent=1))
            print(f"{name}: {json.loads(file.read_text())['advised']}", flush=True)
        if file.exists():
            found[name] = json.loads(file.read_text())
    print("\n".join(table(found)) if found else "nothing yet")


if __name__ == "__main__":
    main()
