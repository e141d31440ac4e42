"""What theory says of each run before it starts, to stand beside what is measured."""

from __future__ import annotations

from hemiola.clusters.shared_options import slow_factors
from hemiola.lab.experiment import Cell, Experiment
from hemiola.timing.delays import parse_delay
from hemiola.timing.theory import mean_staleness, update_time, variant_of


def predicted(experiment: Experiment) -> dict[str, dict[str, float]]:
    """By run: mean staleness and, where the delays are known and nothing else takes time, seconds per update."""
    return {cell.run: law for cell in reversed(experiment.cells) if (law := _predict(cell))}


def _predict(cell: Cell) -> dict[str, float]:
    order, period, pace, _, _ = cell.parts()
    k, workers = pace.fixed_k, cell.settings.workers
    if k is None or pace.max_staleness is not None or period.clock is not None:
        return {}
    variant = variant_of(pace)
    cluster = cell.settings.cluster if isinstance(cell.settings.cluster, dict) else {}
    if cluster.get("link", {}).get("reports") == "ring" and not (pace.cancels or pace.lockstep):
        return {}  # an update takes what has come while the one before was under way
    law = {"staleness": mean_staleness(variant, workers, k)}
    steps_only = not period.local and order.sketch is None and "link" not in cluster and pace.late == "cancel"
    delay = parse_delay(cluster["delay"], cell.base) if steps_only and "delay" in cluster else None
    if delay is not None and delay.own is None:  # theory knows one law and factors on it, not a law for each worker
        slow = slow_factors(cluster.get("slow", {}))
        law["update_seconds"] = update_time(variant, delay, workers, k, slow).value
    return law
