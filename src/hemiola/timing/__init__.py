"""Time without a model: delays of steps, links, what theory says of a pace, and a simulation of the clock alone."""
