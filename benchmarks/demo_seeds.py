"""Do the demo's conclusions hold for other seeds? Every scene on ten that the demo does not use.

    python benchmarks/demo_seeds.py [--seeds 10] [--jobs 2] [--out DIR]

Prints what the demo would say of these seeds, the gain of every single one, and how long it took; fails unless every
scene shows its gain over all of them, and each of them gains by itself.
"""

import argparse
import sys
import tempfile
import time
import tomllib
from importlib.resources import files
from pathlib import Path

from hemiola.lab.demo.gains import ordinary_end
from hemiola.lab.demo.scenes import SCENES, headline
from hemiola.lab.execute import run_experiment
from hemiola.lab.experiment import Experiment
from hemiola.lab.report import summary_of
from hemiola.lab.report.summary import Summary

FIRST = 1000
CURES = {"order": "CD-GraB", "period": "ADPSGD", "pace": "AdaSync", "together": "everything"}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seeds", type=int, default=10)
    options.add_argument("--jobs", type=int, default=None)
    options.add_argument("--out", type=Path, default=None)
    chosen = options.parse_args()
    out = chosen.out or Path(tempfile.mkdtemp(prefix="hemiola-demo-seeds-"))
    began, failed = time.monotonic(), []
    for scene in SCENES:
        given = tomllib.loads(files("hemiola.lab.demo").joinpath(f"{scene.name}.toml").read_text())
        given["run"] = [run for run in given["run"] if run["name"] in ("ordinary", CURES[scene.name])]
        given["seeds"] = list(range(FIRST, FIRST + chosen.seeds))
        run_experiment(Experiment(given), out / scene.name, jobs=chosen.jobs, resume=True)
        summary = summary_of(out / scene.name)
        gains = each_seed(summary, ends=scene.name == "order")
        print(f"\n{scene.name}: {'; '.join(scene.tell(summary))}")
        print("  each seed: " + ", ".join(f"{gain:.2g}" for gain in sorted(gains)))
        failed += [scene.name] if min(gains) <= 1 else []
        if scene.name == "together":
            print(headline(summary))
    print(f"\n{time.monotonic() - began:.0f} s")
    if failed:
        sys.exit(f"not every seed shows what the demo says in: {', '.join(failed)}")


def each_seed(summary: Summary, ends: bool) -> list[float]:
    """What every seed gains by itself: in the gap at the end, or in seconds to the ordinary run's gap."""
    base, own = (run.best.curves for run in summary.runs)
    if ends:
        return [base[seed].final / own[seed].final for seed in base]
    target = ordinary_end(summary)
    return [base[seed].stays_below(target, "seconds") / own[seed].stays_below(target, "seconds") for seed in base]


if __name__ == "__main__":
    main()
