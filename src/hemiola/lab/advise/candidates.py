"""What is compared: the ordinary way, each policy by itself, and combinations that make sense together.

A candidate is a ``[[run]]`` table of an experiment file. Nothing here is tuned to a cluster: which of them wins is for
the race to say. A new policy is advised once it has a row.
"""

from __future__ import annotations

from typing import Any

ORDINARY = "ordinary"
WITH_ORDER = " + order"  # ends the name of a candidate that is another one with its examples ordered

DECK = {"deal": "deck"}
ADAPTIVE_RATES = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta")

Table = dict[str, Any]


def candidates(workers: int, *, link: bool = True, optimizer: str = "SGD") -> dict[str, Table]:
    """Every candidate's table, the ordinary way first.

    Args:
        workers: Of the cluster; a single one has nobody to wait for and nobody to average with.
        link: Whether messages take time; fewer bytes alone gain nothing where they do not.
        optimizer: A torch.optim class. What divides by the size of its gradients takes steps of one size however small
            ``mix`` makes them count, so a worker must go on with all of its own: mix = 1.
    """
    found: dict[str, Table] = {ORDINARY: {}}
    if workers > 1 and link:
        found |= {
            "int8": {"period": {"name": "constant", "p": 1, "wire": "int8"}},
            "int4": {"period": {"name": "constant", "p": 1, "wire": "int4"}},
        }
    if workers > 1:
        half = max(1, workers // 2)
        local = {"wire": "int8", "overlap": "auto"}
        adasync = {"name": "k-async", "k": "adasync", "start": max(1, min(2, workers - 1))}
        found |= {
            "period": {"period": {"name": "adaptive", "start": 4, **local}},
            "long period": {"period": {"name": "constant", "p": 16, **local}},
            "long period, int4": {"period": {"name": "constant", "p": 16, **local, "wire": "int4"}},
            "DiLoCo": {"period": {"name": "constant", "p": 16, "wire": "int8"}, "outer": {"name": "diloco"}},
            "pace, half": {"pace": {"name": "k-async", "k": half}},
            "pace, batches": {"pace": {"name": "k-batch-async", "k": half}},
            "AdaSync": {"pace": adasync},
            "period + AdaSync": {"period": {"name": "adaptive", "start": 8, "wire": "int8"}, "pace": adasync},
        }
        for mix in (1.0,) if optimizer in ADAPTIVE_RATES else (0.0, 0.5):
            clocked = {"period": {"name": "clocked", "mix": mix, "wire": "int8"}, "shards": DECK}
            found[f"clocked, mix {mix:g}"] = clocked
    for name in (ORDINARY, "period", "long period", "period + AdaSync", *(each for each in found if "clocked" in each)):
        if name in found:
            found[_ordered(name)] = {"order": {"name": "cd-grab"}, **found[name]}
    return found


def _ordered(name: str) -> str:
    return "order" if name == ORDINARY else name + WITH_ORDER


def without_order(name: str) -> str:
    """The candidate that this one is with its examples ordered; itself where it has no order."""
    return ORDINARY if name == "order" else name.removesuffix(WITH_ORDER)


def own_loop(table: Table, lr: float) -> list[str]:
    """The lines that put a candidate into a training loop of one's own, as far as it can run there."""
    order, period, pace, outer = (table.get(key) for key in ("order", "period", "pace", "outer"))
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
        rest += "" if outer is None else f", outer={outer['name']!r}"
        lines.append(f"averager = hemiola.Averager(model, optimizer, period=hemiola.{kind}({given}){rest})")
    return [*lines, rate] if lines else ["# DistributedDataParallel as it is", rate]
