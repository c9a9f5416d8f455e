"""A rank of a world that is not there holds and sends what the same rank of a real world does, to the byte."""
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.ledger import Entry, Total, bytes_between_hosts
from mpi_impl.parallel.model_state import Held, ModelState
from mpi_impl.prediction.rank import ImaginedWorld, run_rank
from mpi_impl.prediction.transport import Diary, RecordingTransport
from mpi_impl.runtime.meta_device import MetaDevice
from mpi_impl.training.batches import Batches
from mpi_impl.training.trainer import Trainer
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig
from reference.costs.hardware import RankGroup, collective_time
from reference.optimizer import OptimizerConfig
from reference.parallel.stages import layouts_of_ranks
from reference.precision import FORMATS, Precision
from tests.plan_cases import REAL
from tests.strategies import ANY_MODEL, cases, instances, recomputes
from tests.training_theorems import Plan, Words, connected

PRECISIONS = st.sampled_from([Precision(name) for name in FORMATS])
SCHEDULES = st.sampled_from([(1, "1f1b", None), (1, "zb-h1", None), (2, "gpipe", None), (2, "1f1b", None),
                             (2, "zb-h1", None), (2, "zb-h2", None), (2, "interleaved", 2), (2, "zb-v", None),
                             (4, "1f1b", None)])
SHAPES = st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 1, 2),
                          (2, 1, 2), (1, 2, 2)])       # t, c, e


@settings(max_examples=settings().max_examples // 3)
@given(st.data(), SHAPES, st.sampled_from(CP_COMM_TYPES), SCHEDULES, recomputes(), st.integers(1, 3), PRECISIONS,
       st.integers(0, 3), st.booleans())
def test_a_dry_run_is_a_real_run(ranks, data, shape, way, schedule, recompute, m, precision, zero_stage, offload):
    """Every rank's bytes of states and activations, and every line of its ledger, whatever the topology."""
    (t, c, e), (p, name, v) = shape, schedule
    case = data.draw(cases(sizes=st.just(t), architectures=ANY_MODEL, num_layers=4, c=c,
                           heads_of=c if way == "a2a" else 1, experts=e if e > 1 or data.draw(st.booleans()) else None))
    p, name, v = schedule if t * c * p * e <= 8 else (1, "1f1b", None)
    d = e * data.draw(st.integers(1, 8 // (t * c * p * e)))
    plan = Plan(p, name, v, zero_stage=zero_stage, cpu_offload=offload and zero_stage > 0, recompute=recompute, c=c,
                cp_comm_type=way, e=e, instances=1 if e > 1 else data.draw(instances(c * d, zero_stage), "instances"))
    equals_the_real_run(ranks, case, plan, d, m * p, precision)


def equals_the_real_run(ranks, case, plan: Plan, d: int, m: int, precision: Precision) -> None:
    size = case.t * plan.c * plan.p * d
    world = ImaginedWorld(case.model, plan.parallel(size, case), precision, case.b, case.s, m, cudnn=False)
    colors = world.colors()
    for rank, (held, sent) in enumerate(ranks.run(size, real_run, case, plan, m, precision)):
        found = run_rank(world, rank, colors, measured=True)
        assert known(found.held, world) == known(held, world), f"rank {rank} holds something else"
        assert elements(found.ledger.totals) == elements(sent), f"rank {rank} sends something else"


def real_run(group, case, plan: Plan, m: int, precision: Precision) -> tuple[Held, dict[Entry, Total]]:
    """Return what this rank holds and sends in a step."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, 1234, precision), OptimizerConfig(1e-4, 10))
        trainer.measured = True
        batches = Batches(Words(case) if topology.place.tensor == 0 else None, case.model, topology, case.s, case.b, m)
        trainer.step(batches.microbatches_of("train", 0), batches.global_batch_size)
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


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3])
def test_an_instance_in_a_server_sends_its_shards_alone_to_others(zero_stage, m):
    """Two servers of four: each rank's shard is all-reduced between them once a step, and little else leaves."""
    model = ModelConfig(2, 8, 2, 11, 4, make_vocab_size_divisible_by=1)
    parallel = ParallelConfig(1, 1, 8, zero_stage=zero_stage, num_distributed_optimizer_instances=2)
    world = ImaginedWorld(model, parallel, Precision("float32"), 1, 4, m, replace(REAL, server=4), cudnn=False)
    ledger = run_rank(world, 0, world.colors()).ledger
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
    run_rank(world, 0, world.colors())
    forward = 3 * m * 4 * b * s * s * 64 // 2
    assert done == {False: forward, True: 2 * forward}


def test_an_exchange_takes_the_time_of_the_rows_for_others():
    """A rank's own rows stay where they are; the event says no number of rows, since that depends on the data."""
    device, x = MetaDevice(REAL), np.empty((10, 8), np.float32)
    diary = Diary(device, 4, {})
    RecordingTransport(diary, "expert", (0, 1, 2, 3), 1).all_to_all_rows(x, [1, 5, 2, 2], x, [1, 5, 2, 2])
    assert [(event.call, event.form) for event in diary.events] == [("all_to_all_rows", "0 float32")]
    assert device.seconds == collective_time(REAL, "all_to_all_rows", RankGroup(4, 1, 4), (1 + 2 + 2) * x[0].nbytes) > 0
