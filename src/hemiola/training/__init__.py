"""The one loop, and what it keeps: shards, queues, a ledger, evaluations."""

from hemiola.training.loop import Amount, Plan, Training
from hemiola.training.shards import split_examples

__all__ = ["Amount", "Plan", "Training", "split_examples"]
