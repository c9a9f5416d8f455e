"""Asynchronous pipelines, in one process: what happens to training if a pipeline is never flushed.

Every microbatch is a step of its own here. A stage moves its weights as soon as it has a microbatch's backward, while
other microbatches are still on their way (PipeDream: Harlap et al. 2018, 1806.03377). So ranks idle only at the run's
two ends, and the price is paid in weights: when stage i of p begins a forward, the last p - 1 - i microbatches
have not yet moved them. Then there are two ways to do the backward:

- *stashed*: with the weights of the same microbatch's forward, which the stage has kept. The result is the gradient of
  a model, though of one that never was: each of its stages is of another age. Stage i keeps p - i versions of its
  weights.
- *newest*: with the weights as they are now. The result is the gradient of no model: the forward's activations and the
  backward's weights do not belong together.

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


class Version(NamedTuple):
    """A stage's weights at some time."""

    updates: int     # how many microbatches have moved them
    params: Any


@dataclass(frozen=True)
class LateGradient:
    """A microbatch's gradient in one stage, and the weights that its two directions met."""

    forward: Version
    backward: Version
    grads: Any       # of the stage's parameters


def train_without_flush(microbatches, stages, schedule: Schedule, c, lr, stash: bool):
    """Train by gradient descent at the rate lr, one step for each microbatch, in a schedule that is played once.

    `stages` are as from split_into_stages, and are not changed. Returns each microbatch's loss [m], the LateGradient of
    each (stage, microbatch), and the stages' last parameters. Raises UserError for a tied word table or a
    shared block, whose copies would move apart.
    """
    if (c.tied or c.share_layers) and len(stages) > 1:
        what, advice = (("block that all layers share", "Leave out share_layers") if c.share_layers else
                        ("tied word table", "Give untie_embeddings_and_output_weights"))
        raise UserError(f"Without a flush the stages' copies of a {what} would become different tensors. {advice}.")
    now = [Version(0, p) for p in stages]
    losses, late = [0.0] * len(microbatches), {}
    caches: dict = {}
    ready: dict = {}
    for stage, kind, i in in_time(schedule):
        action, batch = Action(stage, kind, i), microbatches[i]
        x, weights = ready.pop(needs(action, len(stages)), None), batch.weights_of_heads(c.heads)
        shares = [each / max(each.sum(), 1) for each in weights]
        if kind == "F":
            context = LayerContext(auxiliary=AuxiliaryLosses(len(batch.tokens), number_of_tokens(batch)))
            y, cache = model_forward(x, now[stage].params, c, batch, context)
            caches[stage, i] = now[stage], cache
            if has_head(now[stage].params, c):
                losses[i] = sum((each * share).sum() for each, share in zip(y, shares))
            else:
                ready[result(action)] = y
        else:
            met, cache = caches.pop((stage, i))
            used = met if stash else now[stage]
            dy = shares if has_head(used.params, c) else x
            ready[result(action)], grads = model_backward(dy, used.params, cache, c)
            late[stage, i] = LateGradient(met, used, grads)
            moved = tree_map(lambda weight, grad: weight - lr * grad, now[stage].params, grads)
            now[stage] = Version(now[stage].updates + 1, moved)
    return losses, late, [version.params for version in now]


def late_updates(late, stage: int, microbatch: int) -> int:
    """Return how many earlier microbatches had not yet moved the weights that this one's forward met."""
    return microbatch - late[stage, microbatch].forward.updates


def versions_kept(schedule: Schedule) -> list[int]:
    """Return how many versions of its weights each stage must keep at most, the newest among them, to stash them.

    A microbatch needs its own from its forward to its backward. In 1F1B an update comes between any two forwards but
    the first ones, so those share a version, and later ones have each their own.
    """
    most, updates = [0] * schedule.stages, [0] * schedule.stages
    kept: list[dict[int, int]] = [{} for _ in most]             # by microbatch: the version that its forward met
    for stage, kind, i in in_time(schedule):
        if kind == "F":
            kept[stage][i] = updates[stage]
        else:
            most[stage] = max(most[stage], len({*kept[stage].values(), updates[stage]}))
            del kept[stage][i]
            updates[stage] += 1
    return most
