"""The flat buffer under a rank's tensors: views, buckets and shards; and a rank's shard as boxes of whole tensors."""
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, strategies as st

from reference.models.gpt import gpt_tensors
from reference.parallel.boxes import boxes_of_piece, boxes_of_run, inside, overlap, shape_of, without_padding
from reference.parallel.layout import ALONE, Layout, unit_of
from reference.params import leaves, tree_map
from tests.strategies import cases

BUCKET, PARTS = st.integers(1, 50) | st.integers(1, 10_000) | st.just(1 << 62), st.integers(1, 5)


@st.composite
def layouts(draw):
    """Draw layouts of a whole model, or of any of its layers, as interleaved stages give them."""
    case = draw(cases(share_layers=draw(st.booleans(), "share layers")))
    layers = draw(st.none() | st.lists(st.sampled_from(range(case.model.num_layers)), min_size=1, unique=True))
    tensors = gpt_tensors(case.model, layers and sorted(layers))
    return Layout(tensors, case.t, draw(BUCKET), draw(PARTS))


@given(layouts())
def test_views_cover_the_buffer_without_overlap(layout):
    """Every element belongs to one tensor, or is padding at the end of a bucket, just enough for it to divide. Tensors
    lie in the order of the backward.
    """
    flat = np.zeros(layout.size)
    tree_map(lambda view: np.add(view, 1, out=view), layout.views(flat))
    for bucket in layout.buckets:
        elements = sum(prod(s.shape) for s in layout.segments if unit_of(s.name) in bucket.units)
        inside = flat[bucket.slice]
        assert (inside[:elements] == 1).all() and (inside[elements:] == 0).all()
        assert bucket.size % layout.parts == 0 and 0 <= bucket.size - elements < layout.parts
    assert flat.sum() == sum(prod(s.shape) for s in layout.segments)
    assert [s.name for s in layout.segments] == [name for name, _ in leaves(layout.tensors)][::-1]


@given(st.booleans().flatmap(lambda shared: cases(share_layers=shared)), BUCKET, PARTS)
def test_buckets_split_the_buffer_between_units(case, size, parts):
    """All of it, in its order, no unit in two buckets. Each has at least `size` elements, and not a unit more than it
    needs for them, but for the last, and but for what comes before a table that shares no bucket."""
    layout = Layout(gpt_tensors(case.model), case.t, size, parts)
    of, order = {}, []
    for segment in layout.segments:
        unit = unit_of(segment.name)
        of[unit] = of.get(unit, 0) + prod(segment.shape)
        order += [unit] * (unit not in order)
    assert [unit for bucket in layout.buckets for unit in bucket.units] == order
    ends = [0] + [bucket.slice.stop for bucket in layout.buckets]
    assert [bucket.slice for bucket in layout.buckets] == list(map(slice, ends[:-1], ends[1:]))
    assert ends[-1] == layout.size == layout.parts * layout.shard_size
    for bucket, following in zip(layout.buckets, [*layout.buckets[1:], None], strict=True):
        elements = sum(of[unit] for unit in bucket.units)
        assert elements - of[bucket.units[-1]] < size
        assert elements >= size or following is None or set(ALONE) & {*bucket.units, *following.units}
        assert len(bucket.units) == 1 or not set(ALONE) & set(bucket.units)
    first = layout.buckets[0].units
    assert Layout(layout.tensors, case.t, sum(of[unit] for unit in first)).buckets[0].units == first, "it is full"


# ---- boxes ----------------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    ends = st.integers(0, prod(shape))
    return shape, *sorted((draw(ends), draw(ends)))


@st.composite
def boxes(draw, shape):
    """Draw a box of an array that is not empty."""
    starts = [draw(st.integers(0, length - 1)) for length in shape]
    return tuple(slice(start, draw(st.integers(start + 1, length))) for start, length in zip(starts, shape))


@given(runs())
def test_a_run_is_its_boxes_one_after_another(run):
    """Joined they are the run, element by element, so they are disjoint and cover it; and they are few."""
    shape, start, stop = run
    array, found = np.arange(prod(shape)).reshape(shape), boxes_of_run(*run)
    assert [element for box in found for element in array[box].ravel()] == list(range(start, stop))
    assert all(array[box].shape == shape_of(box) and array[box].size for box in found)
    assert len(found) <= 2 * len(shape) - 1


@given(st.booleans().flatmap(lambda shared: cases(share_layers=shared)), BUCKET, PARTS)
def test_all_that_ranks_own_is_the_model_once(case, bucket_size, parts):
    """Every element of a whole tensor is in one box of one of its owners, replicated ones on each rank; no padding. The
    whole tensor's elements in a piece's boxes, one after another, are those of the piece, in buffer and shard, in which
    pieces are in order.
    """
    tensors = gpt_tensors(case.model)
    layout, rng = Layout(tensors, case.t, bucket_size, parts), np.random.default_rng(case.seed)
    whole = {name: rng.normal(size=tensor.shape) for name, tensor in leaves(tensors)}
    owned = {name: np.zeros(tensor.shape) for name, tensor in leaves(tensors)}
    for rank in range(case.t):
        flat, shard = np.full(layout.size, np.nan), np.empty(layout.shard_size)
        for segment in layout.segments:
            view = flat[segment.slice].reshape(segment.shape)
            x, tensor = whole[segment.name], segment.tensor
            if tensor.split is not None:
                at = rank // tensor.copies(case.t) * segment.shape[tensor.split]
                x = x[(slice(None),) * tensor.split + (slice(at, at + segment.shape[tensor.split]),)]
            view[tuple(map(slice, x.shape))] = x
        for replica in range(parts):
            for bucket in layout.buckets:
                own = layout.owned_piece(bucket, replica)
                shard[own.in_shard] = flat[own.in_buffer]
            pieces = layout.pieces(replica)
            assert all(one.in_shard.stop <= other.in_shard.start for one, other in pairwise(pieces))
            for piece in without_padding(pieces, rank):
                x, found = whole[piece.of.name], boxes_of_piece(piece, rank)
                assert all(side.start >= 0 and side.stop <= n for box in found for side, n in zip(box, x.shape))
                values = np.concatenate([x[box].ravel() for box in found])
                assert values.size == piece.size > 0
                assert np.array_equal(flat[piece.in_buffer], values) and np.array_equal(shard[piece.in_shard], values)
                for box in found:
                    owned[piece.of.name][box] += 1
    for name, tensor in leaves(tensors):
        assert (owned[name] == tensor.copies(case.t)).all(), name


@given(SHAPES, st.data())
def test_an_overlap_has_the_elements_of_both_boxes(shape, data):
    """`inside` finds the overlap in either box."""
    one, other, array = data.draw(boxes(shape)), data.draw(boxes(shape)), np.arange(prod(shape)).reshape(shape)
    common = overlap(one, other)
    found = set() if common is None else set(array[common].flat)
    assert found == set(array[one].flat) & set(array[other].flat) and (common is None) == (not found)
    if common is not None:
        for box in (one, other):
            assert (array[box][inside(common, box)] == array[common]).all()
