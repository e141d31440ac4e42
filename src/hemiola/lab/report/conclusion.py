"""What a folder's comparison says, in sentences: the same on the terminal, in the report and in Python."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from hemiola.lab.report import words
from hemiola.lab.report.paired import CONFIDENCE, FEWEST
from hemiola.lab.report.seeds import COSTS
from hemiola.lab.report.summary import RunSummary, Summary, measured
from hemiola.lab.report.verdicts import BETTER, MIXED, NOT_RANKED, NOT_SHOWN, SAME, WORSE, Aspect, Verdict, verdicts

_NOUNS = {"epochs": "epochs", "seconds": "seconds", "bytes_per_worker": "bytes"}
# In which order a conclusion names them.
_FIRST = ("seconds", "end", "bytes_per_worker", "epochs")
# How an aspect is named after "better" or "worse".
_ASPECTS = {"end": "at the end", "epochs": "in epochs", "seconds": "in time", "bytes_per_worker": "in bytes"}


def sentences(summary: Summary) -> list[str]:
    """What the comparison says: the conclusion first, then every run by itself, then how to read the numbers."""
    found = {verdict.run: verdict for verdict in verdicts(summary)}
    told = [_sentence(run, found.get(run.name), summary) for run in summary.runs]
    said = conclusions(summary, found)
    return [*said, *(one for one in told if one not in said), *notes(summary, found)]


def conclusions(summary: Summary, found: Mapping[str, Verdict]) -> list[str]:
    """One sentence for every group of runs that may be compared: what was gained, at what price."""
    if not summary.runs:
        return ["No run has results yet."]
    return [_conclusion(group, found, summary) for group in summary.groups]


def _conclusion(group: Sequence[RunSummary], found: Mapping[str, Verdict], summary: Summary) -> str:
    reference, *others = group
    compared = [found[run.name] for run in others if found[run.name].aspects]
    if not compared:
        return _sentence(next((run for run in group if run.best.counts["done"]), reference), None, summary)
    best = max([verdict for verdict in compared if verdict.ranked] or compared, key=_gain)  # what is shown comes first
    name, against = (words.called(run) for run in (best.run, reference.name))
    if not best.ranked:
        count = "one seed is" if best.seeds == 1 else f"{best.seeds} seeds are"
        likely = f"; {name} came out ahead, {_gains(best, summary)}" if _gain(best)[1] > 0 else ""
        return f"Nothing is shown yet: {count} too few to rank runs, it takes {FEWEST}{likely}."
    if _gain(best)[0] <= 0:
        if all(verdict.word == WORSE for verdict in compared):
            return f"Every other run is worse than {against}."
        return f"No run is shown to be better than {against}."
    return f"{name} beats {against}: {_gains(best, summary)}{_prices(best)}."


def _gain(verdict: Verdict) -> tuple[int, float]:
    """How good a run is: what it is better in, time first, above all if it does not end worse; then by how much."""
    aspects = verdict.aspects
    better = [name for name in _FIRST if name in aspects and aspects[name].verdict in (BETTER, NOT_RANKED)]
    better = [name for name in better if aspects[name].over.mean < 0]
    if not better or verdict.lost:
        return 0, 0.0
    worse_end = "end" in aspects and aspects["end"].verdict == WORSE
    rank = len(_FIRST) - _FIRST.index(better[0])
    return rank + (0 if worse_end else len(_FIRST)), -aspects[better[0]].over.mean


def _gains(verdict: Verdict, summary: Summary) -> str:
    """What a run is better in: ``"it needs 3.7x less cluster time (3.5 to 4.0) and 2.9x fewer bytes ..."``."""
    aspects = [one for one in verdict.aspects.values() if one.verdict in (BETTER, NOT_RANKED) and one.over.mean < 0]
    level = words.OBJECTIVES[summary.objective]
    named = [one for name in _FIRST for one in aspects if one.name == name != "end"]
    costs = [in_words(one) for one in named if one.name != "epochs" or len(named) == 1]
    said = [f"the same {level} takes {words.listed(costs)}"] if costs else []
    said += [f"its {level} at the end is {in_words(one)}" for one in aspects if one.name == "end"]
    return ", and ".join(said)


def _prices(verdict: Verdict) -> str:
    """What a run is worse in."""
    worse = [one for one in verdict.aspects.values() if one.verdict == WORSE]
    costs = [in_words(one) for one in worse if one.name != "end"]
    said = [f"takes {words.listed(costs)}"] if costs else []
    said += [f"ends {in_words(one)}" for one in worse if one.name == "end"]
    return f", but {words.listed(said)}" if said else ""


def notes(summary: Summary, found: Mapping[str, Verdict]) -> list[str]:
    """How to read the numbers, and what they leave open."""
    said = [
        line
        for group in summary.groups
        for line in _method([found[run.name] for run in group if run.name in found], summary)
    ]
    if len(summary.groups) > 1:
        said.append(_beside(summary))
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
    return " ".join([*said, *missed(verdict)])


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
    return _sized(aspect, f"fewer {noun}", f"as many {noun}") if noun else _sized(aspect, "lower", "as high")


def _sized(aspect: Aspect, less: str, more: str) -> str:
    """``"2.1x fewer seconds (1.8 to 2.5)"`` from the words for less and for more."""
    over, spell = aspect.over, words.ratios if aspect.ratio else words.ends
    down = over.mean < 0
    low, mean, high = spell(-over.high, -over.mean, -over.low) if down else spell(over.low, over.mean, over.high)
    certain = "" if math.isnan(over.low) or low == high else f" ({low} to {high})"
    return f"{mean} {less if down else more if aspect.ratio else 'higher'}{certain}"


def short(aspect: Aspect) -> str:
    """One aspect in a table, where the column says what it is: ``"2.1x less (1.8 to 2.5)"``."""
    if aspect.verdict == SAME:
        return "the same"
    if aspect.verdict in (MIXED, NOT_SHOWN):
        return re.sub(" in (epochs|seconds|bytes)| as many (epochs|seconds|bytes)", "", in_words(aspect))
    return _sized(aspect, "less" if aspect.name != "end" else "lower", "as much" if aspect.name != "end" else "as high")


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


def missed(verdict: Verdict) -> list[str]:
    """Where a run did not get although the reference did: seeds that diverged, targets it does not stay below."""
    name = words.called(verdict.run)
    said = []
    if verdict.lost:
        every = verdict.lost + verdict.seeds
        said.append(f"{name} diverged at {verdict.lost} of {every} seeds: it is not called better.")
    if not verdict.unreached:
        return said
    each = [
        f"{words.level(aim)} at {'every seed' if count == verdict.seeds else f'{count} of {verdict.seeds} seeds'}"
        for aim, count in verdict.unreached.items()
    ]
    compared = any(cost in verdict.aspects for cost in COSTS)
    open_ = "" if compared else ", so its costs are not compared"
    return [*said, f"{name} does not stay below {words.listed(each)}{open_}."]


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


def _beside(summary: Summary) -> str:
    """Why not all runs are compared."""
    kinds: dict[bool, list[str]] = {}
    for group in summary.groups:
        for run in group:
            kinds.setdefault(measured(summary.folder.settings(run.name)), []).append(words.called(run.name))
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
