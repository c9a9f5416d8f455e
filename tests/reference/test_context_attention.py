"""Attention over context-parallel ranks: who has which positions, and what is wrong with the naive ways.
test_theorems.py proves the three right ones.
"""
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.layers.context_attention import WAYS, averaged_attention
from reference.online_softmax import Partial, block_attention, finish, merge
from reference.parallel.data_parallel import mean_of_means, weighted_loss
from reference.positions import SequencePart, collect, deal, in_order, work_of_ranks, zigzag
from tests.context_theorems import ContextCase, dealt, one_go, targets_are_the_next_tokens
from tests.strategies import ANY_MODEL, cases, close

WAY = st.sampled_from(sorted(WAYS))
CASE = ContextCase(c=2, b=1, chunk=2, heads=2, queries=1, d=3, causal=True, dropout=0.1, padded=False, seed=1)


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


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_runs_say_where_a_ranks_positions_are(c, n, t):
    """Whatever sequence parallelism leaves of them: one slice, or two of one length."""
    s, x = 2 * c * n * t, np.arange(2 * c * n * t)
    for rank, mine in enumerate(deal(x, zigzag(c, s), 0)):
        part = SequencePart(rank, zigzag(c, s))
        assert part.has_first_position == (0 in mine)
        for i in range(t):
            held = slice(i * len(mine) // t, (i + 1) * len(mine) // t)
            runs = part.runs(held)
            assert (np.concatenate([x[run] for run in runs]) == mine[held]).all()
            assert len({run.stop - run.start for run in runs}) == 1 and len(runs) <= 2


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


# ---- the wrong ways, shown to be wrong --------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_the_mean_of_the_blocks_softmaxes_is_another_result(seed):
    case = replace(CASE, seed=seed, dropout=0.0)
    inputs, _, y, _ = one_go(case)
    found = collect(averaged_attention(dealt(inputs, case.chunks), case.chunks), case.chunks)
    with pytest.raises(AssertionError):
        close(found, y, 1e-3)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_mean_of_the_ranks_means_is_another_loss(c, n, seed):
    """Right is the sum over the global weight, on any ranks. With one token that counts, the wrong one is 1/c of it."""
    rng, chunks = np.random.default_rng(seed), zigzag(c, 2 * c * n)
    losses, weights, one = rng.normal(size=(3, 2 * c * n)), rng.integers(0, 2, (3, 2 * c * n)), np.zeros((3, 2 * c * n))
    weights[0, 0] = one[0, n] = 1
    for function, counted, times in ((weighted_loss, weights, 1), (mean_of_means, one, 1 / c)):
        loss, shares = function(deal(losses, chunks), deal(counted, chunks))
        close(loss, times * (losses * counted).sum() / counted.sum())
        close(collect(shares, chunks), times * counted / counted.sum())
