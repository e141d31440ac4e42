"""Does the demo's headline hold for other seeds? Ordinary and everything together on ten that the demo does not use.

    python benchmarks/demo_seeds.py [--seeds 10] [--jobs 2] [--out DIR]

Prints the gain of every seed, the headline over all of them, and the CPU seconds a seed took; fails unless every single
seed gains at least a factor of 3 and the headline is shown.
"""

import argparse
import sys
import tempfile
import time
import tomllib
from importlib.resources import files
from pathlib import Path

from hemiola.lab.demo.gains import cost_gain, ordinary_end
from hemiola.lab.demo.scenes import headline
from hemiola.lab.execute import run_experiment
from hemiola.lab.experiment import Experiment
from hemiola.lab.report import summary_of

FIRST = 1000
LEAST = 3.0


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--jobs", type=int, default=None)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    given = tomllib.loads(files("hemiola.lab.demo").joinpath("together.toml").read_text())
    given["run"] = [run for run in given["run"] if run["name"] in ("ordinary", "everything")]
    given["seeds"] = list(range(FIRST, FIRST + chosen.seeds))
    out = chosen.out or Path(tempfile.mkdtemp(prefix="hemiola-demo-seeds-"))
    began = time.monotonic()
    run_experiment(Experiment(given), out, jobs=chosen.jobs, resume=True)
    summary = summary_of(out)
    target = ordinary_end(summary)
    base, own = (run.best.curves for run in summary.runs)
    gains = {s: base[s].stays_below(target, "seconds") / own[s].stays_below(target, "seconds") for s in base}
    for seed, gain in gains.items():
        print(f"seed {seed}: {gain:.1f} times sooner")
    print(headline(summary))
    print(f"{time.monotonic() - began:.0f} s")
    sooner = cost_gain(summary, "everything", "seconds", target)
    if sooner is None or not sooner.shown or not all(gain >= LEAST for gain in gains.values()):
        sys.exit("the headline does not hold for these seeds")


if __name__ == "__main__":
    main()
