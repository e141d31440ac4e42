"""One process, a virtual clock, real gradients."""
