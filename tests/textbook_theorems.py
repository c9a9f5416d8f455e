"""Sharded = unsharded in the textbook, a function for each layer. They raise AssertionError where it is not so."""
from dataclasses import replace

import numpy as np

from reference.config import Recompute
from reference.data_parallel import data_parallel_gradients
from reference.layers.attention import (attention_backward, attention_forward, attention_tensors,
                                        sharded_attention_backward, sharded_attention_forward)
from reference.layers.block import (block_backward, block_forward, block_tensors, sharded_block_backward,
                                    sharded_block_forward)
from reference.layers.cross_entropy import (cross_entropy_backward, cross_entropy_forward, gathered_cross_entropy,
                                            sharded_cross_entropy_backward, sharded_cross_entropy_forward,
                                            unsafe_cross_entropy)
from reference.layers.embedding import (embedding_backward, embedding_forward, embedding_tensors, logits_backward,
                                        logits_forward, sharded_embedding_backward, sharded_embedding_forward,
                                        sharded_logits_backward, sharded_logits_forward, word_tensor)
from reference.layers.linear import (column_parallel_tensors, linear_backward, linear_forward, row_parallel_tensors,
                                     sharded_column_parallel_backward, sharded_column_parallel_forward,
                                     sharded_row_parallel_backward, sharded_row_parallel_forward)
from reference.layers.mlp import mlp_backward, mlp_forward, mlp_tensors, sharded_mlp_backward, sharded_mlp_forward
from reference.models.gpt import (KEEP_ALL, gpt_backward, gpt_forward, gpt_tensors, sharded_gpt_backward,
                                  sharded_gpt_forward)
from reference.ops import rotary_cos_sin
from reference.params import join, split, tree_map
from reference.training import loss_and_gradients
from tests.cases import Case, close, trees_close


def column_parallel_equals_whole(case: Case, gather_output: bool, tolerance=1e-11):
    """Y = X A + b by columns: the ranks' outputs side by side are the whole output."""
    h, m = case.model.hidden_size, 3 * case.t
    tensors = column_parallel_tensors(h, m, std=1.0)
    p, x, dy = case.params(tensors), case.x(), case.array("dy", case.b, case.s, m)
    y, cache = linear_forward(x, p)
    dx, grads = linear_backward(dy, p, cache)

    shards = split(p, tensors, case.t)
    ys, cache = sharded_column_parallel_forward(spread(x, case), shards, gather_output, case.region)
    dxs, shard_grads = sharded_column_parallel_backward(
        [dy] * case.t if gather_output else np.split(dy, case.t, -1), shards, cache, gather_output, case.region)
    for one in ys if gather_output else [np.concatenate(ys, -1)]:
        close(one, y, tolerance)
    close(collect(dxs, case), dx, tolerance)
    trees_close(join(shard_grads, tensors), grads, tolerance)


def row_parallel_equals_whole(case: Case, tolerance=1e-11):
    """Y = X A + b by rows: the ranks' partial sums add up, and the bias is added once."""
    n, h = 3 * case.t, case.model.hidden_size
    tensors = row_parallel_tensors(n, h, std=1.0)
    p, x, dy = case.params(tensors), case.array("x", case.b, case.s, n), case.x("dy")
    y, cache = linear_forward(x, p)
    dx, grads = linear_backward(dy, p, cache)

    shards = split(p, tensors, case.t)
    ys, cache = sharded_row_parallel_forward(np.split(x, case.t, -1), shards, case.region)
    dxs, shard_grads = sharded_row_parallel_backward(spread(dy, case), shards, cache, case.region)
    close(collect(ys, case), y, tolerance)
    close(np.concatenate(dxs, -1), dx, tolerance)
    gradients_equal(shard_grads, grads, tensors, case, tolerance)


def mlp_equals_whole(case: Case, tolerance=1e-11):
    """The MLP by columns, then rows."""
    c, tensors = case.model, mlp_tensors(case.model)
    p, x, dy = case.params(tensors), case.x(), case.x("dy")
    y, cache = mlp_forward(x, p, c.activation)
    dx, grads = mlp_backward(dy, p, cache, c.activation)

    shards = split(p, tensors, case.t)
    ys, caches = sharded_mlp_forward(spread(x, case), shards, c.activation, case.region)
    dxs, shard_grads = sharded_mlp_backward(spread(dy, case), shards, caches, c.activation, case.region)
    close(collect(ys, case), y, tolerance)
    close(collect(dxs, case), dx, tolerance)
    gradients_equal(shard_grads, grads, tensors, case, tolerance)


def attention_equals_whole(case: Case, causal: bool = True, selective: bool = False, tolerance=1e-11):
    """Self-attention by heads, the core's cache kept or computed again."""
    tensors = attention_tensors(case.model)
    p, x, dy, rotary = case.params(tensors), case.x(), case.x("dy"), rotary_of(case)
    y, cache = attention_forward(x, p, causal, rotary, case.dropout)
    dx, grads = attention_backward(dy, p, cache)

    shards = split(p, tensors, case.t)
    ys, caches = sharded_attention_forward(spread(x, case), shards, causal, rotary, case.region, case.dropout,
                                           selective)
    dxs, shard_grads = sharded_attention_backward(spread(dy, case), shards, caches, case.region)
    close(collect(ys, case), y, tolerance)
    close(collect(dxs, case), dx, tolerance)
    gradients_equal(shard_grads, grads, tensors, case, tolerance)


def block_equals_whole(case: Case, selective: bool = False):
    """A transformer block: two regions in a row, and what stands between them."""
    c, tensors = case.model, block_tensors(case.model)
    p, x, dy, rotary = case.params(tensors), case.x(), case.x("dy"), rotary_of(case)
    y, cache = block_forward(x, p, c, rotary, case.dropout)
    dx, grads = block_backward(dy, p, cache, c)

    shards = split(p, tensors, case.t)
    ys, cache = sharded_block_forward(spread(x, case), shards, c, rotary, case.region, case.dropout, selective)
    dxs, shard_grads = sharded_block_backward(spread(dy, case), shards, cache, c, case.region)
    close(collect(ys, case), y)
    close(collect(dxs, case), dx)
    gradients_equal(shard_grads, grads, tensors, case)


def embedding_equals_whole(case: Case, tolerance=1e-11):
    """The embedding by vocabulary: every word is looked up by exactly one rank."""
    tensors = embedding_tensors(case.model)
    p, tokens, dx = case.params(tensors), case.ids("tokens", case.b, case.s), case.x("dx")
    x, cache = embedding_forward(tokens, p, case.dropout)
    grads = embedding_backward(dx, p, cache)

    shards = split(p, tensors, case.t)
    xs, caches = sharded_embedding_forward(tokens, shards, case.region, case.dropout)
    shard_grads = sharded_embedding_backward(spread(dx, case), shards, caches, case.region)
    close(collect(xs, case), x, tolerance)
    gradients_equal(shard_grads, grads, tensors, case, tolerance)


def logits_equal_whole(case: Case, tolerance=1e-11):
    """The logits by vocabulary: side by side they are the whole, and padding is minus infinity."""
    c, tensor = case.model, word_tensor(case.model)
    (word,), x = case.params({"word": tensor}).values(), case.x()
    dlogits = case.array("dlogits", case.b, case.s, c.vocab_size)
    logits, cache = logits_forward(x, word, c.vocab_size)
    dx, dword = logits_backward(dlogits, word, cache)

    words = split(word, tensor, case.t)
    parts, cache = sharded_logits_forward(spread(x, case), words, c.vocab_size, case.region)
    padding = np.zeros((case.b, case.s, tensor.padded(case.t) - c.vocab_size))
    dparts = np.split(np.concatenate([dlogits, padding], -1), case.t, -1)
    dxs, dwords = sharded_logits_backward(dparts, words, cache, case.region)
    sharded = np.concatenate(parts, -1)
    close(sharded[..., :c.vocab_size], logits, tolerance)
    assert (sharded[..., c.vocab_size:] == -np.inf).all(), "a padded word has a chance"
    close(collect(dxs, case), dx, tolerance)
    close(join(dwords, tensor), dword, tolerance)


def losses_agree(case: Case, scale: float = 1.0):
    """The loss from split logits, three ways, and its gradient."""
    logits = scale * case.array("logits", case.b, case.s, 3 * case.t)
    targets = case.ids("targets", case.b, case.s) % logits.shape[-1]
    dloss, parts = case.array("dloss", case.b, case.s), np.split(logits, case.t, -1)
    loss, cache = cross_entropy_forward(logits, targets)
    dlogits = cross_entropy_backward(dloss, cache)

    sharded, caches = sharded_cross_entropy_forward(parts, targets)
    close(sharded, loss)
    close(np.concatenate(sharded_cross_entropy_backward(dloss, caches), -1), dlogits)
    close(gathered_cross_entropy(parts, targets), loss)
    if scale <= 1:
        close(unsafe_cross_entropy(parts, targets), loss.sum())


def gpt_equals_whole(case: Case, recompute: Recompute = KEEP_ALL):
    """The whole model: loss and every gradient; padding gets none."""
    c, tensors = case.model, gpt_tensors(case.model)
    p, tokens, targets = case.params(tensors), case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s)
    dloss = case.array("dloss", case.b, case.s)
    loss, cache = gpt_forward(tokens, p, c, targets, case.dropout)
    _, grads = gpt_backward(dloss, p, cache, c)

    shards = split(p, tensors, case.t)
    loss_sharded, cache = sharded_gpt_forward(tokens, shards, c, targets, case.region, case.dropout, recompute)
    shard_grads = sharded_gpt_backward(dloss, shards, cache, c, case.region)
    close(loss_sharded, loss)
    trees_close(join(shard_grads, tensors), grads, 1e-10)
    padding_gets_nothing(shard_grads, tensors, case.t)


def recompute_changes_nothing(case: Case, recompute: Recompute):
    """In one process: loss and gradients to the last bit, dropout on."""
    c, p = case.model, case.params(gpt_tensors(case.model))
    tokens, targets, dloss = (case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s),
                              case.array("dloss", case.b, case.s))
    loss, cache = gpt_forward(tokens, p, c, targets, case.dropout)
    again, light = gpt_forward(tokens, p, c, targets, case.dropout, recompute)
    assert (again == loss).all()
    trees_close(gpt_backward(dloss, p, light, c)[1], gpt_backward(dloss, p, cache, c)[1], 0.0)


def replicas_equal_one_process(case: Case, d: int, m: int):
    """d replicas with m microbatches each: the loss and the gradients of the whole batch."""
    p, batch = case.params(gpt_tensors(case.model)), d * m * case.b
    tokens, targets = case.ids("tokens", batch, case.s), case.ids("targets", batch, case.s)
    dropout = replace(case.dropout, sample=0)
    loss, grads = loss_and_gradients(tokens, targets, p, case.model, dropout)
    found, replicas = data_parallel_gradients(tokens, targets, p, case.model, d, case.b, dropout)
    close(np.array(found), np.array(loss))
    assert len(replicas) == d
    for replica in replicas:
        trees_close(replica, grads)


def spread(x, case: Case):
    """x [b, s, h] as t ranks hold it outside the regions."""
    return np.split(x, case.t, 1) if case.sequence_parallel else [x] * case.t


def collect(xs, case: Case):
    """The inverse: the whole, of which replicated parts are alike."""
    if case.sequence_parallel:
        return np.concatenate(xs, 1)
    alike_on_all(xs)
    return xs[0]


def gradients_equal(shard_grads, grads, tensors, case: Case, tolerance=1e-11):
    """Joined, the ranks' gradients are the whole ones, once those of replicated tensors are complete."""
    complete = case.region.complete(shard_grads, tensors)
    trees_close(join(complete, tensors), grads, tolerance)
    for mine in complete:
        tree_map(lambda tensor, first, other: tensor.split is not None or alike_on_all([first, other]),
                 tensors, complete[0], mine)


def padding_gets_nothing(shard_grads, tensors, t):
    """Whatever `join` drops from the ranks' gradients is zero: splitting the whole gives them back."""
    for again, grads in zip(split(join(shard_grads, tensors), tensors, t), shard_grads, strict=True):
        trees_close(tree_map(np.asarray, grads), again, 0.0)


def alike_on_all(arrays):
    for array in arrays:
        assert (array == arrays[0]).all(), "a replicated tensor's gradient differs between ranks"


def rotary_of(case: Case):
    """rope's angles where the case's model has rope."""
    c = case.model
    return rotary_cos_sin(case.s, c.rotary_size, np.empty(0)) if c.position_embedding_type == "rope" else None
