"""Which order, period, pace and wire to use: a race of candidates on the simulated cluster, in a stated time."""
