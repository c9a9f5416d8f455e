"""The messages of ranks that are not there match; and where a bug is planted, the mistake is named."""
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.topology import place, rank_at
from mpi_impl.dry_runs.matching import match
from mpi_impl.dry_runs.world import kinds_of_ranks, ranks_to_match
from mpi_impl.prediction.transport import Event
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig
from tests.cases import Case, Plan
from tests.deep import one_fast_of
from tests.dry_run_theorems import all_ranks_match, kinds_of_ranks_match, large_world, world_of
from tests.planted import planted
from tests.strategies import instances
from tests.zoo.entry import Bug

SHAPES = st.sampled_from([(3, 1, 1, 1), (2, 1, 2, 2), (1, 3, 1, 2), (2, 2, 2, 1), (1, 1, 4, 2), (1, 2, 3, 2),
                          (1, 1, 1, 5)])
MODEL = ModelConfig(8, 24, 6, 11, 36, make_vocab_size_divisible_by=3)


@settings(max_examples=settings().max_examples // 3)
@given(st.data(), SHAPES, st.integers(0, 3), st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"]),
       st.sampled_from(CP_COMM_TYPES), st.booleans())
def test_ranks_match(data, shape, zero_stage, schedule, way, sharded):
    """All ranks of a world: every message is received, and nobody waits for ever."""
    t, c, p, d = shape
    schedule = schedule if p > 1 else "1f1b"
    case = Case(t, MODEL, 1, 36, seed=1, sequence_parallel=sharded and t > 1)
    plan = Plan(p, schedule, 2 if schedule == "interleaved" else None, zero_stage=zero_stage, c=c,
                cp_comm_type=way if t * c <= 6 and 6 % (t * c) == 0 else "p2p",
                instances=data.draw(instances(c * d, zero_stage), "instances"))
    all_ranks_match(world_of(case, plan, t * c * p * d, m=p))


@pytest.mark.deep
@pytest.mark.parametrize("p, d", [(16, 24), (64, 6)])
def test_ranks_of_a_large_world_match(p, d):
    """3,072 ranks, in seconds."""
    kinds_of_ranks_match(large_world(p, d))


@given(st.builds(ParallelConfig, *(st.integers(1, 5) for _ in range(3)), context_parallel_size=st.integers(1, 3)))
def test_places_and_ranks(c):
    """A place is a rank's, and of each group of the first and the last stage several ranks are matched."""
    assert [rank_at(place(rank, c), c) for rank in range(c.world_size)] == list(range(c.world_size))
    chosen = ranks_to_match(c)
    assert {place(rank, c).pipeline for rank in chosen} == set(range(c.pipeline_model_parallel_size))
    assert {0, c.world_size // c.pipeline_model_parallel_size - c.tensor_model_parallel_size} <= {
        *chosen, rank_at(place(0, c)._replace(data=c.data_parallel_size - 1, context=c.context_parallel_size - 1), c)}


def test_kinds_of_ranks():
    """The first stage embeds, the last has the logits; those between are one kind, or two if layers do not divide."""
    world = large_world(p=16, d=24)
    assert [kind.pipeline_ranks for kind in kinds_of_ranks(world)] == [[0], list(range(1, 15)), [15]]
    uneven = world_of(Case(1, ModelConfig(6, 8, 2, 11, 4), 1, 4, seed=1), Plan(4), 4, m=4)
    assert [kind.pipeline_ranks for kind in kinds_of_ranks(uneven)] == [[0], [1], [2], [3]]
    assert [kind.counts.layers for kind in kinds_of_ranks(uneven)] == [2, 2, 1, 1]


# ---- bugs -----------------------------------------------------------------------------------------------------------

PIPELINE, STATE, TRAINER = "mpi_impl.parallel.pipeline", "mpi_impl.parallel.model_state", "mpi_impl.training.trainer"
LOSS = 'self.topology.pipeline.broadcast(found, "loss", self.state.last_rank)'
BUGS = {     # a bug, and a part of the sentence that names it
    "the first stage alone sums the tied table": (
        Bug(STATE, "if self.embedding_group:", "if self.embedding_group and self.embedding_group.rank == 0:"),
        "rank 0 waits for rank 2880 in all_reduce of 86 float32 (tied embedding)"),
    "one rank sends the whole activation": (
        Bug(PIPELINE, "if self.scattered_parts > 1:\n            n = y.size",
            "if self.scattered_parts > 1 and self.tensor.rank:\n            n = y.size"),
        "rank 0 sends message 1 of 256 bfloat16 (activation) to rank 192, which expects 32 bfloat16"),
    "the first stage does not wait for the loss": (
        Bug(TRAINER, LOSS, f"({LOSS} if self.topology.place.pipeline else found)"),
        "(gradient norm); rank 192 waits for rank 0 in broadcast of 1 float64 (loss)"),
    "gradients go one stage too far": (
        Bug(PIPELINE, "post_send(y, step.to, tag",
            "post_send(y, (step.to + (step.action.kind == 'B')) % self.group.size, tag"),
        "(gradient); rank 2880 waits for rank 2688 in message"),
    "a replica's buckets in another order": (
        Bug("mpi_impl.parallel.zero", "for bucket in self.layout.buckets:\n            own = self",
            "for bucket in self.layout.buckets[::-1 if self.group.rank else 1]:\n            own = self"),
        "(parameters) on rank 2880, but all_gather of 2,064 bfloat16 (parameters) on rank 2888"),
}


@pytest.mark.parametrize("name", one_fast_of(5, list(BUGS)))
def test_a_bug_is_found_among_3072_ranks(name):
    bug, sentence = BUGS[name]
    world = large_world(p=16, d=24, zero_stage=1)
    with planted(*bug), pytest.raises(AssertionError) as failure:
        kinds_of_ranks_match(world)
    assert sentence in str(failure.value)


# ---- events ---------------------------------------------------------------------------------------------------------


def event(kind, call="all_reduce", form="4 float32", ranks=(0, 1), number=0):
    return Event(kind, "data", ranks, call, form, "test", number)


def test_what_does_not_match_is_named():
    """Another operation, another size, a message that nobody receives, and one that nobody sends."""
    whole, other = event("collective"), event("collective", form="5 float32")
    assert match({0: [whole], 1: [whole]}) == "" == match({0: [whole], 2: []})
    assert "all_reduce of 4 float32 (test) on rank 0, but all_reduce of 5 float32" in match({0: [whole], 1: [other]})
    assert "rank 0 waits for rank 1 in all_reduce" in match({0: [whole], 1: []})
    send, receive = event("send", "message 1"), event("receive", "message 1")
    assert match({0: [send], 1: [receive]}) == ""
    assert "rank 0 sends message 1 of 4 float32 (test), which rank 1 never receives" in match({0: [send], 1: []})
    assert "rank 1 expects message 1 of 4 float32 (test), which rank 0 never sends" in match({0: [], 1: [receive]})
    assert "which expects 5 float32" in match({0: [send], 1: [receive._replace(form="5 float32")]})


def test_a_send_waits_for_its_receive():
    """Two ranks that both send first and wait, as MPI lets them while messages are small."""
    programs = {rank: [event("send", "message 1", ranks=(rank, 1 - rank)),
                       event("wait", "message 1", ranks=(rank, 1 - rank)),
                       event("receive", "message 1", ranks=(1 - rank, rank), number=1)] for rank in range(2)}
    assert match(programs) == ("The ranks wait for one another for ever: rank 0 waits for rank 1 in message 1 of 4 "
                               "float32 (test); rank 1 waits for rank 0 in message 1 of 4 float32 (test).")
    assert match({rank: [*program[::2], program[1]] for rank, program in programs.items()}) == ""
