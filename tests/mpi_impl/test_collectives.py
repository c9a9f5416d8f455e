"""Collectives and messages of real ranks are the textbook's, whichever way arrays travel."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.exact.array import as_exact, random_array
from tests.collective_theorems import (WAYS, collectives_are_the_textbooks, messages_find_their_receives,
                                       posted_are_the_textbooks)

SEEDS = st.integers(0, 2**32 - 1)
RANKS = st.integers(1, 8)
LAYOUTS = st.sampled_from(["whole", "columns", "transposed"])
POSTS = st.tuples(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.booleans())
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def form_of(data, way, *forms):
    """Draw a format that arrays can have on this way, one of these if there are any."""
    return data.draw(st.sampled_from([form for form in WAYS[way].forms if form in (forms or WAYS[way].forms)]))


@EVERY_WAY
@given(data=st.data(), n=RANKS, rows=st.integers(1, 2), length=st.integers(0, 3), axis=st.integers(-1, 2),
       layout=LAYOUTS, seed=SEEDS)
def test_collectives_are_the_textbooks(ranks, way, data, n, rows, length, axis, layout, seed):
    form = form_of(data, way)
    n = min(n, 5) if way == "exact" else n
    ranks.run(n, collectives_are_the_textbooks, way, form, (rows, length, axis), layout, 1 + ("shared" in way), seed)


@EVERY_WAY
@given(data=st.data(), n=RANKS, posts=st.lists(POSTS, min_size=1, max_size=6), length=st.sampled_from([0, 1, 7, 700]),
       seed=SEEDS, uneven=st.booleans())
def test_posted_collectives_are_the_textbooks(ranks, way, data, n, posts, length, seed, uneven):
    form = form_of(data, way, "float64", "float32", "exact")
    ranks.run(n, posted_are_the_textbooks, way, posts, min(length, 7) if way == "exact" else length, form, seed, uneven)


@EVERY_WAY
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data(), n=st.integers(2, 4), count=st.integers(1, 4), size=st.sampled_from([0, 1, 20_000]), seed=SEEDS)
def test_messages_find_their_receives_by_tag(ranks, way, data, n, count, size, seed):
    """Small ones, and some that MPI delivers only when they are received."""
    form = form_of(data, way, "float64", "float32", "exact", "bfloat16")
    ranks.run(n, messages_find_their_receives, way, form, count, min(size, 7) if way == "exact" else size, seed)


# ---- exact numbers, which have a transport of their own --------------------------------------------------------------


def test_a_message_of_another_shape_is_refused(ranks):
    """NumPy would stretch it without a word."""
    ranks.run(2, receive_too_little)


def receive_too_little(group):
    group.compares = False      # or this would be refused before
    if group.rank == 0:
        group.post_send(random_array((3,), 1), 1, 0, "test").wait()
    else:
        with pytest.raises(AssertionError, match=r"an array of shape \(3,\) came where one of shape \(2, 3\)"):
            group.post_receive(as_exact(np.zeros((2, 3))), 0, 0, "test").wait()
