"""Theorems about experts in the textbook: by definition, sharded, dealt out; each raises AssertionError otherwise."""
from dataclasses import replace

import numpy as np

from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.experts import (dealt_experts_backward, dealt_experts_forward, experts_backward, experts_forward,
                                      experts_tensors, sharded_experts_backward, sharded_experts_forward)
from reference.layers.layer import layer_forward
from reference.params import deal, join_experts, split, tree_map
from tests.cases import Case, close, trees_close
from tests.textbook_theorems import assert_identical, collect, gradients_equal, lengths_of, spread


def context_of(case: Case, samples: int, total: int) -> LayerContext:
    """Return the context of a few samples of a global batch of sequences, with room for other microbatches."""
    lengths = lengths_of(replace(case, b=total))
    tokens = total * case.s if lengths is None else int(lengths.sum())
    return LayerContext(auxiliary=AuxiliaryLosses(2 * total, 3 * tokens, scale=4.0), lengths=lengths)


def experts_are_their_definition(case: Case):
    """Compare with a loop over tokens: sort a token's logits, apply one expert after the other."""
    c, p, x = case.model, case.params(experts_tensors(case.model)), case.x()
    context = context_of(case, case.b, case.b)
    y, cache = experts_forward(x, p, c, context)
    counts = np.zeros(c.experts.num_experts, int)
    for sample, position in np.ndindex(case.b, case.s):
        token = x[sample:sample + 1, position]                                  # [1, h]
        logits = (token @ p.router)[0]                                          # [E]
        ids = sorted(range(len(logits)), key=lambda i: (sum(bool(other > logits[i]) for other in logits), i))
        ids = ids[:c.experts.moe_router_topk]
        exps = np.exp(logits - logits[ids[0]])
        total = exps.sum() if c.experts.moe_router_pre_softmax else sum(exps[i] for i in ids)
        expected = sum(exps[i] / total * layer_forward(token, tree_map(lambda w, i=i: w[i], p.experts), c)[0]
                       for i in ids)
        if p.shared is not None:
            expected = expected + layer_forward(token, p.shared, c)[0]
        close(y[sample, position], expected[0])
        counts[ids] += 1
    assert (cache.order.counts == counts).all()
    if not case.exact:      # the shares of choices are floats, and rounded
        close(context.auxiliary.total, losses_by_definition(x, p, c.experts, context))


def losses_by_definition(x, p, c, context):
    """Compute both losses sample by sample, in loops over tokens."""
    balance = z = 0
    for i, sample in enumerate(x):
        logits = sample[:len(sample) if context.lengths is None else context.lengths[i]] @ p.router          # [s, E]
        exps = np.exp(logits - logits.max(-1, keepdims=True))
        probs, chosen = exps / exps.sum(-1, keepdims=True), np.zeros(c.num_experts)
        for token in logits:
            order = sorted(range(len(token)), key=lambda i, token=token: (sum(bool(x > token[i]) for x in token), i))
            chosen[order[:c.moe_router_topk]] += 1
        balance = balance + c.num_experts * (chosen / chosen.sum() * probs.mean(0)).sum()
        z = z + ((np.log(exps.sum(-1)) + logits.max(-1))**2).sum()
    return np.stack([balance / context.auxiliary.sequences, z / context.auxiliary.tokens])


def experts_equal_whole(case: Case):
    """Check experts of which each is sharded over t ranks: output, losses and all gradients."""
    c, tensors = case.model, experts_tensors(case.model)
    p, x, dy = case.params(tensors), case.x(), case.x("dy")
    whole, sharded = (context_of(case, case.b, case.b) for _ in range(2))
    y, cache = experts_forward(x, p, c, whole)
    dx, grads = experts_backward(dy, p, cache, c)

    shards = split(p, tensors, case.t)
    ys, caches = sharded_experts_forward(spread(x, case), shards, c, case.region, sharded)
    dxs, shard_grads = sharded_experts_backward(spread(dy, case), shards, caches, c, case.region)
    close(collect(ys, case), y)
    close(sharded.auxiliary.total, whole.auxiliary.total)
    close(collect(dxs, case), dx)
    gradients_equal(shard_grads, grads, tensors, case)


def dealt_experts_equal_whole(case: Case, e: int):
    """Check experts that are dealt out to e ranks, each with samples of its own, of any lengths."""
    c, tensors = case.model, experts_tensors(case.model)
    p, (x, dy) = case.params(tensors), (case.array(name, e * case.b, case.s, c.hidden_size) for name in ("x", "dy"))
    whole = context_of(case, e * case.b, e * case.b)
    y, cache = experts_forward(x, p, c, whole)
    dx, grads = experts_backward(dy, p, cache, c)

    lengths = [None] * e if whole.lengths is None else np.split(whole.lengths, e)
    contexts = [LayerContext(auxiliary=replace(whole.auxiliary, found={}), lengths=each) for each in lengths]
    shards = deal(p, tensors, e)
    ys, caches = dealt_experts_forward(np.split(x, e), shards, c, contexts)
    dxs, dealt_grads = dealt_experts_backward(np.split(dy, e), shards, caches, c)
    close(np.concatenate(ys), y)
    close(sum(context.auxiliary.total for context in contexts), whole.auxiliary.total)
    close(np.concatenate(dxs), dx)
    trees_close(join_experts(dealt_grads, tensors), grads)
    assert_identical([grad.router for grad in dealt_grads])
