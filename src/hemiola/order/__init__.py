"""Order: which example does each worker visit next?

The sampler for one's own loop is in `hemiola.order.sampler`, the sources of unit gradients are in
`hemiola.order.gradients`; neither is imported from here, so that the policies stay light.
"""

from hemiola.order.orders import CDGraB, GraB, IDGraB, IDPairGraB, InOrder, RandomReshuffling, ShuffleOnce, redeal
from hemiola.order.sketch import parse_sketch

ORDERS: dict[str, type] = {
    "rr": RandomReshuffling,
    "shuffle-once": ShuffleOnce,
    "in-order": InOrder,
    "grab": GraB,
    "id-grab": IDGraB,
    "id-pair-grab": IDPairGraB,
    "cd-grab": CDGraB,
}

__all__ = [
    "ORDERS",
    "CDGraB",
    "GraB",
    "IDGraB",
    "IDPairGraB",
    "InOrder",
    "RandomReshuffling",
    "ShuffleOnce",
    "parse_sketch",
    "redeal",
]
