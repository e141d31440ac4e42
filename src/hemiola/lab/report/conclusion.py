"""What a folder's comparison says, in sentences: the same on the terminal, in the report and in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hemiola.lab.report import words
from hemiola.lab.report.paired import CONFIDENCE, FEWEST
from hemiola.lab.report.read import Folder
from hemiola.lab.report.seeds import COSTS
from hemiola.lab.report.summary import RunSummary, Summary, groups, measured
from hemiola.lab.report.verdicts import BETTER, MIXED, NOT_RANKED, NOT_SHOWN, SAME, WORSE, Aspect, Verdict, verdicts

_NOUNS = {"epochs": "epochs", "seconds": "seconds", "bytes_per_worker": "bytes"}
# How an aspect is named after "better" or "worse".
_ASPECTS = {"end": "at the end", "epochs": "in epochs", "seconds": "in time", "bytes_per_worker": "in bytes"}


def sentences(folder: Folder, summary: Summary) -> list[str]:
    """What every run gained or lost against the first, in words; `verdicts` says how that is found out."""
    if not summary.runs:
        return ["No run has results yet."]
    found = {verdict.run: verdict for verdict in verdicts(folder, summary)}
    parts = groups(folder, summary.runs)
    said: list[str] = []
    for group in parts:
        said += [_sentence(run, found.get(run.name), summary) for run in group]
        said += _method([found[run.name] for run in group if run.name in found], summary)
    if len(parts) > 1:
        said.append(_beside(folder, parts))
    return said + [_edge(run, key) for run in summary.runs for key in run.at_edge()]


def _sentence(run: RunSummary, verdict: Verdict | None, summary: Summary) -> str:
    if not run.best.counts["done"]:
        return _unfinished(run)
    if not math.isfinite(run.best.final.mean):
        return f"{_called(run)} has no finite {words.OBJECTIVES[summary.objective]} to compare."
    if verdict is None or not verdict.aspects:
        return _alone(run, summary)
    end, *costs = verdict.aspects.values()
    final = words.plus_minus(run.best.final.mean, run.best.final.deviation)
    said = [
        f"{_called(run)} against {words.called(verdict.reference)}: {label(verdict)} ({_seeds(verdict)}).",
        f"It ends at a {words.OBJECTIVES[summary.objective]} of {final}, {in_words(end)}.",
    ]
    if costs:
        said.append(f"{_reached(verdict)} {_costs(costs)}.")
    said += _missed(verdict, len(costs))
    if verdict.lost:
        said.append(f"It diverged at {verdict.lost} of {verdict.lost + verdict.seeds} seeds: it is not called better.")
    return " ".join(said)


def label(verdict: Verdict) -> str:
    """The verdict in a few words: ``"better in time and in bytes, worse at the end"``."""
    if verdict.word in (NOT_RANKED, NOT_SHOWN):
        return verdict.word
    good, bad, mixed = ([_ASPECTS[name] for name in verdict.which(kind)] for kind in (BETTER, WORSE, MIXED))
    said = [f"better {words.listed(good)}"] if good and not verdict.lost else []
    said += [f"worse {words.listed(bad)}"] if bad or not verdict.seeds else []
    said += [f"better or worse {words.listed(mixed)} depending on the target"] if mixed else []
    return ", ".join(said)


def in_words(aspect: Aspect) -> str:
    """One aspect: ``"2.1x fewer seconds (1.8 to 2.5)"``; without the interval where there are too few seeds for one."""
    over, noun = aspect.over, _NOUNS.get(aspect.name)
    if aspect.verdict == SAME:
        return f"as many {noun}" if noun else "the same"
    if aspect.verdict == MIXED:
        each = [f"{words.ratio(one.mean)} for {words.level(aim)}" for aim, one in aspect.by_target.items()]
        return f"{words.listed(each)} as many {noun}"
    spell = words.ratios if aspect.ratio else words.ends
    if aspect.verdict == NOT_SHOWN:
        low, _, high = spell(over.low, over.mean, over.high)
        low, high = (f"{low}x", f"{high}x") if aspect.ratio else (low, high)
        kind = f" in {noun}" if noun else ""
        return f"no difference shown{kind} ({low} to {high})"
    less = over.mean < 0
    low, mean, high = spell(-over.high, -over.mean, -over.low) if less else spell(over.low, over.mean, over.high)
    certain = "" if math.isnan(over.low) or low == high else f" ({low} to {high})"
    if noun:
        return f"{mean} {'fewer' if less else 'as many'} {noun}{certain}"
    side = "lower" if less else "higher" if not aspect.ratio else "as high"
    return f"{mean} {side}{certain}"


def _costs(costs: Sequence[Aspect]) -> str:
    """What it needs for the targets: what is shown first."""
    shown = [in_words(aspect) for aspect in costs if aspect.verdict != NOT_SHOWN]
    not_shown = [
        in_words(aspect).removeprefix("no difference shown in ") for aspect in costs if aspect.verdict == NOT_SHOWN
    ]
    parts = [f"it needs {words.listed(shown)}"] if shown else []
    parts += [f"no difference is shown in {words.listed(not_shown)}"] if not_shown else []
    return "; ".join(parts)


def _alone(run: RunSummary, summary: Summary) -> str:
    """Where a run ended, compared with nothing."""
    ended = run.best
    costs = {cost: ended.cells[cost].mean for cost in COSTS}
    units = {"epochs": " epochs", "seconds": " of cluster time", "bytes_per_worker": " sent per worker"}
    known = [words.amount(cost, mean) + units[cost] for cost, mean in costs.items() if math.isfinite(mean)]
    after = f" after {words.listed(known)}" if known else ""
    final = words.plus_minus(ended.final.mean, ended.final.deviation)
    return f"{_called(run)} ends at a {words.OBJECTIVES[summary.objective]} of {final}{after} ({ended.seeds})."


def _seeds(verdict: Verdict) -> str:
    count = "1 seed" if verdict.seeds == 1 else f"{verdict.seeds} seeds"
    return count if verdict.seeds >= FEWEST else f"{count}; ranking takes {FEWEST}"


def _reached(verdict: Verdict) -> str:
    """Which targets the costs are for."""
    common = next(iter(verdict.aspects[cost].by_target for cost in COSTS if cost in verdict.aspects))
    if len(common) == len(verdict.targets):
        return "To reach the targets" if len(common) > 1 else f"To reach {words.level(verdict.targets[0])}"
    return f"To reach {_levels(common)}"


def _missed(verdict: Verdict, compared: int) -> list[str]:
    """The targets that it does not stay below although the reference does."""
    if not verdict.unreached:
        return []
    each = [
        f"{words.level(aim)} at {'every seed' if count == verdict.seeds else f'{count} of {verdict.seeds} seeds'}"
        for aim, count in verdict.unreached.items()
    ]
    return [f"It does not stay below {words.listed(each)}{'' if compared else ', so its costs are not compared'}."]


def _method(found: Sequence[Verdict], summary: Summary) -> list[str]:
    """How to read the numbers, once."""
    if not found:
        return []
    aims = found[0].targets
    name = words.OBJECTIVES[summary.objective]
    plural = f"gaps of {_levels(aims)}" if summary.objective == "train_gap" else f"{name}es of {_levels(aims)}"
    said = [f"Targets: {plural}, reached when a seed stays at or below."] if len(aims) > 1 else []
    if any(verdict.ranked for verdict in found):
        said.append(
            f"Ends are means over the last tenth. In brackets: {100 * CONFIDENCE:.0f} % intervals of the mean, "
            "paired by seed, for all numbers of a run together."
        )
    return [" ".join(said)] if said else []


def _levels(aims: Iterable[float]) -> str:
    return words.listed([words.level(aim) for aim in aims])


def _beside(folder: Folder, parts: Sequence[Sequence[RunSummary]]) -> str:
    """Why not all runs are compared."""
    kinds: dict[bool, list[str]] = {}
    for group in parts:
        for run in group:
            kinds.setdefault(measured(folder.settings(run.name)), []).append(words.called(run.name))
    if len(kinds) == 1:
        return "Runs on different tasks are not ranked against each other."
    return (
        f"{words.listed(kinds[False])}: virtual time, a prediction; {words.listed(kinds[True])}: measured. The two "
        "stand beside each other and are not ranked."
    )


def _called(run: RunSummary) -> str:
    name = words.called(run.name)
    return f"{name} (at its best {words.point(run.best.point)})" if len(run.points) > 1 else name


def _edge(run: RunSummary, key: str) -> str:
    values = [float(dict(one.point)[key]) for one in run.points]
    best = float(dict(run.best.point)[key])
    end = "largest" if best == max(values) else "smallest"
    name = words.called(run.name)
    return f"{name} does best at the {end} {key} that was tried, {best:g}; a wider sweep may find a better one."


def _unfinished(run: RunSummary) -> str:
    counts = run.best.counts
    if counts["running"] or not sum(counts.values()):
        return f"{words.called(run.name)} has not finished yet."
    return (
        f"{words.called(run.name)} diverged at every seed."
        if counts["diverged"]
        else f"{words.called(run.name)} failed at every seed."
    )
