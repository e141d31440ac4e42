"""The one loop, and what it keeps: shards, queues or a deck, a ledger, evaluations."""

from hemiola.plan import Amount, Plan
from hemiola.training.loop import Training
from hemiola.training.shards import split_examples, whole_set

__all__ = ["Amount", "Plan", "Training", "split_examples", "whole_set"]
