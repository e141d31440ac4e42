"""The demo in scenes: each an experiment file, told in one line; then a headline one can quote.

Everything said is measured in this run: a scene whose seeds do not show a gain says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from hemiola.errors import InputError
from hemiola.lab.demo.gains import Gain, cost_gain, end_gain, ordinary_end
from hemiola.lab.execute import run_experiment
from hemiola.lab.experiment import Experiment
from hemiola.lab.progress import Display
from hemiola.lab.report import summary_of, words, write_page
from hemiola.lab.report.summary import Summary

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scene:
    """One trouble.

    Attributes:
        name: Of its file and of its folder.
        trouble: What is wrong, in words.
        tell: What came out of it, in words.
    """

    name: str
    trouble: str
    tell: Callable[[Summary], list[str]]


# ------------------------------------------------------------------------------------------------- what a scene says


def _order(summary: Summary) -> list[str]:
    gain = end_gain(summary, "CD-GraB")
    return [_said("CD-GraB ends {} closer to the optimum", gain, "CD-GraB ends {} as far from the optimum")]


def _period(summary: Summary) -> list[str]:
    return [_sooner(summary, "ADPSGD")]


def _pace(summary: Summary) -> list[str]:
    return [_sooner(summary, "AdaSync")]


def _together(summary: Summary) -> list[str]:
    return [
        _does_not_work(summary) if run.name == "order + period" else _sooner(summary, run.name)
        for run in summary.runs[1:]
    ]


def _does_not_work(summary: Summary) -> str:
    """Order and period while every update waits for every worker: less than the period gains by itself."""
    target = ordinary_end(summary)
    later = cost_gain(summary, "period alone", "seconds", target, base="order + period")
    said = "order + period, waiting for all,"
    if later is None:
        return f"{said} does not reach that gap: the combination that does not work"
    if later.shown:
        return f"{said} takes {later} as long as period alone: the combination that does not work"
    return f"{said} takes {later} as long as period alone: nothing is shown to be gained or lost"


def _sooner(summary: Summary, run: str) -> str:
    target = ordinary_end(summary)
    gain = cost_gain(summary, run, "seconds", target)
    if gain is None:
        return f"{run} does not reach a gap of {words.level(target)} in that time"
    return _said(
        f"{run} reaches a gap of {words.level(target)} {{}} sooner",
        gain,
        f"{run} takes {{}} as long as the ordinary way to a gap of {words.level(target)}",
    )


def _said(better: str, gain: Gain, worse: str) -> str:
    """A gain in words, by two patterns: where it is one, and where it is the contrary."""
    if gain.mean < 1:
        return worse.format(gain.loss) + (": no difference is shown" if gain.high > 1 else "")
    return better.format(gain) + ("" if gain.shown else ": no gain is shown")


def headline(summary: Summary) -> str:
    """The last scene in one sentence."""
    target = ordinary_end(summary)
    sooner = cost_gain(summary, "everything", "seconds", target)
    fewer = cost_gain(summary, "everything", "bytes_per_worker", target)
    if sooner is None or fewer is None or not sooner.shown:
        return "Everything together is not shown to be faster than the ordinary way with these seeds."
    said = f"Everything together reaches a gap of {words.level(target)} {sooner} sooner than the ordinary way"
    if fewer.shown:
        return f"{said}, with {fewer} fewer bytes."
    return f"{said}." if fewer.high > 1 else f"{said}, at {fewer.loss} the bytes."


SCENES = (
    Scene("order", "even workers, a fast link: what is left is the order", _order),
    Scene("period", "a slow link: an exchange takes as long as fourteen steps", _period),
    Scene("pace", "stragglers: the slowest of 16 workers takes three times the mean", _pace),
    Scene("together", "stragglers and a slow link at once", _together),
)


# ------------------------------------------------------------------------------------------------------------ playing


def play(
    out: Path, jobs: int | None, say: Say, display: Callable[[], Display], seeds: Sequence[int] | None = None
) -> bool:
    """Run every scene that is not finished, tell each, and write the reports.

    Args:
        out: Folder; every scene has one of its own in it.
        jobs: Cells side by side.
        say: Prints a line.
        display: Makes what shows progress.
        seeds: Others than those of the files.

    Returns:
        Whether everything is finished; False where it was interrupted.
    """
    began, told, counts = time.monotonic(), None, set[int]()
    for number, scene in enumerate(SCENES, 1):
        say(f"\n{number} of {len(SCENES)}  {scene.trouble}")
        told = _run(scene.name, out / scene.name, jobs, display, seeds)
        if told is None:
            return False
        counts.add(len(told.runs[0].best.curves))
        for line in scene.tell(told):
            say(f"        {line}")
    assert told is not None
    page = write_page(told, out / "report.html", headline(told))
    say(f"\n{headline(told)}")
    say(
        f"Every run at its own learning rate, {' to '.join(map(str, sorted(counts)))} paired seeds, intervals of 95 %, "
        f"simulated cluster seconds; {time.monotonic() - began:.0f} s of computing."
    )
    say(f"\nreport: {page} (the last scene; the others have folders beside it)")
    return True


def play_real(out: Path, say: Say, display: Callable[[], Display], seeds: Sequence[int] | None = None) -> bool:
    """A small version on real processes: two workers over torch.distributed on this machine, one of them slow."""
    say("\non real processes of this machine (torch.distributed): 2 workers whose steps straggle, measured seconds")
    summary = _run("real", out / "real", 1, display, seeds)
    if summary is None:
        return False
    for run in summary.runs:
        ends = [row.numbers["seconds"] for row in summary.folder.rows if row.run == run.name]
        say(f"        {run.name}: gap {run.best.final.mean:.3g} after {sum(ends) / len(ends):.1f} measured seconds")
    say(f"\nreport: {write_page(summary, out / 'real' / 'report.html')}")
    return True


def _run(
    name: str, out: Path, jobs: int | None, display: Callable[[], Display], seeds: Sequence[int] | None
) -> Summary | None:
    with _file(name) as file:
        experiment = Experiment.load(file, {} if seeds is None else {"seeds": list(seeds)})
    outcome = run_experiment(experiment, out, None, jobs, True, display())
    if outcome.failed:
        first = outcome.failed[0]
        raise InputError(f"scene {name!r}: {first.cell.run!r}, seed {first.cell.seed}, failed: {first.why}")
    if outcome.interrupted:
        return None
    summary = summary_of(out)
    write_page(summary, out / "report.html")
    return summary


@contextmanager
def _file(name: str) -> Iterator[Path]:
    with as_file(files("hemiola.lab.demo") / f"{name}.toml") as file:
        yield file
