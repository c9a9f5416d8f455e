"""A pipeline in one process: any schedule, played over stages that have only their own layers.

It is mpi_impl/parallel/pipeline.py without the ranks: `ready` holds what one rank would send to another.
"""
from dataclasses import replace
from itertools import chain

import numpy as np

from reference.batches import number_of_tokens
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.models.blocks import sum_of_trees
from reference.models.model import model_backward, model_forward, model_tensors
from reference.models.stage import has_head
from reference.params import Shared, leaves, tree_map, with_names
from reference.schedules.actions import Action, Schedule, needs, result
from reference.schedules.simulate import Times, simulate


def split_into_stages(p, layers_of_stages, c):
    """Split a whole model into stages, as model_tensors declares them: the same arrays, a tied word table twice,
    and a block that all layers share in each.
    """
    whole = dict(leaves(p))
    return [tree_map(lambda named: whole[named.name], with_names(model_tensors(c, layers)))
            for layers in layers_of_stages]


def pipeline_gradients(microbatches, stages, schedule: Schedule, c, dropout=None):
    """Compute the loss over all microbatches (reference/batches.py) and each stage's gradients.

    `dropout` is the Dropout of the first microbatch, or None; the samples of the others follow. Both copies of a tied
    word table get the sum of their gradients: an all-reduce between the first and the last stage. So do the copies of a
    block that all layers share: an all-reduce over the pipeline.
    """
    caches: dict = {}
    ready: dict = {}
    late: dict = {}
    loss, grads = 0.0, [tree_map(np.zeros_like, p) for p in stages]
    weights = [batch.weights_of_heads(c.heads) for batch in microbatches]
    totals = [max(sum(each.sum() for each in of_head), 1) for of_head in zip(*weights)]
    shares = [[each / total for each, total in zip(of_batch, totals)] for of_batch in weights]
    auxiliary = AuxiliaryLosses(sum(len(batch.tokens) for batch in microbatches),
                                sum(map(number_of_tokens, microbatches)))
    for stage, kind, i in in_time(schedule):
        action, p, batch = Action(stage, kind, i), stages[stage], microbatches[i]
        x = ready.pop(needs(action, len(stages)), None)
        if kind == "F":
            first = i * len(batch.tokens)
            context = LayerContext(dropout and replace(dropout, sample=dropout.sample + first), auxiliary=auxiliary)
            y, caches[stage, i] = model_forward(x, p, c, batch, context)
            if has_head(p, c):
                loss += sum((losses * share).sum() for losses, share in zip(y, shares[i]))
            else:
                ready[result(action)] = y
        elif kind == "W":
            grads[stage] = tree_map(np.add, grads[stage], late.pop((stage, i)))
        else:
            dy = shares[i] if has_head(p, c) else x
            ready[result(action)], late[stage, i] = model_backward(dy, p, caches.pop((stage, i)), c)
            if kind == "B":                     # else a separate W adds the gradients
                grads[stage] = tree_map(np.add, grads[stage], late.pop((stage, i)))
    return loss, tie(grads)


def in_time(schedule: Schedule) -> list[Action]:
    """Return the actions of all ranks in an order in which they can happen."""
    spans = chain(*simulate(schedule, Times()).ranks)
    return [span.action for span in sorted(spans, key=lambda span: span.start)]


def tie(grads):
    """Sum the gradients of the copies, of the word table and of a shared block, and give each copy the sum."""
    copies = [p.embedding.word for p in grads if p.embedding.word is not None]
    total = sum(copies[1:], copies[0])
    grads = [p if p.embedding.word is None else replace(p, embedding=replace(p.embedding, word=total)) for p in grads]
    if not isinstance(grads[0].blocks, Shared):
        return grads
    block = sum_of_trees([p.blocks.shared for p in grads])
    return [replace(p, blocks=Shared(p.blocks.layers, block)) for p in grads]
