"""The picture of a block on t ranks: whose parts are whose; and what moves at the edges is what real layers move."""
from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_hex

from mpi_impl.comm.mappings import SequenceParallelRegion, TensorParallelRegion
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.notebook.pictures.blocks import EDGES, HIGH, LANE, STEPS, draw_block
from mpi_impl.notebook.pictures.shards import OWNERS, WHOLE
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig
from reference.layers.block import block_tensors
from reference.params import initialize_shard, tree_map

REGIONS = {False: TensorParallelRegion, True: SequenceParallelRegion}


def colors(figure):
    return Counter(to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches)


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_outside_all_ranks_are_grey_and_inside_each_has_its_colour(t):
    outside = sum(step.kind == "outside" for step in STEPS)
    found = colors(draw_block(t))
    assert found == {WHOLE: outside * t, "#303030": 2, **dict.fromkeys(OWNERS[:t], 2)}


@pytest.mark.parametrize("t", [2, 4])
def test_with_cut_positions_each_rank_has_a_strip_of_its_own(t):
    figure = draw_block(t, sequence_parallel=True)
    outside = sum(step.kind == "outside" for step in STEPS)
    assert colors(figure) == {"#303030": 4, **dict.fromkeys(OWNERS[:t], 2 + outside)}
    strips = {round((patch.get_y() - (1 - LANE) / 2) % 1, 6) for patch in figure.axes[0].patches
              if np.isclose(patch.get_height(), LANE / t)}
    assert strips == {round(LANE * rank / t, 6) for rank in range(t)}, "one below the other, together all positions"


def test_it_says_what_it_shows():
    figure = draw_block(2)
    assert {"layer norm", "attention", "MLP", "dropout", "add x", "f", "all-reduce →\ng", "← all-reduce"} <= set(
        words(figure)) and words(figure).count("1/2 of the heads") == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "rank 0's own", "rank 1's own", "identical on every rank: done 2 times"]
    assert [text.get_text() for text in draw_block(2, True).legends[0].get_texts()] == ["rank 0's own", "rank 1's own"]
    assert figure.get_figheight() == pytest.approx(draw_block(3).get_figheight() - HIGH)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_moves_is_what_a_real_block_moves(ranks, sequence_parallel):
    for found in ranks.run(2, collectives_of_a_block, sequence_parallel):
        edges = [EDGES[sequence_parallel][step.label] for step in STEPS if step.kind == "edge"]
        assert found == ([forward for forward, _ in edges if forward],
                         [backward for _, backward in reversed(edges) if backward])


def collectives_of_a_block(group, sequence_parallel):
    """Return the collectives of a block's forward, and of its backward without the inputs that are gathered again."""
    c = ModelConfig(1, 8, 2, 1, 4, hidden_dropout=0, attention_dropout=0)
    p = initialize_shard(block_tensors(c), 1, np.float64, group.size, group.rank)
    region = REGIONS[sequence_parallel](group)
    x = np.ones((1, 4 // (group.size if sequence_parallel else 1), 8))
    with group.ledger.phase("forward"):
        y, cache = block_forward(x, p, c, region)
    with group.ledger.phase("backward"):
        block_backward(y, p, cache, c, tree_map(np.zeros_like, p), ImmediateSink(), region)
    return tuple([entry.operation.replace("_", "-") for entry in group.ledger.totals
                  if entry.phase == phase and not entry.reason.endswith("again")] for phase in ("forward", "backward"))
