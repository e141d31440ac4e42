"""Gradients of single units, or short sketches of them, from one ordinary backward pass."""
