"""A newcomer's path, timed: a fresh clone, the README's commands, and the first run of an experiment of one's own.

    python benchmarks/newcomer.py [--without-demo]

Prints the seconds of every stage and how busy the machine was; fails when the whole path took more than five minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 300


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--without-demo", action="store_true", help="Install as make demo does, and leave the demo out."
    )
    first = [".venv/.installed"] if options.parse_args().without_demo else ["demo"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory(prefix="hemiola-newcomer-") as folder:
        clone = Path(folder) / "hemiola"
        hemiola, mine = str(clone / ".venv/bin/hemiola"), clone / "mine"
        stages = [
            ("clone", ["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder)),
            (f"make {first[0]}", ["make", *first], clone),
            ("hemiola new mine", [hemiola, "new", "mine"], clone),
            ("hemiola run", [hemiola, "run", "experiment.toml", "--out", "results"], mine),
        ]
        total = 0.0
        for name, command, where in stages:
            began = time.monotonic()
            subprocess.run(command, cwd=where, env=environment, check=True)
            total += time.monotonic() - began
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        assert (mine / "results" / "report.html").stat().st_size > 100_000
    print(f"in all: {total:.0f} s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if total > LIMIT_SECONDS:
        sys.exit(f"more than {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
