"""The picture of groups shows those that the topology forms."""
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle

from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.notebook.pictures.groups import ALONE, KINDS, crosses, draw_groups, groups_of
from mpi_impl.notebook.pictures.shards import OWNERS
from reference.config import ParallelConfig

WAYS = [(2, 2, 2), (8, 1, 1), (1, 4, 2), (1, 1, 8), (1, 2, 3)]


def members(group, c: ParallelConfig) -> dict[str, list[int]]:
    """Return the members of each of this rank's groups."""
    topology = connect(group, c)
    found = {kind: list(getattr(topology, kind).ranks) for kind in KINDS}
    disconnect(topology)
    return found


@pytest.mark.parametrize("t, p, d", WAYS)
def test_groups_are_those_that_ranks_form(ranks, t, p, d):
    c = ParallelConfig(t, p, d)
    expected = groups_of(c)
    for rank, found in enumerate(ranks.run(c.world_size, members, c)):
        assert found == {kind: next(group for group in expected[kind] if rank in group) for kind in KINDS}


@pytest.mark.parametrize("t, p, d", WAYS)
def test_every_rank_is_in_one_group_of_each_kind(t, p, d):
    for kind, groups in groups_of(ParallelConfig(t, p, d)).items():
        assert sorted(sum(groups, [])) == list(range(t * p * d))
        assert {len(group) for group in groups} == {{"tensor": t, "pipeline": p, "data": d}[kind]}


def test_what_crosses_servers():
    """With t = p = d = 2 on servers of four only pipelines do; of one server nobody leaves."""
    groups = groups_of(ParallelConfig(2, 2, 2))
    assert {kind for kind in groups for group in groups[kind] if crosses(group, 4)} == {"pipeline"}
    assert not any(crosses(group, 8) for kind in groups for group in groups[kind])


@pytest.mark.parametrize("t, p, d", WAYS)
def test_the_picture_of_groups(t, p, d):
    """A box for each rank in each row, coloured by group; an arc between neighbours, dashed if it leaves a server."""
    c, server = ParallelConfig(t, p, d), 4
    axes, = draw_groups(c, server, "a title").axes
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(boxes) == 3 * c.world_size
    assert sum(isinstance(patch, FancyBboxPatch) for patch in axes.patches) == -(-c.world_size // server)
    groups = [(i, group) for of_kind in groups_of(c).values() for i, group in enumerate(of_kind)]
    colors = [OWNERS[i % len(OWNERS)] if len(group) > 1 else ALONE for i, group in groups for _ in group]
    assert [to_hex(box.get_facecolor()).upper() for box in boxes] == colors
    pairs = [pair for _, group in groups for pair in zip(group, group[1:])]
    assert [line.get_linestyle() for line in axes.lines] == ["--" if crosses(pair, server) else "-" for pair in pairs]
    for line, (one, other) in zip(axes.lines, pairs):
        assert np.allclose([line.get_xdata()[0], line.get_xdata()[-1]], [one + 0.5, other + 0.5])
    texts = [text.get_text() for text in axes.texts]
    assert texts[0] == "a title" and {f"{kind}\n{c.world_size // size} groups of {size}" for kind, size in
                                      (("tensor", t), ("pipeline", p), ("data", d))} <= set(texts)
