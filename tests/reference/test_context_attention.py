"""Attention over context-parallel ranks: who has which positions. test_theorems.py proves the three ways."""
import numpy as np
from hypothesis import given, strategies as st

from reference.layers.context_attention import WAYS
from reference.layers.online_softmax import Partial, block_attention, finish, merge
from reference.positions import in_order, work_of_ranks, zigzag
from tests.context_theorems import ContextCase, targets_are_the_next_tokens
from tests.strategies import ANY_MODEL, cases, close

WAY = st.sampled_from(sorted(WAYS))


@st.composite
def context_cases(draw, exact=False):
    """Draw ragged sizes: chunks of one position, one head of keys for several of queries, padding anywhere. The heads
    of keys divide by c, so that every way takes them.
    """
    c = draw(st.integers(1, 3 if exact else 5))
    return ContextCase(c, draw(st.integers(1, 2 if exact else 3)), draw(st.integers(1, 2 if exact else 4)),
                       c * draw(st.integers(1, 1 if exact else 2)), draw(st.integers(1, 2 if exact else 3)),
                       draw(st.integers(1, 2 if exact else 4)), draw(st.booleans()), draw(st.sampled_from(
                           [0.0, 0.1, 0.5])), draw(st.booleans()), draw(st.integers(0, 2**32 - 1)), exact)


@st.composite
def models_over_ranks(draw, exact=False):
    """Draw a model, the number of ranks that share its sequences, and the way in which attention communicates."""
    c, way = draw(st.integers(1, 2 if exact else 4), "c"), draw(WAY, "way")
    return draw(cases(st.just(1), architectures=ANY_MODEL, exact=exact, c=c, heads_of=c if way == "a2a" else 1)), c, way


@given(st.integers(1, 8), st.integers(1, 6))
def test_zigzag_gives_every_rank_the_same_work(c, n):
    """To the last pair of query and key. In order, the last rank has (2c - 1)/c of the mean, but for the diagonal, and
    the first 1/c. All together it is the whole triangle.
    """
    s, blocks, half = 2 * c * n, (2 * n)**2, n
    for work in (work_of_ranks(zigzag(c, s)), work_of_ranks(in_order(c, s))):
        assert sum(work) == s * (s + 1) // 2 and work == sorted(work)
    assert (work[0], work[-1]) == (blocks / 2 + half, (2 * c - 1) * blocks / 2 + half)
    assert len(set(work_of_ranks(zigzag(c, s)))) == len(set(work_of_ranks(zigzag(c, s), causal=False))) == 1


def test_partials_of_no_key_and_of_large_scores():
    """Merging is safe where a query sees no key of a block, and where exp would overflow."""
    q, k, v = (np.random.default_rng(i).normal(size=(1, 2, 1, 3)) for i in range(3))
    seen, hidden = (block_attention(1e3 * q, 1e3 * k, v, False, real=np.array([n])) for n in (2, 0))
    assert (hidden.highest == -np.inf).all() and (hidden.total == 0).all()
    for both in (merge(seen, hidden), merge(hidden, seen)):
        assert isinstance(both, Partial)
        close(finish(both), finish(seen), 0.0)
    assert np.isfinite(finish(seen)).all()


@given(context_cases())
def test_targets_are_the_next_tokens(case):
    """At the end of a chunk, too, where the next token is on another rank."""
    targets_are_the_next_tokens(case)
