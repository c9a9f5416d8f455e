"""The pictures of context parallelism show each score once, in the colour of the rank that computes it."""
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from mpi_impl.notebook.pictures.positions import (EARLIER, HIDDEN, LATER, draw_deals, draw_ring_of_blocks, ring_steps,
                                                  score_owners)
from mpi_impl.notebook.pictures.shards import OWNERS
from reference.positions import in_order, work_of_ranks, zigzag


@pytest.mark.parametrize("c, n", [(1, 3), (2, 1), (4, 2)])
def test_the_owners_of_scores_have_the_work_of_the_ranks(c, n):
    for chunks in (in_order(c, 2 * c * n), zigzag(c, 2 * c * n)):
        owners = score_owners(chunks)
        assert [int((owners == rank).sum()) for rank in range(c)] == work_of_ranks(chunks)
        assert (owners[np.triu_indices(2 * c * n, 1)] == -1).all()


@pytest.mark.parametrize("c", [2, 3, 4])
def test_in_each_step_a_rank_has_the_keys_of_one_rank(c):
    """All scores of a step, a rank's queries, and one rank's keys; in the end no score is missing."""
    chunks, s = zigzag(c, 4 * c), 4 * c
    owners, steps = score_owners(chunks), ring_steps(chunks)
    holder = {i: rank for rank, own in enumerate(chunks) for chunk in own for i in range(chunk.start, chunk.stop)}
    for query in range(s):
        for key in range(s):
            expected = (owners[query, key] - holder[key]) % c if key <= query else -1
            assert steps[query, key] == expected


def test_the_picture_of_deals():
    deals = {"in order": in_order(4, 16), "zigzag": zigzag(4, 16)}
    figure = draw_deals(deals)
    images = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in images] == list(deals)
    for axes, chunks in zip(images, deals.values()):
        pixels, owners = np.asarray(axes.images[0].get_array()), score_owners(chunks)
        for rank in range(4):
            assert (pixels[owners == rank] == to_rgb(OWNERS[rank])).all()
        assert (pixels[owners < 0] == to_rgb(HIDDEN)).all()
    for axes, chunks in zip([axes for axes in figure.axes if not axes.images], deals.values()):
        assert [bar.get_height() for bar in axes.patches] == work_of_ranks(chunks)


def test_the_picture_of_the_ring():
    chunks = zigzag(3, 12)
    figure, steps, owners = draw_ring_of_blocks(chunks), ring_steps(chunks), score_owners(chunks)
    for step, axes in enumerate(figure.axes):
        pixels = np.asarray(axes.images[0].get_array())
        assert (pixels[(steps >= 0) & (steps < step)] == to_rgb(EARLIER)).all()
        assert (pixels[steps > step] == to_rgb(LATER)).all()
        for rank in range(3):
            assert (pixels[(steps == step) & (owners == rank)] == to_rgb(OWNERS[rank])).all()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "rank 0", "rank 1", "rank 2", "done", "to come"]
