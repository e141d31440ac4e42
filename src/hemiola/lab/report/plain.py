"""What a comparison says, as plain values for ``--json``: the table, every run against its reference, a conclusion."""

from __future__ import annotations

import math
from typing import Any

from hemiola.lab.report import conclusion
from hemiola.lab.report.summary import RESULTS, RunSummary, Summary
from hemiola.lab.report.verdicts import Aspect, Verdict, verdicts


def as_json(summary: Summary) -> dict[str, Any]:
    """Numbers that are not finite, or not known, are None."""
    found = {verdict.run: verdict for verdict in verdicts(summary)}
    return {
        "folders": [str(path) for path in summary.folder.paths],
        "task": dict(summary.task),
        "objective": summary.objective,
        "conclusions": conclusion.conclusions(summary, found),
        "runs": [_run(run, summary, found.get(run.name)) for run in summary.runs],
    }


def _run(run: RunSummary, summary: Summary, verdict: Verdict | None) -> dict[str, Any]:
    cells = {name: run.best.cells[name] for name in summary.columns(RESULTS)}
    return {
        "run": run.name,
        "point": dict(run.best.point),
        "seeds": {status: count for status, count in run.best.counts.items() if count},
        "results": {
            name: {"mean": _number(cell.mean), "deviation": _number(cell.deviation)} for name, cell in cells.items()
        },
        "against": None if verdict is None else _against(verdict),
    }


def _against(verdict: Verdict) -> dict[str, Any]:
    return {
        "reference": verdict.reference,
        "verdict": verdict.word,
        "targets": list(verdict.targets),
        **{name: _aspect(aspect) for name, aspect in verdict.aspects.items()},
    }


def _aspect(aspect: Aspect) -> dict[str, Any]:
    """A ratio of run over reference, or where zero means nothing a difference, with the ends of its interval."""
    turn = math.exp if aspect.ratio else float
    ends = {"mean": aspect.over.mean, "low": aspect.over.low, "high": aspect.over.high}
    return {
        "kind": "ratio" if aspect.ratio else "difference",
        "verdict": aspect.verdict,
        **{name: _number(turn(value)) if math.isfinite(value) else None for name, value in ends.items()},
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
