"""The sampler and the averager inside other training frameworks; each adapter needs its framework installed."""
