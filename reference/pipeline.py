"""A pipeline in one process: any schedule, played over stages that know only their own layers.

It is the machine's mpi_impl/parallel/pipeline.py without the ranks: `ready` holds what one rank would send to another.
"""
from dataclasses import replace
from itertools import chain

import numpy as np

from reference.layers.embedding import Embedding
from reference.models.gpt import GPT, gpt_backward, gpt_forward, has_embedding, has_head
from reference.params import tree_map
from reference.schedules import Action, Schedule, needs, result
from reference.simulate import Times, simulate


def cut_into_stages(p, layers_of_stages, c):
    """A whole GPT -> each stage's part. The last stage has a copy of a tied word table, unless it is also the first."""
    stages = []
    for layers in layers_of_stages:
        first, last = 0 in layers, c.num_layers - 1 in layers
        word = p.embedding.word if first or (last and p.output is None) else None
        stages.append(GPT(Embedding(word, p.embedding.position if first else None),
                          {layer: p.blocks[layer] for layer in layers},
                          p.final_layernorm if last else None, p.output if last else None))
    return stages


def pipeline_gradients(microbatches, stages, schedule: Schedule, c):
    """Pairs of tokens and targets [b, s] -> the mean loss over all of them, and each stage's gradients.

    Stages that share the word table have the sum over both copies: an all-reduce between the first and the last.
    """
    caches: dict = {}
    ready: dict = {}
    late: dict = {}
    loss, grads = 0.0, [tree_map(np.zeros_like, p) for p in stages]
    positions = sum(targets.size for _, targets in microbatches)
    for stage, kind, i in in_time(schedule):
        action, p, (tokens, targets) = Action(stage, kind, i), stages[stage], microbatches[i]
        x = ready.pop(needs(action, len(stages)), None)
        if kind == "F":
            y, caches[stage, i] = gpt_forward(tokens if has_embedding(p) else x, p, c, targets)
            if has_head(p, c):
                loss += y.sum() / positions
            else:
                ready[result(action)] = y
        elif kind == "W":
            grads[stage] = tree_map(np.add, grads[stage], late.pop((stage, i)))
        else:
            dy = np.full(targets.shape, 1 / positions) if has_head(p, c) else x
            ready[result(action)], late[stage, i] = gpt_backward(dy, p, caches.pop((stage, i)), c)
            if kind == "B":                     # I leaves the weights' gradients for W
                grads[stage] = tree_map(np.add, grads[stage], late.pop((stage, i)))
    return loss, tie(grads)


def in_time(schedule: Schedule) -> list[Action]:
    """The actions of all ranks in an order in which they can happen."""
    spans = chain(*simulate(schedule, Times()).ranks)
    return [span.action for span in sorted(spans, key=lambda span: span.start)]


def tie(grads):
    """The sum over the copies of the word table, in all of them."""
    copies = [p.embedding.word for p in grads if p.embedding.word is not None]
    total = sum(copies[1:], copies[0])
    return [p if p.embedding.word is None else replace(p, embedding=replace(p.embedding, word=total)) for p in grads]
