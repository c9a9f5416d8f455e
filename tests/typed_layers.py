"""A model of the machine on arrays with types: every operation's types go together, and at the end those of all
gradients are the ones that their weights want.
"""
from dataclasses import replace

import numpy as np

from mpi_impl.comm.mappings import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.models import model
from mpi_impl.models.units import Unit
from mpi_impl.parallel.sinks import ImmediateSink
from reference.batches import BERTBatch, GPTBatch, SpanBatch
from reference.layer_context import LayerContext
from reference.models.model import batch_type, model_tensors, sequences_of
from reference.parallel.layout import map_units
from reference.params import tree_map, with_names
from tests.cases import Case
from tests.typed import (EQUAL, FRESH, HEADS, PARTIAL, POSITIONS, RANKS, VOCABULARY, WIDTH, TypedArray, TypedGroup,
                         TypeFault)


def typed_model(case: Case):
    """Return a case's ModelConfig with sizes that tell what is cut, without dropout and experts."""
    c = case.model
    r = c.num_attention_heads // c.groups
    heads, d = RANKS * HEADS, 12
    sizes = dict(num_attention_heads=heads * r, num_query_groups=heads if c.num_query_groups else None,
                 hidden_size=heads * r * d, ffn_hidden_size=RANKS * WIDTH, vocab_size=RANKS * VOCABULARY,
                 max_position_embeddings=RANKS * POSITIONS, make_vocab_size_divisible_by=1,
                 hidden_dropout=0.0, attention_dropout=0.0, num_layers=1, experts=None,
                 kv_channels=d if c.kv_channels else None, predicted_share=1.0)
    return replace(c, **sizes)


def typed_batch(c):
    """Return a batch of samples of full length, the same on all ranks."""
    kind, rows, s = batch_type(c), 5 * sequences_of(c), c.max_position_embeddings

    def ids(*shape):
        return TypedArray(shape, np.int64)

    if kind is GPTBatch:
        return GPTBatch(ids(rows, s), ids(rows, s))
    if kind is BERTBatch:
        return BERTBatch(ids(rows, s), ids(rows, s), ids(rows, s), ids(rows, s), ids(rows), ids(rows))
    answers = ids(5, 2) if kind is SpanBatch else ids(5)
    return kind(ids(rows, s), ids(rows, s), ids(rows), answers, ids(5))


def types_go_together(case: Case) -> None:
    """Run a model's forward and backward on one of RANKS typed ranks. Raises TypeFault."""
    c, group = typed_model(case), TypedGroup()
    region = (SequenceParallelRegion(group, case.keep_gathered_inputs) if case.sequence_parallel else
              TensorParallelRegion(group))
    tensors = model_tensors(c)
    p = tree_map(lambda tensor: TypedArray(tensor.local_shape(RANKS)), tensors)
    grads = tree_map(lambda tensor: TypedArray(tensor.local_shape(RANKS), kind=FRESH), tensors)
    units, of_gradients = (map_units(Unit, tree) for tree in (p, grads))
    losses, cache = model.model_forward(None, units, c, typed_batch(c), region, LayerContext(None))
    for loss in losses:
        equal(loss, "the loss")
    dlosses = tuple(TypedArray(loss.shape) for loss in losses)
    model.model_backward(dlosses, units, cache, c, of_gradients, ImmediateSink(), region)
    tree_map(lambda named, grad: right_gradient(named, grad, case), with_names(tensors), grads)


def equal(x, what: str) -> None:
    if x.kind not in (EQUAL, FRESH):
        raise TypeFault(f"{what} is {x}, where all ranks should have it whole.")


def right_gradient(named, grad, case: Case) -> None:
    """Check a weight's gradient: complete, or a term of the sum that the step makes over copies."""
    tensor = named.leaf
    used_in_parts = case.sequence_parallel or tensor.most_shards is not None
    wanted = PARTIAL if used_in_parts and tensor.copies(RANKS) > 1 else EQUAL
    if grad.kind not in (wanted, FRESH):
        raise TypeFault(f"the gradient of {named.name} is {grad}, where it should be {wanted}.")
