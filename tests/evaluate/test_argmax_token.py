"""The likeliest token of a sharded vocabulary: the argmax over the whole one, without gathering it."""
import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from mpi_impl.layers.cross_entropy import argmax_token
from reference.layers import cross_entropy as textbook
from tests.rank_theorems import host
from tests.spy import SpyArray

FEW = st.integers(-2, 2).map(float)      # so that several words are often as likely
ANY = st.one_of(FEW, st.just(-np.inf), st.floats(-1e300, 1e300))


@st.composite
def logits(draw):
    """Draw t, and logits [b, s, V] where t divides V; each position has one above minus infinity."""
    t = draw(st.integers(1, 4))
    b, s, n = draw(array_shapes(min_dims=3, max_dims=3, max_side=4))
    found = draw(arrays(np.float64, (b, s, t * n), elements=draw(st.sampled_from([FEW, ANY]))))
    found[..., draw(st.integers(0, t * n - 1))] = 1.0
    return t, found


def each_rank_says(group, whole, wrap):
    part = np.split(whole, group.size, -1)[group.rank]
    given = wrap(part.copy())
    words = argmax_token(given, group)
    assert (host(given) == part).all(), "the logits are overwritten"
    return host(words)


@settings(max_examples=settings().max_examples // 2)
@given(logits(), st.sampled_from([np.asarray, SpyArray]))
def test_it_is_the_argmax_of_the_whole(ranks, case, wrap):
    """On every rank, the first of several likeliest tokens; in the textbook too."""
    t, whole = case
    expected = whole.argmax(-1)
    assert (textbook.argmax_token(whole) == expected).all()
    assert (textbook.sharded_argmax_token(np.split(whole, t, -1)) == expected).all()
    for words in ranks.run(t, each_rank_says, whole, wrap):
        assert words.dtype == np.int64 and (words == expected).all()

