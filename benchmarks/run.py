"""Print every benchmark ratio: ``python benchmarks/run.py [TOPIC ...]``.

Each ``bench_TOPIC.py`` beside this file defines ``ratios()``, a generator of `Ratio`. A benchmark that cannot run here
raises `Skip` with the reason.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from ratio import Skip
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def main() -> None:
    topics = sys.argv[1:] or sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    table = Table("benchmark", "ratio", "bar", "", "what is compared")
    console = Console()
    for topic in topics:
        console.print(f"[dim]{topic} …[/dim]")
        try:
            for ratio in importlib.import_module(f"bench_{topic}").ratios():
                verdict = {True: "met", False: "[red]missed[/red]", None: ""}[ratio.met]
                console.print(f"  {ratio.name}: {ratio.value:.3g} {ratio.bar}")
                table.add_row(f"{topic}: {ratio.name}", f"{ratio.value:.3g}", ratio.bar, verdict, ratio.note)
        except Skip as reason:
            table.add_row(topic, "-", "", "skipped", str(reason))
    console.print(table)


if __name__ == "__main__":
    main()
