"""Order: which example does each worker visit next?

The sampler for one's own loop is in `hemiola.loops.sampler`, the sources of unit gradients are in
`hemiola.gradients.units`; neither is imported from here, so that the policies stay light.
"""

from hemiola.order.balanced import redeal
from hemiola.order.cdgrab import CDGraB, IDPairGraB
from hemiola.order.fixed import InOrder, RandomReshuffling, ShuffleOnce
from hemiola.order.grab import GraB, IDGraB
from hemiola.order.scored import Scored

ORDERS: dict[str, type] = {
    "rr": RandomReshuffling,
    "shuffle-once": ShuffleOnce,
    "in-order": InOrder,
    "grab": GraB,
    "id-grab": IDGraB,
    "id-pair-grab": IDPairGraB,
    "cd-grab": CDGraB,
    "scored": Scored,
}

__all__ = [
    "ORDERS",
    "CDGraB",
    "GraB",
    "IDGraB",
    "IDPairGraB",
    "InOrder",
    "RandomReshuffling",
    "Scored",
    "ShuffleOnce",
    "redeal",
]
