"""The ring adds up, in the steps and with the messages of which it is told; and the picture shows who is in a sum."""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.ring import draw_ring, ring_all_reduce
from mpi_impl.notebook.pictures.shards import OWNERS
from reference.comm.ring import ring_all_reduce as cost

RANKS = st.integers(2, 8)


def powers(t):
    return np.tile(2 ** np.arange(t)[:, None], (1, t))


@given(RANKS, st.integers(0, 2**32 - 1))
def test_at_the_end_every_rank_has_the_sum(t, seed):
    xs = np.random.default_rng(seed).integers(-99, 99, size=(t, t))
    steps = ring_all_reduce(xs)
    assert (steps[0].held == xs).all() and (steps[-1].held == xs.sum(0)).all()


@given(RANKS)
def test_in_the_middle_rank_i_has_piece_i_and_no_other(t):
    steps = ring_all_reduce(powers(t))
    assert steps[t - 1].name == f"reduce-scatter {t - 1}" and steps[t].name == "all-gather 1"
    assert ((steps[t - 1].held == 2**t - 1) == np.eye(t, dtype=bool)).all()


@given(RANKS)
def test_each_rank_sends_one_piece_in_each_step(t):
    """2 (t - 1) pieces of N/t, as the formula says; and only what the rank after it gets is changed."""
    steps = ring_all_reduce(powers(t))
    assert len(steps) - 1 == cost(t, t)
    for before, after in zip(steps, steps[1:]):
        changed = {(int(rank), int(piece)) for rank, piece in zip(*np.nonzero(before.held != after.held))}
        assert changed == {((rank + 1) % t, piece) for rank, piece in enumerate(after.sent)}


@pytest.mark.parametrize("t", [2, 4])
def test_a_box_has_a_stripe_for_each_rank_in_its_sum(t):
    steps = ring_all_reduce(powers(t))
    figure = draw_ring(steps)
    axes, = figure.axes
    stripes = [patch for patch in axes.patches if patch.get_fill()]
    frames = [patch for patch in axes.patches if not patch.get_fill()]
    found = [to_hex(stripe.get_facecolor()).upper() for stripe in stripes]
    wanted = [OWNERS[who] if step.held[rank, piece] >> who & 1 else "#F4F4F4"
              for step in steps for rank in range(t) for piece in range(t) for who in range(t)]
    assert found == wanted
    thick = [to_hex(frame.get_edgecolor()) == "#000000" for frame in frames]
    assert thick == [bool(step.sent) and step.sent[rank - 1] == piece
                     for step in steps for rank in range(t) for piece in range(t)]
    words = [text.get_text() for text in axes.texts]
    assert [word for word in words if word in {step.name for step in steps}] == [step.name for step in steps]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"rank {r}'s number" for r in range(t)]
