"""The collectives of real ranks are the textbook's; topology puts every rank in its place."""
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpi_impl.comm.ledger import Entry, Ledger, Total, ring_bytes, wire_bytes
from mpi_impl.comm.topology import Place, connect, disconnect, place
from reference import collectives
from reference.config import ParallelConfig
from reference.errors import UserError
from tests.strategies import close

RANKS, SEEDS = st.integers(1, 8), st.integers(0, 2**32 - 1)


@given(RANKS, st.integers(1, 4), st.integers(0, 1), st.sampled_from(["f", "d", "l"]), SEEDS)
def test_collectives_are_the_textbooks(ranks, n, length, axis, dtype, seed):
    xs = [x.astype(dtype) for x in 10 * np.random.default_rng(seed).normal(size=(n, n * length, n))]
    ranks.run(n, collectives_agree, xs, axis)


def collectives_agree(group, xs, axis):
    x, n = xs[group.rank], group.size
    tolerance = 1e-6 if x.dtype == np.float32 else 1e-13
    close(group.all_reduce(x.copy(), "test"), collectives.all_reduce(xs)[0], tolerance)
    assert (group.all_reduce(x.copy(), "test", op="max") == collectives.all_reduce(xs, np.maximum)[0]).all()
    assert (group.all_gather(x, axis, "test") == collectives.all_gather(xs, axis)[0]).all()
    close(group.reduce_scatter(x, axis, "test"), collectives.reduce_scatter(xs, axis)[group.rank], tolerance)
    assert (group.broadcast(x.copy(), "test", root=n - 1) == collectives.broadcast(xs, n - 1)[0]).all()
    assert group.ledger.elements(reason="test") == (4 + n) * x.size
    assert group.ledger.calls(group="world", group_size=n) == 5


@given(RANKS)
def test_an_overwritten_view_keeps_its_neighbours(ranks, n):
    """An all-reduce over a view that is not contiguous changes the view and nothing else."""
    ranks.run(n, reduce_columns)


def reduce_columns(group):
    x = np.full((3, 4), float(group.rank))
    group.all_reduce(x[:, 1:3], "test")
    assert (x[:, 1:3] == sum(range(group.size))).all() and (x[:, [0, 3]] == group.rank).all()


@given(RANKS, st.booleans())
def test_what_the_first_rank_finds_all_ranks_find(ranks, n, fails):
    """A result or a UserError of one rank is that of all, in the same place."""
    ranks.run(n, agree_with_the_first, fails)


def agree_with_the_first(group, fails):
    def look():
        assert group.rank == 0, "only the first rank looks"
        if fails:
            raise UserError("There is no such file.")
        return ["what", "it", "found"]

    try:
        assert group.from_first(look) == ["what", "it", "found"] and not fails
    except UserError as error:
        assert fails and str(error) == "There is no such file."


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_places_are_megatrons(t, d, p):
    """Tensor-parallel ranks are neighbours, then data-parallel ones, then stages; every place is taken once."""
    c = ParallelConfig(t, p, d)
    places = [place(rank, c) for rank in range(c.world_size)]
    assert places == [Place(i, r, stage) for stage in range(p) for r in range(d) for i in range(t)]


def test_groups_of_eight_ranks(ranks):
    """t = 2, d = 4: pairs of neighbours hold one model, even and odd ranks hold the same shards."""
    found = ranks.run(8, members, 2)
    assert [tensor for tensor, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [data for _, data in found] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4


def members(group, t):
    topology = connect(group, ParallelConfig.for_world(group.size, t))
    me = np.array([group.rank])
    found = [part.all_gather(me, 0, "test").tolist() for part in (topology.tensor, topology.data)]
    disconnect(topology)
    return found


def test_ring_bytes_are_those_of_the_papers():
    """An all-reduce of N elements over n ranks sends 2 (n-1)/n N elements from each; halves of it send half."""
    ledger = Ledger()
    with ledger.phase("forward"):
        for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            ledger.record(operation, "tensor", 8, "test", 1000, "float32")
    assert list(ledger.totals)[0] == Entry("all_reduce", "tensor", 8, "forward", "test", "float32")
    assert [ring_bytes(e, t) for e, t in ledger.totals.items()] == [7000, 3500, 3500, 3500]
    assert all(t == Total(1, 1000) and wire_bytes(e, t) == 4000 for e, t in ledger.totals.items())
    assert wire_bytes(Entry("broadcast", "tensor", 8, "", "", "int64"), Total(2, 1000)) == 8000
    assert ring_bytes(Entry("all_reduce", "tensor", 1, "", "", "float32"), Total(1, 1000)) == 0
