"""Asynchronous pipelines, in one process: what happens to training if a pipeline is never flushed.

Every microbatch is a step of its own here. A stage moves its weights as soon as it has a microbatch's backward, while
other microbatches are still on their way (PipeDream: Harlap et al. 2018, 1806.03377). So ranks idle only at the run's
two ends, and the price is paid in weights: when stage i of p begins a forward, the last p - 1 - i microbatches
have not yet moved them. Then there are three ways to choose the weights:

- *newest*: both directions with the weights as they are now. The result is the gradient of no model: the forward's
  activations and the backward's weights do not belong together.
- *stashed*: the backward with the weights of the same microbatch's forward, which the stage has kept. The result is the
  gradient of a model, though of one that never was: each of its stages is of another age. Stage i keeps p - i versions
  of its weights.
- *vertical sync*: in all stages, forward and backward with the weights of the age that the first stage had when the
  microbatch entered. The result is the gradient of a model as it was p - 1 updates ago, and every stage keeps p
  versions. (A stage finds the age in the schedule. PipeDream sends it along.)

With a flush, `pipeline_gradients` of pipeline.py, all stages wait until every microbatch of a step has had its
backward. No gradient is late, training is the same as in one process, and ranks idle at every step. Everything else in
this project does that.
"""
from dataclasses import dataclass
from typing import Any, NamedTuple

from reference.batches import number_of_tokens
from reference.errors import UserError
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.models.model import model_backward, model_forward
from reference.models.stage import has_head
from reference.parallel.pipeline import in_time
from reference.params import tree_map
from reference.schedules.actions import Action, Schedule, needs, result

NEWEST, STASHED, VERTICAL_SYNC = WAYS = ("newest", "stashed", "vertical sync")


class Version(NamedTuple):
    """A stage's weights at some time."""

    updates: int     # how many microbatches have moved them
    params: Any


class Versions:
    """A stage's weights: the newest, and those that a microbatch's forward or backward is still to meet."""

    def __init__(self, params, schedule: Schedule, way: str):
        self.way, self.ages = way, ages_at_entry(schedule)
        self.kept = [Version(0, params)]    # from the oldest that the next forward may meet to the newest
        self.met: dict[int, Version] = {}   # by microbatch, from its forward to its backward
        self.most = 1                       # versions at the same time

    @property
    def newest(self) -> Version:
        return self.kept[-1]

    def of_forward(self, microbatch: int) -> Version:
        """Return the weights of a microbatch's forward."""
        if self.way == VERTICAL_SYNC:
            self.kept = [one for one in self.kept if one.updates >= self.ages[microbatch]]
        self.met[microbatch] = self.kept[0]
        return self.kept[0]

    def of_backward(self, microbatch: int) -> Version:
        """Return the weights of its backward."""
        met = self.met.pop(microbatch)
        if self.way == NEWEST:
            return self.newest
        self.most = max(self.most, len({one.updates for one in (met, *self.kept, *self.met.values())}))
        return met

    def move(self, grads, lr: float) -> None:
        """Make the next version of the newest weights."""
        moved = tree_map(lambda weight, grad: weight - lr * grad, self.newest.params, grads)
        version = Version(self.newest.updates + 1, moved)
        self.kept = [*self.kept, version] if self.way == VERTICAL_SYNC else [version]


def ages_at_entry(schedule: Schedule) -> list[int]:
    """Return for each microbatch how many updates stage 0 has made when its forward begins, [m]."""
    found, updates = [], 0
    for stage, kind, _ in schedule.ranks[0]:
        if stage == 0 and kind == "F":
            found.append(updates)
        updates += stage == 0 and kind == "B"
    return found


@dataclass(frozen=True)
class LateGradient:
    """A microbatch's gradient in one stage, and the weights that its two directions met."""

    forward: Version
    backward: Version
    grads: Any       # of the stage's parameters


def check_copies(c, stages: int) -> None:
    """Raise UserError for a tied word table or a shared block, whose copies would move apart."""
    if (c.tied or c.share_layers) and stages > 1:
        what, advice = (("block that all layers share", "Leave out share_layers") if c.share_layers else
                        ("tied word table", "Give untie_embeddings_and_output_weights"))
        raise UserError(f"Without a flush the stages' copies of a {what} would become different tensors. {advice}.")


def train_without_flush(microbatches, stages, schedule: Schedule, c, lr, way: str):
    """Train by gradient descent at the rate lr, one step for each microbatch, in a schedule that is played once.

    `stages` are as from split_into_stages, and are not changed; `way` is one of WAYS. Returns each microbatch's loss
    [m], the LateGradient of each (stage, microbatch), and the stages' Versions. Raises UserError where copies of a
    tensor would move apart.
    """
    check_copies(c, len(stages))
    versions = [Versions(p, schedule, way) for p in stages]
    losses, late = [0.0] * len(microbatches), {}
    caches: dict = {}
    ready: dict = {}
    for stage, kind, i in in_time(schedule):
        action, batch = Action(stage, kind, i), microbatches[i]
        x, weights = ready.pop(needs(action, len(stages)), None), batch.weights_of_heads(c.heads)
        shares = [each / max(each.sum(), 1) for each in weights]
        if kind == "F":
            context = LayerContext(auxiliary=AuxiliaryLosses(len(batch.tokens), number_of_tokens(batch)))
            met = versions[stage].of_forward(i)
            y, cache = model_forward(x, met.params, c, batch, context)
            caches[stage, i] = met, cache
            if has_head(met.params, c):
                losses[i] = sum((each * share).sum() for each, share in zip(y, shares))
            else:
                ready[result(action)] = y
        else:
            met, cache = caches.pop((stage, i))
            used = versions[stage].of_backward(i)
            dy = shares if has_head(used.params, c) else x
            ready[result(action)], grads = model_backward(dy, used.params, cache, c)
            late[stage, i] = LateGradient(met, used, grads)
            versions[stage].move(grads, lr)
    return losses, late, versions


def late_updates(late, stage: int, microbatch: int) -> int:
    """Return how many earlier microbatches had not yet moved the weights that this one's forward met."""
    return microbatch - late[stage, microbatch].forward.updates
