"""A rank's shard as boxes of whole tensors: in order, disjoint, and complete."""
from math import prod

import numpy as np
from hypothesis import given, strategies as st

from reference.models.gpt import gpt_tensors
from reference.parallel.boxes import boxes_of_piece, boxes_of_run, inside, overlap, shape_of, without_padding
from reference.parallel.layout import Layout
from reference.params import leaves
from tests.reference.test_layout import BUCKET, PARTS
from tests.strategies import cases

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


@given(st.integers(1, 5).map(lambda n: (3,) * n))
def test_no_bound_on_the_boxes_is_smaller(shape):
    """All but the first element and the last are 2 n - 1 boxes."""
    assert len(boxes_of_run(shape, 1, prod(shape) - 1)) == 2 * len(shape) - 1


@given(cases(), BUCKET, PARTS)
def test_all_that_ranks_own_is_the_model_once(case, bucket_size, parts):
    """Every element of a whole tensor is in one box of one of its owners, replicated ones on each rank; no padding."""
    tensors = gpt_tensors(case.model)
    layout, whole = Layout(tensors, case.t, bucket_size, parts), dict(leaves(tensors))
    owned = {name: np.zeros(tensor.shape) for name, tensor in whole.items()}
    for rank in range(case.t):
        for replica in range(parts):
            for piece in without_padding(layout.pieces(replica), rank):
                found = boxes_of_piece(piece, rank)
                assert sum(prod(shape_of(box)) for box in found) == piece.size > 0
                for box in found:
                    assert all(a.start >= 0 and a.stop <= n for a, n in zip(box, whole[piece.of.name].shape))
                    owned[piece.of.name][box] += 1
    for name, times in owned.items():
        assert (times == whole[name].copies(case.t)).all(), name


@given(cases(), BUCKET, PARTS)
def test_boxes_are_where_the_elements_are(case, bucket_size, parts):
    """The whole tensor's elements in a piece's boxes, one after another, are the elements of the piece."""
    tensors = gpt_tensors(case.model)
    layout, rng = Layout(tensors, case.t, bucket_size, parts), np.random.default_rng(case.seed)
    whole = {name: rng.normal(size=tensor.shape) for name, tensor in leaves(tensors)}
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
            for piece in without_padding(layout.pieces(replica), rank):
                values = np.concatenate([whole[piece.of.name][box].ravel() for box in boxes_of_piece(piece, rank)])
                assert np.array_equal(flat[piece.in_buffer], values)
                assert np.array_equal(shard[piece.in_shard], values)


def test_boxes_that_touch_have_nothing_in_common():
    left, right, below = (slice(0, 2), slice(0, 3)), (slice(0, 2), slice(3, 5)), (slice(2, 4), slice(0, 5))
    assert overlap(left, right) is overlap(right, left) is overlap(left, below) is overlap(below, right) is None


@given(SHAPES, st.data())
def test_an_overlap_has_the_elements_of_both_boxes(shape, data):
    """`inside` finds the overlap in either box."""
    one, other, array = data.draw(boxes(shape)), data.draw(boxes(shape)), np.arange(prod(shape)).reshape(shape)
    common = overlap(one, other)
    found = set() if common is None else set(array[common].flat)
    assert found == set(array[one].flat) & set(array[other].flat)
    if common is not None:
        for box in (one, other):
            assert (array[box][inside(common, box)] == array[common]).all()
