"""What is compared: the ordinary way, each policy by itself, and combinations that make sense together.

A candidate is a ``[[run]]`` table of an experiment file. Nothing here is tuned to a cluster: which of them wins is for
the race to say. A new policy is advised once it has a row.
"""

from __future__ import annotations

from typing import Any

ORDINARY = "ordinary"

DECK = {"deal": "deck"}
SMALL = {"wire": "int8"}


def candidates(workers: int) -> dict[str, dict[str, Any]]:
    """Every candidate's table, the ordinary way first.

    Args:
        workers: Of the cluster; a single one has nobody to wait for and nobody to average with.
    """
    ordered = {"order": {"name": "cd-grab"}}
    found: dict[str, dict[str, Any]] = {ORDINARY: {}, "order": ordered}
    if workers == 1:
        return found
    half, adaptive = max(1, workers // 2), {"name": "adaptive", "start": 4, **SMALL, "overlap": "auto"}
    adasync = {"pace": {"name": "k-async", "k": "adasync", "start": max(1, min(2, workers - 1))}}
    found |= {
        "int8": {"period": {"name": "constant", "p": 1, **SMALL}},
        "period": {"period": adaptive},
        "order + period": {**ordered, "period": adaptive},
        "long period": {"period": {"name": "constant", "p": 16, **SMALL, "overlap": "auto"}},
        "pace, half": {"pace": {"name": "k-async", "k": half}},
        "pace, batches": {"pace": {"name": "k-batch-async", "k": half}},
        "AdaSync": adasync,
        "order + period + AdaSync": {**ordered, **adasync, "period": {"name": "adaptive", "start": 8, **SMALL}},
    }
    for mix in (0.0, 0.5):
        clocked = {"period": {"name": "clocked", "mix": mix, **SMALL}, "shards": DECK}
        found[f"clocked, mix {mix:g}"] = clocked
        found[f"clocked, mix {mix:g} + order"] = {**clocked, **ordered}
    return found


def own_loop(table: dict[str, Any], lr: float) -> list[str]:
    """The lines that put a candidate into a training loop of one's own, as far as it can run there."""
    order, period, pace = table.get("order"), table.get("period"), table.get("pace")
    rate = f"# with lr = {lr:g}"
    if pace is not None:
        return [f'# a pace needs a server: run it from an experiment file with cluster = "ray", pace = {pace!r}', rate]
    lines = []
    if order is not None or table.get("shards") == DECK:
        deal = ', deal="deck"' if table.get("shards") == DECK else ""
        name = "rr" if order is None else order["name"]
        lines.append(f'loader = hemiola.OrderedLoader(dataset, batch_size=BATCH, order="{name}"{deal})')
    if period is not None:
        own = {key: value for key, value in period.items() if key not in ("name", "wire", "overlap")}
        kind = {"constant": "Constant", "adaptive": "Adaptive", "clocked": "Clocked"}[period["name"]]
        given = ", ".join(f"{key}={value!r}" for key, value in own.items())
        rest = "".join(f", {key}={period[key]!r}" for key in ("wire", "overlap") if key in period)
        lines.append(f"averager = hemiola.Averager(model, optimizer, period=hemiola.{kind}({given}){rest})")
    return [*lines, rate] if lines else ["# DistributedDataParallel as it is", rate]
