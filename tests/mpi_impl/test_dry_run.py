"""A rank of an imagined world does what the same rank of a real one does: it holds, sends and awaits the same.
"""
import gc
import weakref
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.ledger import Entry, Total, bytes_between_hosts
from mpi_impl.kernels.fused import launcher
from mpi_impl.parallel.model_state import Held
from mpi_impl.training.batches import Batches
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.parallel.stages import layouts_of_ranks
from reference.precision import FORMATS, Precision
from shardlab.dry_run.matching import match
from shardlab.dry_run.world import DryRun
from shardlab.predict.meta_device import MetaDevice
from shardlab.predict.rank import ImaginedWorld, run_rank
from shardlab.predict.transport import Event
from tests import spy
from tests.cases import Case, Plan
from tests.deep import one_fast_of
from tests.gpu import emulated
from tests.mpi_impl.test_training import ANY_RUN
from tests.plan_cases import REAL
from tests.planted import planted
from tests.training_theorems import Words, trainer_on
from tests.zoo.entry import Bug


def world_of(case: Case, plan: Plan, size: int, m: int, precision: str = "float64") -> ImaginedWorld:
    """Return the world of a case's training, with steps of m microbatches."""
    return ImaginedWorld(case.model, plan.parallel(size, case), Precision(precision), case.b, case.s, m, cudnn=False,
                         optimizer=plan.optimizer(1e-4, 10))


# ---- a real run -----------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 3)
@given(ANY_RUN, st.sampled_from(sorted(FORMATS)))
def test_a_dry_run_is_a_real_run(ranks, run, precision):
    """Every rank's bytes of states and activations, and every line of its ledger, whatever the topology. And every
    message is received, and nobody waits forever.
    """
    size, case, m, plan = run
    world = world_of(case, plan, size, m, precision)
    events = {}
    for rank, (held, sent) in enumerate(ranks.run(size, real_run, case, plan, m, world.precision)):
        found = run_rank(world, rank, measured=True)
        assert known(found.held, world) == known(held, world), f"rank {rank} holds something else"
        assert elements(found.ledger.totals) == elements(sent), f"rank {rank} sends something else"
        events[rank] = found.events
    assert not (mistake := match(events)), mistake


def real_run(group, case, plan: Plan, m: int, precision: Precision) -> tuple[Held, dict[Entry, Total]]:
    """Return what this rank holds and sends in a step."""
    with trainer_on(group, case, plan, precision) as trainer:
        trainer.measured, topology = True, trainer.topology
        batches = Batches(Words(case) if topology.place.tensor == 0 else None, case.model, topology, case.s, case.b, m)
        if trainer.step(batches.microbatches_of("train", 0), batches.global_batch_size).skipped:
            with trainer.ledger.phase("optimizer"):
                trainer.optimizer.iteration += 1        # as in a step whose gradients are finite
                trainer.optimizer.update(trainer.state.gradients.own, 1.0, 0.0)
                trainer.state.zero.finish_update()
        return trainer.held(), dict(group.ledger.totals)


def known(held: Held, world: ImaginedWorld) -> Held:
    """Leave out what depends on the data: the copies that come to a rank's experts."""
    if world.parallel.expert_model_parallel_size > 1:
        return held._replace(activations=None, recomputed=None)
    return held


def elements(totals: dict[Entry, Total]) -> dict[Entry, Total]:
    """Count only the calls of all-to-alls between experts, whose elements depend on the data."""
    return {entry: total._replace(elements=0) if entry.operation == "all_to_all_rows" else total
            for entry, total in totals.items()}


def test_an_instance_in_a_server_sends_its_shards_alone_to_others():
    """Two servers of four: each rank's shard is all-reduced between them once a step, and little else leaves."""
    model = ModelConfig(2, 8, 2, 11, 4, make_vocab_size_divisible_by=1)
    parallel = ParallelConfig(1, 1, 8, zero_stage=2, num_distributed_optimizer_instances=2)
    world = ImaginedWorld(model, parallel, Precision("float32"), 1, 4, 3, replace(REAL, server=4))
    ledger = run_rank(world, 0).ledger
    (layout,) = layouts_of_ranks(model, parallel)
    sent = Counter[str]()
    for entry in ledger.totals:
        sent[entry.group] += round(bytes_between_hosts(ledger, entry) / 4)
    assert sent["shards"] == 0 < ledger.elements(group="shards")
    assert sent["instances"] == layout.shard_size       # 2 (I - 1)/I of it


@pytest.mark.parametrize("causal", [True, False])
def test_all_scores_of_attention_take_time(monkeypatch, causal):
    """4 b s^2 h/t FLOPs a layer forward and 8 backward, as in the planner's formulas: masks hide none of them."""
    done = Counter[bool]()
    monkeypatch.setattr(MetaDevice, "attend", lambda self, flops, backward: done.update({backward: flops}))
    model = ModelConfig(3, 64, 4, 12, 16, attention_dropout=0.0, architecture="gpt" if causal else "bert",
                        heads=("lm",))
    b, s, m = 2, 16, 3
    world = ImaginedWorld(model, ParallelConfig(2, 1, 1), Precision("bfloat16"), b, s, m, REAL, cudnn=True)
    run_rank(world, 0)
    forward = 3 * m * 4 * b * s * s * 64 // 2
    assert done == {False: forward, True: 2 * forward}


# ---- the peak on a GPU ----------------------------------------------------------------------------------------------

GPT = ModelConfig(3, 16, 2, 40, 8, hidden_dropout=0.1, attention_dropout=0.1)
LLAMA = ModelConfig(2, 16, 4, 40, 8, "rope", num_query_groups=2, normalization="RMSNorm", swiglu=True,
                    add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
                    untie_embeddings_and_output_weights=True)


class LiveBytes:
    """The bytes of arrays on the emulated device."""

    def __init__(self):
        self.live = self.peak = 0
        self.known = dict[int, weakref.finalize]()

    def see(self, elements: np.ndarray) -> None:
        own = spy.owner(elements)
        if id(own) not in self.known:
            self.live += own.nbytes
            self.peak = max(self.peak, self.live)
            self.known[id(own)] = weakref.finalize(own, self.forget, id(own), own.nbytes)

    def forget(self, number: int, size: int) -> None:
        del self.known[number]
        self.live -= size

    def counting(self):
        """Return the context in which every array that comes to the device is seen."""
        def to_spy(value, original=spy.to_spy):
            found = original(value)
            spy.replaced(found, spy.SpyArray, lambda x: self.see(x._elements))
            return found

        def init(x, host):
            x._elements = np.array(host)
            self.see(x._elements)

        return mock.patch.multiple(spy, to_spy=to_spy), mock.patch.object(spy.SpyArray, "__init__", init)


@pytest.mark.skipif(emulated.COMPILER is None, reason="no C++ compiler, to emulate a GPU with")
@pytest.mark.parametrize("model, t, plan, d, precision", one_fast_of(4, [
    (GPT, 1, Plan(zero_stage=3), 2, "bfloat16"), (GPT, 2, Plan(zero_stage=2), 2, "float16"),
    (LLAMA, 2, Plan(2, zero_stage=1), 1, "bfloat16"),
    (GPT, 1, Plan(2, "zb-h1", recompute=Recompute("full")), 2, "float32")]))
def test_the_peak_is_a_gpus(ranks, model, t, plan, d, precision):
    """While the model is made, and in a step: every array lives exactly as long, on every rank."""
    case = Case(t, model, 2, 8, seed=1, sequence_parallel=t > 1)
    size = t * plan.p * d
    world = world_of(case, plan, size, 2 * plan.p, precision)
    for rank, (setup, peak) in enumerate(ranks.run(size, peak_on_a_gpu, case, plan, 2 * plan.p, precision)):
        with mock.patch.object(launcher, "THREADS", emulated.THREADS):      # blocks write down sums
            found = run_rank(world, rank)
        assert (found.setup.size, found.peak.size) == (setup, peak)


def peak_on_a_gpu(group, case, plan, m, precision) -> tuple[int, int]:
    """Return the most bytes on the emulated device while the model is made, and in a step."""
    memory, like = LiveBytes(), spy.SpyArray(np.empty(0))
    one, other = memory.counting()
    with emulated.gpu(), one, other, trainer_on(group, case, plan, Precision(precision), like=like) as trainer:
        words = Words(case) if trainer.topology.place.tensor == 0 else None
        batches = Batches(words, case.model, trainer.topology, case.s, case.b, m, like)
        setup, memory.peak = memory.peak, memory.live
        gc.collect()
        trainer.step(batches.microbatches_of("train", 0), batches.global_batch_size)
        return setup, memory.peak


# ---- ranks that wait for one another --------------------------------------------------------------------------------


def mistake_among_ranks(p: int, d: int, **choices) -> str:
    """Return what does not match among one pipeline's messages, and those of some ranks in its other groups, in the
    topology of a trillion parameters (Narayanan et al. 2021, table 1), on 3,072 ranks, with a small model.
    """
    parallel = ParallelConfig(8, p, d, recompute=Recompute("full"), **choices)
    world = ImaginedWorld(ModelConfig(p, 16, 8, 64, 16), parallel, Precision("bfloat16"), 1, 16, 2 * p)
    return DryRun(world).match()[1]


@pytest.mark.deep
def test_ranks_of_a_large_world_match():
    """3,072 ranks, in seconds."""
    assert mistake_among_ranks(64, 6) == ""


# ---- bugs -----------------------------------------------------------------------------------------------------------

BUGS = {     # a bug, and a part of the sentence that names it
    "the first stage alone sums the tied table": (
        Bug("mpi_impl.parallel.model_state", "if self.embedding_group:",
            "if self.embedding_group and self.embedding_group.rank == 0:"),
        "rank 0 waits for rank 2880 in all_reduce of 86 float32 (tied embedding)"),
    "one rank sends the whole activation": (
        Bug("mpi_impl.parallel.pipeline", "if self.scattered_parts > 1:\n            n = y.size",
            "if self.scattered_parts > 1 and self.tensor.rank:\n            n = y.size"),
        "rank 0 sends message 1 of 256 bfloat16 (activation) to rank 192, which expects 32 bfloat16"),
    "a replica's buckets in another order": (
        Bug("mpi_impl.parallel.zero", "for bucket in self.layout.buckets:\n            own = self",
            "for bucket in self.layout.buckets[::-1 if self.group.rank else 1]:\n            own = self"),
        "(parameters) on rank 2880, but all_gather of 2,064 bfloat16 (parameters) on rank 2888"),
}


@pytest.mark.parametrize("name", one_fast_of(3, list(BUGS)))
def test_a_bug_is_found_among_3072_ranks(name):
    bug, sentence = BUGS[name]
    with planted(*bug):
        assert sentence in mistake_among_ranks(16, 24, zero_stage=1)


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
    assert match(programs) == ("The ranks deadlock: rank 0 waits for rank 1 in message 1 of 4 "
                               "float32 (test); rank 1 waits for rank 0 in message 1 of 4 float32 (test).")
    assert match({rank: [*program[::2], program[1]] for rank, program in programs.items()}) == ""
