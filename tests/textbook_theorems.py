"""Sharded = unsharded in the textbook, a function for each layer, which raises AssertionError otherwise."""
from dataclasses import replace

import numpy as np

from reference.batches import GPTBatch
from reference.config import Recompute
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.block import (block_backward, block_forward, block_tensors, sharded_block_backward,
                                    sharded_block_forward)
from reference.layers.cross_entropy import (cross_entropy_backward, cross_entropy_forward, gathered_cross_entropy,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward,
                                            unsafe_cross_entropy)
from reference.layers.embedding import (embedding_backward, embedding_forward, embedding_tensors,
                                        sharded_embedding_backward, sharded_embedding_forward)
from reference.layers.layer import declare, layer_backward, layer_forward, sharded_layer_backward, sharded_layer_forward
from reference.layers.linear import (column_parallel_tensors, linear_backward, linear_forward, row_parallel_tensors,
                                     sharded_column_parallel_backward, sharded_column_parallel_forward,
                                     sharded_row_parallel_backward, sharded_row_parallel_forward)
from reference.layers.router import Routing
from reference.models.bert import sharded_bert_backward, sharded_bert_forward
from reference.models.gpt import gpt_tensors, sharded_gpt_backward, sharded_gpt_forward
from reference.models.model import model_backward, model_forward, model_tensors
from reference.models.stage import stage_rotary
from reference.parallel.data_parallel import data_parallel_gradients
from reference.params import join, leaves, split, tree_map
from reference.training.trainer import loss_and_gradients
from tests.cases import KEEP_ALL, Case, close, trees_close


def column_parallel_equals_whole(case: Case, gather_output: bool):
    """Check Y = X A + b by columns: the ranks' outputs side by side are the whole output."""
    h, m = case.model.hidden_size, 3 * case.t
    tensors = column_parallel_tensors(h, m, std=1.0)
    p, x, dy, y, dx, grads = whole_linear(case, tensors, case.x(), case.array("dy", case.b, case.s, m))
    shards = split(p, tensors, case.t)
    ys, cache = sharded_column_parallel_forward(spread(x, case), shards, gather_output, case.region)
    dxs, shard_grads = sharded_column_parallel_backward(
        [dy] * case.t if gather_output else np.split(dy, case.t, -1), shards, cache, gather_output, case.region)
    for one in ys if gather_output else [np.concatenate(ys, -1)]:
        close(one, y)
    close(collect(dxs, case), dx)
    trees_close(join(shard_grads, tensors), grads)


def row_parallel_equals_whole(case: Case):
    """Check Y = X A + b by rows: the ranks' partial sums add up, and the bias is added once."""
    n, h = 3 * case.t, case.model.hidden_size
    tensors = row_parallel_tensors(n, h, std=1.0)
    p, x, dy, y, dx, grads = whole_linear(case, tensors, case.array("x", case.b, case.s, n), case.x("dy"))
    shards = split(p, tensors, case.t)
    ys, cache = sharded_row_parallel_forward(np.split(x, case.t, -1), shards, case.region)
    dxs, shard_grads = sharded_row_parallel_backward(spread(dy, case), shards, cache, case.region)
    close(collect(ys, case), y)
    close(np.concatenate(dxs, -1), dx)
    gradients_equal(shard_grads, grads, tensors, case)


def whole_linear(case: Case, tensors, x, dy):
    """Return the parameters, x, dy, y, dx and the gradients of an unsharded linear layer."""
    p = case.params(tensors)
    y, cache = linear_forward(x, p)
    return p, x, dy, y, *linear_backward(dy, p, cache)


LAYER = layer_forward, layer_backward, sharded_layer_forward, sharded_layer_backward
BLOCK = block_forward, block_backward, sharded_block_forward, sharded_block_backward


def layer_equals_whole(case: Case, c, tensors, functions, recompute: Recompute = KEEP_ALL):
    """Check a layer's output and gradients; what is recomputed in the sharded one is kept in the whole one."""
    p, context = case.params(tensors), context_of(case)
    x, dy, y, dx, grads = whole_layer(case, c, p, *functions[:2])

    forward, backward, shards = *functions[2:], split(p, tensors, case.t)
    ys, caches = forward(spread(x, case), shards, c, case.region, context._replace(recompute=recompute))
    dxs, shard_grads = backward(spread(dy, case), shards, caches, c, case.region)
    close(collect(ys, case), y)
    close(collect(dxs, case), dx)
    gradients_equal(shard_grads, grads, tensors, case)


def whole_layer(case: Case, c, p, forward, backward):
    """Return x, dy, y, dx and the gradients of an unsharded layer."""
    x, dy = case.x(), case.x("dy")
    y, cache = forward(x, p, c, context_of(case))
    return x, dy, y, *backward(dy, p, cache, c)


def context_of(case: Case) -> LayerContext:
    """Return the context of one of the case's layers."""
    return LayerContext(case.dropout, rotary=rotary_of(case), lengths=lengths_of(case))


def mlp_equals_whole(case: Case):
    """Check the MLP by columns, then rows; with a gate, or without."""
    layer_equals_whole(case, case.model, declare("mlp", case.model), LAYER)


def attention_equals_whole(case: Case, causal: bool = True, recompute: Recompute = KEEP_ALL):
    """Check that attention sharded by heads equals the whole one, with the core's cache kept or recomputed."""
    layer_equals_whole(case, with_mask(case.model, causal), declare("attention", case.model), LAYER, recompute)


def block_equals_whole(case: Case, recompute: Recompute = KEEP_ALL):
    """Check a transformer block: two regions in a row, and the norms and residual sums between them."""
    layer_equals_whole(case, case.model, block_tensors(case.model), BLOCK, recompute)


def with_mask(c, causal: bool):
    """Return a config like c whose attention is causal, or is not."""
    return c if c.causal == causal else replace(c, architecture="gpt" if causal else "bert", heads=("lm",),
                                                untie_embeddings_and_output_weights=False)


def embedding_equals_whole(case: Case):
    """Check the embedding by vocabulary: exactly one rank looks up each token."""
    tensors = embedding_tensors(case.model)
    p, tokens, dx = case.params(tensors), case.ids("tokens", case.b, case.s), case.x("dx")
    token_types = token_types_of(case)
    x, cache = embedding_forward(tokens, p, LayerContext(case.dropout), token_types)
    grads = embedding_backward(dx, p, cache)

    shards = split(p, tensors, case.t)
    xs, caches = sharded_embedding_forward(tokens, shards, case.region, LayerContext(case.dropout), token_types)
    shard_grads = sharded_embedding_backward(spread(dx, case), shards, caches, case.region)
    close(collect(xs, case), x)
    gradients_equal(shard_grads, grads, tensors, case)


def losses_agree(case: Case, scale: float = 1.0):
    """Check the loss from sharded logits, three ways, and its gradient."""
    logits = scale * case.array("logits", case.b, case.s, 3 * case.t)
    targets = case.ids("targets", case.b, case.s) % logits.shape[-1]
    dloss, parts = case.array("dloss", case.b, case.s), np.split(logits, case.t, -1)
    loss, cache = cross_entropy_forward(logits, targets)
    dlogits = cross_entropy_backward(dloss, cache)

    sharded, caches = sharded_cross_entropy_forward(parts, targets)
    close(sharded, loss)
    close(np.concatenate(sharded_cross_entropy_backward(dloss, caches), -1), dlogits)
    close(gathered_cross_entropy(parts, targets), loss)
    if scale <= 1 and not case.exact:     # it takes log(exp(m) x) for m + log(x), a law of floats' functions alone
        close(unsafe_cross_entropy(parts, targets), loss.sum())


def model_equals_whole(case: Case, recompute: Recompute = KEEP_ALL):
    """Check the whole model: the losses of all its heads, and every gradient; padding gets none."""
    c, tensors = case.model, model_tensors(case.model)
    p, batch, losses, dlosses, grads = whole_model(case)
    shards = split(p, tensors, case.t)
    found, cache = sharded_model_forward(batch, shards, c, case.region, LayerContext(case.dropout, recompute))
    shard_grads = sharded_model_backward(dlosses, shards, cache, c, case.region)
    for one, loss in zip(found, losses, strict=True):
        close(one, loss)
    trees_close(join(shard_grads, tensors), grads, 1e-10)
    shards_are_of_one_whole(shard_grads, tensors, case.t)


def whole_model(case: Case):
    """Return parameters, a batch, the losses of a model's heads, their upstream gradients, and all gradients."""
    c, p, batch = case.model, case.params(model_tensors(case.model)), case.batch("", case.b)
    losses, cache = model_forward(None, p, c, batch, LayerContext(case.dropout))
    dlosses = upstream(case, losses)
    return p, batch, losses, dlosses, model_backward(dlosses, p, cache, c)[1]


def sharded_model_forward(batch, shards, c, region, context):
    """Return the losses of either model's heads, and the cache."""
    if c.architecture == "bert":
        return sharded_bert_forward(batch, shards, c, region, context)
    loss, cache = sharded_gpt_forward(batch.tokens, shards, c, batch.targets, region, context)
    return (loss,), cache


def sharded_model_backward(dlosses, shards, cache, c, region):
    """Return each rank's gradients of either model."""
    if c.architecture == "bert":
        return sharded_bert_backward(dlosses, shards, cache, c, region)
    return sharded_gpt_backward(*dlosses, shards, cache, c, region)


def pick(tensors, values):
    """Return the tree of `tensors`, with values by name."""
    named = iter(name for name, _ in leaves(tensors))
    return tree_map(lambda _: values[next(named)], tensors)


def shared_equals_unshared(case: Case, recompute: Recompute = KEEP_ALL):
    """Compare layers that share their parameters with layers that have equal ones, which differ only in their name."""
    c, batch = case.model, case.batch("", case.b)
    shared, unshared = model_tensors(c), model_tensors(unshared_c := replace(c, share_layers=False))
    p = case.params(shared)
    copies = replace(p, blocks={layer: tree_map(np.copy, p.blocks.shared) for layer in range(c.num_layers)})
    assert len(list(leaves(shared.blocks))) * c.num_layers == len(list(leaves(unshared.blocks)))
    losses, cache = model_forward(None, p, c, batch, LayerContext(case.dropout, recompute))
    expected, expected_cache = model_forward(None, copies, unshared_c, batch, LayerContext(case.dropout, recompute))
    for loss, other in zip(losses, expected, strict=True):
        close(loss, other)
    _, grads = model_backward(upstream(case, losses), p, cache, c)
    _, of_layers = model_backward(upstream(case, losses), copies, expected_cache, unshared_c)
    blocks = replace(p.blocks, shared=tree_map(lambda *each: sum(each), *of_layers.blocks.values()))
    trees_close(grads, replace(of_layers, blocks=blocks))


def gradients_are_derivatives(case: Case):
    """Compare the gradient of a random sum of all losses, with dropout, with central differences.

    For every tensor: in one element at a random place, and in one direction through all of its elements, unless a
    router's choice changes on the way.
    """
    # ReLU's corner would be hit now and then, and the norm of two nearly equal numbers bends within a step.
    c = replace(case.model, activation="gelu", layernorm_epsilon=0.1)
    p, batch, rng = case.params(model_tensors(c)), case.batch("", case.b), np.random.default_rng(case.seed)
    context = LayerContext(case.dropout, auxiliary=AuxiliaryLosses(2, 3))
    losses, cache = model_forward(None, p, c, batch, context)
    dlosses, step = upstream(case, losses), 1e-5
    _, grads = model_backward(dlosses, p, cache, c)

    def loss_beside(x, direction):
        saved = x.copy()
        x += direction
        losses, beside = model_forward(None, p, c, batch, context)
        x[...] = saved
        loss = sum((loss * dloss).sum() for loss, dloss in zip(losses, dlosses)) + auxiliary_loss(context, c)
        return loss, chosen_experts(beside) == chosen_experts(cache)

    for (name, x), (_, grad) in zip(leaves(p), leaves(grads), strict=True):
        for direction in (rng.normal(size=x.shape), one_place(rng, x.shape)):
            (after, smooth), (before, smooth_too) = (loss_beside(x, sign * step * direction) for sign in (1, -1))
            numeric, exact = (after - before) / (2 * step), (grad * direction).sum()
            near = abs(numeric - exact) < 1e-5 * max(1, abs(exact))
            assert near or not smooth or not smooth_too, f"{name}: {exact}, but measured {numeric}"


def chosen_experts(cache) -> list:
    """Return the choices of all routers in a cache."""
    if isinstance(cache, Routing):
        return cache.ids.tolist()
    below = cache.values() if isinstance(cache, dict) else cache if isinstance(cache, (list, tuple)) else ()
    return [choice for one in below for choice in chosen_experts(one)]


def auxiliary_loss(context, c):
    """Return the losses of experts, times their coefficients: 0 without experts."""
    if c.experts is None:
        return 0
    return np.dot(context.auxiliary.total, [c.experts.moe_aux_loss_coeff, c.experts.moe_z_loss_coeff])


def one_place(rng, shape):
    """Return zeros, with a one at a random place."""
    direction = np.zeros(shape)
    direction[tuple(rng.integers(0, n) for n in shape)] = 1
    return direction


def replicas_equal_one_process(case: Case, d: int, m: int):
    """Check that d replicas with m microbatches each get the loss and the gradients of the whole batch."""
    p, batch = case.params(gpt_tensors(case.model)), d * m * case.b
    tokens, targets = case.ids("tokens", batch, case.s), case.ids("targets", batch, case.s)
    dropout = replace(case.dropout, sample=0)
    loss, grads = loss_and_gradients(GPTBatch(tokens, targets), p, case.model, dropout)
    found, replicas = data_parallel_gradients(tokens, targets, p, case.model, d, case.b, dropout)
    close(np.stack([found]), np.stack([loss]))
    assert len(replicas) == d
    for replica in replicas:
        trees_close(replica, grads)


def spread(x, case: Case):
    """Return x [b, s, h] as t ranks hold it outside the regions."""
    return np.split(x, case.t, 1) if case.sequence_parallel else [x] * case.t


def collect(xs, case: Case):
    """Invert `spread`; assert that replicated arrays are identical."""
    if case.sequence_parallel:
        return np.concatenate(xs, 1)
    assert_identical(xs)
    return xs[0]


def gradients_equal(shard_grads, grads, tensors, case: Case):
    """Assert that the ranks' gradients join to the whole ones, once those of replicated tensors are complete."""
    complete = case.region.complete(shard_grads, tensors)
    trees_close(join(complete, tensors), grads)
    shards_are_of_one_whole(complete, tensors, case.t)


def shards_are_of_one_whole(shards, tensors, t):
    """Assert that splitting the whole gives the ranks' shards back: copies are identical, and padding gets nothing."""
    for again, shard in zip(split(join(shards, tensors), tensors, t), shards, strict=True):
        trees_close(shard, again, 0.0)


def assert_identical(arrays):
    for array in arrays:
        assert (array == arrays[0]).all(), "a replicated tensor's gradient differs between ranks"


def upstream(case: Case, losses):
    """Draw a random gradient for each head's losses."""
    return tuple(case.array(f"dloss {i}", *loss.shape) for i, loss in enumerate(losses))


def lengths_of(case: Case):
    """Return the samples' lengths, int64 [b], or None for a GPT, which has no padding."""
    return None if case.model.architecture == "gpt" else case.batch("", case.b).lengths[:case.b]


def token_types_of(case: Case):
    """Return token types, int64 [b, s], or None for a GPT."""
    return None if case.model.architecture == "gpt" else case.batch("", case.b).token_types[:case.b]


def rotary_of(case: Case):
    """Return rope's cos and sin, or None where positions are learned."""
    c = case.model
    return stage_rotary(np.empty(0), c, [slice(0, case.s)])
