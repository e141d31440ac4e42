"""What the sampler says when a loop does not do what it counts on: each kind once, in the epoch it happens in."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from torch import nn
from torch.utils.data import Sampler

from hemiola.errors import InputError, SamplerWarning
from hemiola.loops.epoch import Epoch
from hemiola.loops.watch import Watch

TRACK = "`for batch in sampler.track(loader)` knows examples by their numbers instead"
SHARDED = "tell it not to (Lightning: use_distributed_sampler=False; Accelerate: do not prepare the loader)"
ADAPTERS = (
    "Use the adapter: hemiola.lightning.Ordered (Lightning; without it use_distributed_sampler=False), "
    "hemiola.accelerate.ordered (Accelerate; without it do not prepare the loader), hemiola.transformers.OrderedMixin"
)


class Notices:
    """Warnings of one sampler, each kind once.

    Args:
        rank: Named in the warnings.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._told: set[str] = set()

    def say(self, kind: str, text: str) -> None:
        """Warn, once for each kind."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text, SamplerWarning, stacklevel=4)

    # -------------------------------------------------------------------------------------------- as it happens

    def replaced(self, ranks: int) -> None:
        """A model is trained on one of several ranks, and nothing was ever drawn from its sampler."""
        raise InputError(
            f"rank {self._rank} of {ranks} trains the watched model, but nothing was drawn from its sampler: another "
            f"one has taken its place. {ADAPTERS}"
        )

    def surplus(self, epoch: Epoch) -> None:
        self.say(
            "surplus",
            f"rank {self._rank}'s model was trained on {epoch.counted} examples in epoch {epoch.number}, but its "
            f"sampler has handed out only {epoch.issued}, so the rest of this epoch teaches nothing. Either the loop "
            f"runs the model several times per batch ({TRACK}), or a framework has replaced the sampler; {SHARDED}",
        )

    def reordered(self, who: str) -> None:
        self.say(
            "reordered",
            f"{who} may change the order of what the sampler hands out, so that counting batches does not tell which "
            f"examples they are; {TRACK}",
        )

    def unmatched(self, why: str) -> None:
        self.say("unmatched", f"nothing is learnt from some batches, because {why}")

    def asked_in_eval(self, epoch: Epoch) -> None:
        self.say(
            "asked in eval",
            f"the loop trains on, but epoch {epoch.number} is over and the next one was not begun: the loader was "
            "asked for batches while the model was in eval mode, which counts as an evaluation. Nothing is learnt "
            "until it is asked in training mode: call model.train() before `for batch in loader`",
        )

    def untracked(self) -> None:
        self.say(
            "untracked",
            "a model was trained on batches that did not come through the tracked loader (it may have made its "
            "iterator before `track`, or another loader is used); examples are counted instead",
        )

    def foreign(self, example: int) -> None:
        self.say(
            "foreign",
            f"the tracked loader yields example {example}, which this sampler has not handed out in this epoch; "
            "nothing is learnt from batches of other examples",
        )

    # ---------------------------------------------------------------------------------------- at an epoch's end

    def unwatched(self, epoch: Epoch, order: str) -> None:
        self.say(
            "unwatched",
            f"all of epoch {epoch.number} was handed out, but no model is watched, so the order {order!r} learns "
            "nothing and stays as it is: put the loop into `with sampler.watch(model)`, or call sampler.attach(model)",
        )

    def missing(self, epoch: Epoch, missing: int) -> None:
        self.say(
            "missing",
            f"{missing} of the {epoch.issued} examples that rank {self._rank}'s sampler handed out in epoch "
            f"{epoch.number} were not trained on{_unused(epoch, ' (', ')')}. Unless the loop was left early, batches "
            "were skipped or prefetched, or examples dropped by collate_fn, and gradients were booked on other "
            f"examples; {TRACK}. Or a framework shards the sampler's output again; {SHARDED}",
        )

    def sharded(self, epoch: Epoch, missing: int) -> None:
        self.say(
            "missing",
            f"{missing} of the {epoch.issued} examples that rank {self._rank}'s sampler handed out in epoch "
            f"{epoch.number} never came out of the tracked loader. A framework shards the sampler's output again; "
            f"{SHARDED}",
        )

    def uncertain(self, epoch: Epoch) -> None:
        self.say(
            "uncertain",
            f"epoch {epoch.number} was left early and {_unused(epoch) or 'batches were of uneven size'}, so it cannot "
            f"be told whether batches or examples were left out and others taken for them; {TRACK}",
        )

    def learnt_nothing(self, epoch: Epoch, watch: Watch, model: nn.Module) -> None:
        self.say(
            "nothing",
            f"nothing was learnt in epoch {epoch.number}, so the order stays as it is: {_cause(watch, model)}",
        )


def _unused(epoch: Epoch, before: str = "", after: str = "") -> str:
    """A hint at skipped batches, where there is one."""
    passes = "1 forward pass" if epoch.unused == 1 else f"{epoch.unused} forward passes"
    return f"{before}{passes} had no backward pass{after}" if epoch.unused else ""


def _cause(watch: Watch, model: nn.Module) -> str:
    seen, name = watch.seen, type(model).__name__
    compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if not seen.passes and watch.updated():
        return (
            f"the watched {name} was trained, but never called. The loop calls something else, such as a method of it "
            "(model.loss(x, y)), a part, or a wrapper made of it; let that be what is watched, or call the model"
        )
    if not seen.passes:
        return f"the watched {name} was neither called nor trained; is another model, or a copy, the one that is?"
    if seen.summed:
        return (
            "one backward pass carries the summed losses of several batches, and with a batch a unit their gradients "
            "cannot be told apart; call backward for each, or use unit = 1"
        )
    if seen.differentiated:
        return "the loop differentiates gradients (create_graph=True); use unit = the batch size"
    if seen.unhooked and compiled:
        return (
            f"the watched {name} is compiled, so that hooks inside of it do not run; use unit = the batch size, or "
            "watch it before its first call"
        )
    if seen.unhooked:
        return f"gradients came back through the watched {name}, but to none of the layers that ghosts know"
    if seen.mute:
        return f"no tensor with a gradient was found in the {seen.mute} that the watched {name} returns"
    return f"no gradient came back through what the watched {name} returns"


def who_draws() -> tuple[str | None, bool]:
    """Who asks the sampler for an iterator: a module that is not torch's, and whether batches come in any order."""
    frame = sys._getframe(2)
    module = str(frame.f_globals.get("__name__", ""))
    foreign = None if module.startswith("torch.utils.data") else module
    for _ in range(8):
        iterator = frame.f_locals.get("self")
        if not getattr(iterator, "_in_order", True) and getattr(iterator, "_num_workers", False):
            return foreign, True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return foreign, False


def refuse_sharding(sampler: Sampler[int]) -> None:
    """Raise if the iterator that is asked for will be dealt to several ranks once more, by a framework's own sampler.

    Lightning and Fabric wrap samplers they do not know into a DistributedSampler, Accelerate and the Trainer deal whole
    batches of them. Either way examples would be missing, or learnt on the wrong rank.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(24):
        if frame is None:
            return
        drawer = frame.f_locals.get("self")
        if isinstance(drawer, Sampler) and drawer is not sampler:
            ranks = max(_count(drawer, "num_replicas"), _count(drawer, "num_processes"))
            if ranks > 1:
                name = f"{type(drawer).__module__.partition('.')[0]}'s {type(drawer).__name__}"
                raise InputError(
                    f"{name} deals what this sampler hands out to {ranks} ranks once more, but the sampler deals to "
                    f"ranks itself. {ADAPTERS}"
                )
        frame = frame.f_back


def _count(drawer: object, name: str) -> int:
    found = getattr(drawer, name, 1)
    return found if isinstance(found, int) else 1
