"""The policies in one's own training loop: the sampler chooses the order, the averager the period."""
