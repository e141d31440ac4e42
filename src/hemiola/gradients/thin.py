"""Thin ghosts: fewer layers, outputs and positions, for a fraction of the time and nearly all of the order.

Balancing asks which of two examples points along the sum so far. Most of that is known from a part of the model:

* **Layers.** Linear layers only, where they hold a good share of the weights: a convolution sees hundreds of positions
  for each example, and normalisations and embeddings cost a pass over their signal for little. A model that is nearly
  all convolutions gives them too. Of many, `LAYERS` are taken, evenly spread and the last one among them: gradients of
  neighbouring layers say much the same.
* **Outputs.** Of a layer's signal about `OUTPUTS` outputs are kept, evenly spread (the mask of FactGraSS, arXiv
  2505.18976, section 3: sketch each factor before the product, not the product).
* **Positions.** Of a convolution's positions about `POSITIONS` in each dimension, evenly spread; the projection is a
  convolution with a longer stride.

What is kept is scaled so that inner products stay what they are on average.
"""

from __future__ import annotations

from hemiola.gradients.layers import Dense, Layer, Projecting

LAYERS = 8
OUTPUTS = 40
POSITIONS = 8

# Linear layers that hold at least this share of the weights speak for the convolutions too.
ENOUGH = 0.1


def thin_out(layers: list[Layer]) -> list[Layer]:
    """The layers that thin ghosts are made of, each thinned out; all of them where none multiplies with a weight."""
    linear = [layer for layer in layers if isinstance(layer, Dense)]
    projecting = [layer for layer in layers if isinstance(layer, Projecting)]
    candidates = linear if _weights(linear) >= ENOUGH * _weights(projecting) else projecting
    if not candidates:
        return layers
    last = len(candidates) - 1
    places = range(last + 1) if last < LAYERS else [round(n * last / (LAYERS - 1)) for n in range(LAYERS)]
    chosen: list[Layer] = []
    for place in places:
        candidates[place].thin(OUTPUTS, POSITIONS)
        chosen.append(candidates[place])
    return chosen


def _weights(layers: list[Dense] | list[Projecting]) -> int:
    return sum(layer.length * layer.outputs for layer in layers if layer.trains_weight)
