"""Pipelines without a flush on ranks: what the textbook simulates happens."""
from hypothesis import given, strategies as st

from reference.parallel.stale_weights import NEWEST, WAYS
from tests.reference.test_stale_weights import pipelines
from tests.unflushed_theorems import ranks_do_what_is_simulated


@given(pipelines(), st.sampled_from(WAYS))
def test_ranks_do_what_is_simulated(ranks, drawn, way):
    """A backward meets other weights than its forward in one way only, on all stages but the last."""
    case, p, m = drawn
    mixed = ranks.run(p, ranks_do_what_is_simulated, case, m, way, 0.1)
    assert mixed == [(m - 1) * (way == NEWEST and stage < p - 1) for stage in range(p)]
