"""The machine's Adam: it updates pieces of flat buffers, tile by tile, offloaded or not, as whole tensors."""
from math import sqrt
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.parallel import tiles as tiles_module
from mpi_impl.parallel.buffers import OffloadedShard, Shard, Whole
from mpi_impl.parallel.model_state import counted_pieces
from mpi_impl.parallel.tiles import tiles
from mpi_impl.training.optimizer import Adam
from reference.models.gpt import gpt_tensors
from reference.optimizer import OptimizerConfig, adam_update, clip_coefficient, learning_rate
from reference.parallel.layout import Layout
from reference.params import HOST, leaves
from tests.strategies import cases, close

TILE, PARTS = st.sampled_from([5, 40, 1000]), st.integers(1, 4)
BUCKETS = st.sampled_from([1, 50, 1 << 30])


class Alone:
    """Stands for the ranks that own a model between them: what the others add to the norm is known."""

    def __init__(self, others):
        self.others = others

    def all_reduce(self, x, reason):
        return x + self.others


@given(cases(sizes=st.just(1)), BUCKETS, PARTS, TILE)
def test_tiles_are_the_pieces_in_order(case, bucket_size, parts, tile):
    """No element left out or moved twice; all that belong to a tensor with decay decay; neighbours are together."""
    layout = Layout(gpt_tensors(case.model), 1, bucket_size, parts)
    with mock.patch.object(tiles_module, "TILE", tile):
        for rank in range(parts):
            pieces, found = layout.pieces(rank), tiles(layout.pieces(rank), HOST)
            assert all(0 < each.place.size <= tile for each in found)
            assert [pair for each in found for pair in elements(each.place)] == [
                pair for piece in pieces for pair in elements(piece)]
            runs = [(elements(each.place)[i], decays) for each in found for part, decays in each.runs
                    for i in range(part.start, part.stop)]
            assert runs == [(pair, piece.of.tensor.decay) for piece in pieces for pair in elements(piece)]
            assert all(one[1] != other[1] for each in found for one, other in zip(each.runs, each.runs[1:]))
            assert all(one.place.size == tile or gap(one.place, other.place) for one, other in zip(found, found[1:]))


def elements(place):
    """Return the index in the buffer and the index in the shard of each element."""
    return list(zip(*(range(where.start, where.stop) for where in place[1:]), strict=True))


def gap(one, other):
    return one.in_shard.stop != other.in_shard.start or one.in_buffer.stop != other.in_buffer.start


@pytest.mark.parametrize("kind", ["whole", "shards", "offloaded shards"])
@settings(max_examples=settings().max_examples // 4)
@given(case=cases(sizes=st.just(1)), bucket_size=BUCKETS, parts=PARTS, tile=TILE, clip=st.sampled_from([0.0, 0.1, 1e6]))
def test_a_part_moves_as_in_the_whole(kind, case, bucket_size, parts, tile, clip):
    """Three steps by the textbook's formula: weights decay, biases do not; the norm is the whole's."""
    layout = Layout(gpt_tensors(case.model), 1, bucket_size, 1 if kind == "whole" else parts)
    config = OptimizerConfig(1e-2, 10, weight_decay=0.1, clip_grad=clip)
    rank = case.seed % layout.parts
    pieces = layout.pieces(rank)
    params, m, v = (make(kind, layout) for _ in range(3))
    expected = [np.zeros(layout.size) for _ in range(3)]
    grads = make("whole" if kind == "whole" else "shards", layout)
    with mock.patch.object(tiles_module, "TILE", tile):
        adam = Adam(pieces, params, {"parameters": params, "m": m, "v": v}, config, pieces)
    for step in (1, 2, 3):
        whole = case.array(f"gradient {step}", layout.size)
        for piece in pieces:
            grads.load(piece)[...] = whole[piece.in_buffer]
        mine, squares = (sum(float(np.vdot(whole[at], whole[at])) for at in slices) for slices in (
            [piece.in_buffer for piece in pieces], [segment.slice for segment in layout.segments]))
        everyone: Any = Alone(squares - mine)
        norm, rate = adam.step(grads, everyone)
        close(np.array([norm, rate]), np.array([sqrt(squares), learning_rate(config, step)]), 1e-13)
        factor = clip_coefficient(norm, clip)
        for segment in layout.segments:
            at = segment.slice
            adam_update(expected[0][at], factor * whole[at], expected[1][at], expected[2][at], step, rate,
                        segment.tensor.decay, config)
        for piece in pieces:
            for buffer, flat in zip((params, m, v), expected):
                close(buffer.load(piece), flat[piece.in_buffer], 1e-13)


def make(kind, layout):
    return {"whole": lambda: Whole(np.zeros(layout.size)), "shards": lambda: Shard(np.zeros(layout.shard_size)),
            "offloaded shards": lambda: OffloadedShard(layout.shard_size, np.float64, np.empty(0))}[kind]()


@given(cases(), PARTS, BUCKETS, st.sampled_from(["", "embedding.word"]))
def test_every_element_counts_once(case, parts, bucket_size, elsewhere):
    """Over t tensor-parallel ranks and all replicas: split tensors on each, replicated ones on the first of t."""
    tensors = gpt_tensors(case.model)
    layout = Layout(tensors, case.t, bucket_size, parts)
    counted = {name: 0 for name, _ in leaves(tensors)}
    for tensor_rank in range(case.t):
        for rank in range(parts):
            for piece in counted_pieces(layout.pieces(rank), tensor_rank, {elsewhere}):
                counted[piece.of.name] += piece.size
    for name, tensor in leaves(tensors):
        size = int(np.prod(tensor.local_shape(case.t))) * case.t // tensor.copies(case.t)
        assert counted[name] == (0 if name == elsewhere else size)
