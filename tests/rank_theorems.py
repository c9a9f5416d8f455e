"""Sharded = unsharded on real ranks, a function for each layer: every rank of a group of t ranks runs it.

Rank 0 computes the whole layer with the textbook for all ranks: on few cores that is faster than on each rank. Each
rank computes its own shard with the machine, and compares. With `wrap` the machine's arrays are of another library.
"""
import traceback

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.regions import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.layers import block, cross_entropy, embedding, heads, layer, linear
from mpi_impl.models import model
from mpi_impl.models.units import Unit
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import Recompute
from reference.layer_context import LayerContext
from reference.layers import (block as textbook_block, cross_entropy as textbook_cross_entropy,
                              embedding as textbook_embedding, heads as textbook_heads, layer as textbook_layer,
                              linear as textbook_linear)
from reference.models.model import model_tensors
from reference.parallel.layout import Layout, map_units
from reference.params import join, split, tree_map
from reference.positions import SomePositions
from tests.cases import KEEP_ALL, Case, close, trees_close
from tests.textbook_theorems import (lengths_of, rotary_of, spread, token_types_of, whole_layer, whole_linear,
                                     whole_model, with_mask)


def as_is(x):
    return x


def host(x):
    """Copy a device array to the host; return a host array as it is."""
    return x if isinstance(x, np.ndarray) else x.get()


def wrapped(x, wrap):
    """Wrap x, unless it is None."""
    return None if x is None else wrap(x)


def context_of(case: Case, recompute: Recompute = KEEP_ALL, wrap=as_is) -> LayerContext:
    """Return a layer's context, with arrays of the library of `wrap`."""
    rotary = rotary_of(case)
    return LayerContext(case.dropout, recompute, rotary=rotary and tuple(map(wrap, rotary)),
                        lengths=wrapped(lengths_of(case), wrap))


class Share:
    """This rank's parameters and gradients for a layer, and the check of what it computed."""

    def __init__(self, group, tensors, p, case: Case, wrap=as_is):
        self.group, self.tensors, self.case, self.wrap = group, tensors, case, wrap
        self.region = (SequenceParallelRegion(group, case.keep_gathered_inputs) if case.sequence_parallel else
                       TensorParallelRegion(group))
        self.p = tree_map(wrap, split(p, tensors, group.size)[group.rank])
        self.layout = Layout(tensors, group.size)
        self.flat = wrap(np.ones(self.layout.size, case.main))      # gradients are *added* to what is there
        self.grads = self.layout.views(self.flat)

    def outside(self, x):
        """Return this rank's shard of x [b, s, h] outside the region."""
        return self.wrap(spread(x, self.case)[self.group.rank].copy())

    def outside_equals(self, mine, expected, tolerance=1e-11):
        close(host(mine), spread(expected, self.case)[self.group.rank], tolerance)

    def gradients_equal(self, expected, tolerance):
        """Assert that the ranks' gradients join to the whole, replicated ones are identical, and padding has none."""
        def check(everyone):
            shards = self.case.region.complete([self.layout.views(flat - 1) for flat in everyone], self.tensors)
            trees_close(join(shards, self.tensors), expected, tolerance)
            for mine, again in zip(shards, split(expected, self.tensors, self.group.size), strict=True):
                trees_close(mine, again, tolerance)

        first_checks(self.group, host(self.flat), check)


def first_checks(group, value, check) -> None:
    """Call `check` with all ranks' values, on rank 0 alone, which is faster. Its failure fails every rank."""
    everyone, fault = group.comm.gather(value), ""
    if group.rank == 0:
        try:
            check(everyone)
        except AssertionError:
            fault = traceback.format_exc()
    fault = group.comm.bcast(fault)
    assert not fault, fault


def column_parallel_equals_whole(group, case: Case, gather_output: bool, wrap=as_is, tolerance=1e-11):
    h, m = case.model.hidden_size, 3 * case.t
    tensors = textbook_linear.column_parallel_tensors(h, m, 1.0)
    p, x, dy, y, dx, grads = group.broadcast_object(lambda: whole_linear(
        case, tensors, case.x(), case.array("dy", case.b, case.s, m)))
    share = Share(group, tensors, p, case, wrap)
    mine = slice(None) if gather_output else slice(3 * group.rank, 3 * group.rank + 3)
    y_mine, cache = linear.column_parallel_forward(share.outside(x), share.p, gather_output, share.region)
    dx_mine = linear.column_parallel_backward(wrap(dy[..., mine].copy()), share.p, cache, gather_output, share.grads,
                                              kernels.accumulate, share.region)
    close(host(y_mine), y[..., mine], tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def row_parallel_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    n, h = 3 * case.t, case.model.hidden_size
    tensors = textbook_linear.row_parallel_tensors(n, h, 1.0)
    p, x, dy, y, dx, grads = group.broadcast_object(lambda: whole_linear(
        case, tensors, case.array("x", case.b, case.s, n), case.x("dy")))
    share, mine = Share(group, tensors, p, case, wrap), slice(3 * group.rank, 3 * group.rank + 3)
    y_mine, cache = linear.row_parallel_forward(wrap(x[..., mine].copy()), share.p, share.region)
    dx_mine = linear.row_parallel_backward(share.outside(dy), share.p, cache, share.grads, kernels.accumulate,
                                           share.region)
    share.outside_equals(y_mine, y, tolerance)
    close(host(dx_mine), dx[..., mine], tolerance)
    share.gradients_equal(grads, tolerance)


LAYER = textbook_layer.layer_forward, textbook_layer.layer_backward, layer.layer_forward, layer.layer_backward
BLOCK = textbook_block.block_forward, textbook_block.block_backward, block.block_forward, block.block_backward


def layer_equals_whole(group, case: Case, c, tensors, functions, recompute=KEEP_ALL, wrap=as_is, tolerance=1e-11):
    """Check a layer's output, the gradient of its input, and all of its parameters' gradients."""
    def whole():
        p = case.params(tensors)
        return p, *whole_layer(case, c, p, *functions[:2])

    p, x, dy, y, dx, grads = group.broadcast_object(whole)
    (forward, backward), share = functions[2:], Share(group, tensors, p, case, wrap)
    y_mine, cache = forward(share.outside(x), share.p, c, share.region, context_of(case, recompute, wrap))
    dx_mine = backward(share.outside(dy), share.p, cache, c, share.grads, kernels.accumulate, share.region)
    share.outside_equals(y_mine, y, tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(grads, tolerance)


def mlp_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    tensors = textbook_layer.declare("mlp", case.model)
    layer_equals_whole(group, case, case.model, tensors, LAYER, KEEP_ALL, wrap, tolerance)


def attention_equals_whole(group, case: Case, causal=True, recompute=KEEP_ALL, wrap=as_is, tolerance=1e-11):
    c, tensors = with_mask(case.model, causal), textbook_layer.declare("attention", case.model)
    layer_equals_whole(group, case, c, tensors, LAYER, recompute, wrap, tolerance)


def block_equals_whole(group, case: Case, recompute=KEEP_ALL, wrap=as_is, tolerance=1e-11):
    tensors = textbook_block.block_tensors(case.model)
    layer_equals_whole(group, case, case.model, tensors, BLOCK, recompute, wrap, tolerance)


def embedding_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    tensors, types = textbook_embedding.embedding_tensors(case.model), token_types_of(case)

    def whole():
        p, tokens, dx = case.params(tensors), case.ids("tokens", case.b, case.s), case.x("dx")
        x, cache = textbook_embedding.embedding_forward(tokens, p, LayerContext(case.dropout), types)
        return p, tokens, dx, x, textbook_embedding.embedding_backward(dx, p, cache)

    p, tokens, dx, x, grads = group.broadcast_object(whole)
    share = Share(group, tensors, p, case, wrap)
    x_mine, cache = embedding.embedding_forward(wrap(tokens), share.p, share.region, LayerContext(case.dropout),
                                                wrapped(types, wrap))
    embedding.embedding_backward(share.outside(dx), cache, share.grads, share.region)
    share.outside_equals(x_mine, x, tolerance)
    share.gradients_equal(grads, tolerance)


def head_equals_whole(group, case: Case, tensors, textbook, ours, wrap, tolerance, positions=None):
    """Check the logits of a head, of which each rank has those of its words, at all or so many positions, and all
    gradients.
    """
    def whole():
        p, x = case.params(tensors), case.x()
        dlogits = case.array("dlogits", case.b, positions or case.s, case.model.vocab_size)
        logits, cache = textbook[0](x, p)
        return p, x, dlogits, logits, *textbook[1](dlogits, p, cache)

    p, x, dlogits, logits, dx, *grads = group.broadcast_object(whole)
    share = Share(group, tensors, p, case, wrap)
    n = tensors["word"].local_shape(group.size)[0]
    mine = slice(n * group.rank, n * group.rank + n)
    padding = [(0, 0), (0, 0), (0, n * group.size - case.model.vocab_size)]
    logits = np.pad(logits, padding, constant_values=-np.inf)[..., mine]
    y, cache = ours[0](share.outside(x), share)
    dx_mine = ours[1](wrap(np.pad(dlogits, padding)[..., mine].copy()), share, cache)
    real = np.isfinite(logits)
    assert (np.isfinite(host(y)) == real).all(), "a padded word has a chance, or a real one has none"
    close(host(y)[real], logits[real], tolerance)
    share.outside_equals(dx_mine, dx, tolerance)
    share.gradients_equal(dict(zip(tensors, grads, strict=True)), tolerance)


def logits_equal_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    n, tensors = case.model.vocab_size, {"word": textbook_embedding.word_tensor(case.model)}
    textbook = (lambda x, p: textbook_embedding.logits_forward(x, p["word"], n),
                lambda dlogits, p, cache: textbook_embedding.logits_backward(dlogits, p["word"], cache))
    ours = (lambda x, share: embedding.logits_forward(x, share.p["word"], n, share.region),
            lambda dlogits, share, cache: embedding.logits_backward(
                dlogits, share.p["word"], cache, share.grads["word"], kernels.accumulate, share.region))
    head_equals_whole(group, case, tensors, textbook, ours, wrap, tolerance)


def masked_lm_equals_whole(group, case: Case, wrap=as_is, tolerance=1e-11):
    """Check BERT's head for masked tokens, at the positions that are to be predicted."""
    c, most = case.model, 1 + case.seed % case.s
    weights = case.ids("weights", case.b, case.s) % 2
    weights[np.cumsum(weights, 1) > most] = 0
    at, ours_at = (SomePositions.with_weight(x, most) for x in (weights, wrap(weights)))
    tensors = {"word": textbook_embedding.word_tensor(c), "head": textbook_heads.masked_lm_tensors(c)}

    def both(p):
        return p["head"], p["word"]

    textbook = (lambda x, p: textbook_heads.masked_lm_forward(x, *both(p), c, at),
                lambda dlogits, p, cache: textbook_heads.masked_lm_backward(dlogits, *both(p), cache, c))
    ours = (lambda x, share: heads.masked_lm_forward(x, *both(share.p), c, share.region, ours_at),
            lambda dlogits, share, cache: heads.masked_lm_backward(
                dlogits, *both(share.p), cache, c, both(share.grads), kernels.accumulate, share.region))
    head_equals_whole(group, case, tensors, textbook, ours, wrap, tolerance, positions=most)


def loss_equals_whole(group, case: Case, scale=1.0, wrap=as_is, tolerance=1e-11):
    def whole():
        logits = scale * case.array("logits", case.b, case.s, 3 * case.t)
        targets = case.ids("targets", case.b, case.s) % logits.shape[-1]
        dloss = case.array("dloss", case.b, case.s)
        loss, cache = textbook_cross_entropy.cross_entropy_forward(logits, targets)
        return logits, targets, dloss, loss, textbook_cross_entropy.cross_entropy_backward(dloss, cache)

    logits, targets, dloss, loss, dlogits = group.broadcast_object(whole)
    mine = slice(3 * group.rank, 3 * group.rank + 3)
    loss_all, cache = cross_entropy.cross_entropy_forward(wrap(logits[..., mine].copy()), wrap(targets), group)
    close(host(loss_all), loss, tolerance)
    close(host(cross_entropy.cross_entropy_backward(wrap(dloss), cache)), dlogits[..., mine], tolerance)


def model_equals_whole(group, case: Case, recompute: Recompute = KEEP_ALL, wrap=as_is):
    """Check the whole model: the losses of all its heads, and every gradient."""
    c, tensors = case.model, model_tensors(case.model)
    p, batch, losses, dlosses, grads = group.broadcast_object(lambda: whole_model(case))
    share = Share(group, tensors, p, case, wrap)
    units, grad_units = (map_units(Unit, tree) for tree in (share.p, share.grads))
    batch = type(batch)(*(wrapped(x, wrap) for x in batch))
    found, cache = model.model_forward(None, units, c, batch, share.region, LayerContext(case.dropout, recompute))
    model.model_backward(tuple(map(wrap, dlosses)), units, cache, c, grad_units, ImmediateSink(), share.region)
    for mine, loss in zip(found, losses, strict=True):
        close(host(mine), loss)
    share.gradients_equal(grads, 1e-10)
