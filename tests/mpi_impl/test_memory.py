"""Ranks hold the predicted bytes exactly, and the bytes of arrays are those that the process allocates."""
import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.prediction.predict import predict
from mpi_impl.prediction.rank import ImaginedWorld
from mpi_impl.reports import layer_memory, memory
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import CP_COMM_TYPES, ModelConfig, ParallelConfig, Recompute
from reference.costs.activation_inventory import ActivationInventory, StageBytes, total
from reference.optimizer import OptimizerConfig
from reference.precision import FORMATS, Precision
from tests.deep import one_fast_of
from tests.strategies import ANY_MODEL, Case, cases, recomputes
from tests.training_theorems import Plan, connected, dealt

FLOAT32 = Precision("float32")
PRECISIONS = st.sampled_from([Precision(name) for name in FORMATS])
SCHEDULES = st.sampled_from([(1, "1f1b", None), (1, "zb-h1", None), (2, "gpipe", None), (2, "1f1b", None),
                             (2, "zb-h1", None), (2, "interleaved", 2), (2, "zb-v", None)])


# ---- activations ----------------------------------------------------------------------------------------------------


@given(cases(architectures=ANY_MODEL), recomputes(), PRECISIONS)
def test_the_account_of_a_layer_is_exact(ranks, case, recompute, precision):
    """Until its backward, and from I to W: whatever format, activation, dropout, positions, split and recompute."""
    parallel = ParallelConfig(case.t, sequence_parallel=case.sequence_parallel,
                              keep_gathered_inputs=case.keep_gathered_inputs, recompute=recompute)
    inventory = ActivationInventory(case.model, case.b, case.s, precision, parallel)
    expected = StageBytes(total(inventory.layer()), total(inventory.layer_deferred()))
    assert ranks.run(case.t, measured_layer, inventory) == [expected] * case.t


def measured_layer(group, inventory):
    return layer_memory.measure_layer(inventory, group)


@settings(max_examples=settings().max_examples // 3)
@given(cases(sizes=st.sampled_from([1, 2, 3]), architectures=ANY_MODEL, num_layers=4), SCHEDULES, recomputes(),
       st.integers(1, 4), PRECISIONS, st.integers(0, 3), st.booleans())
def test_a_run_holds_what_is_predicted(ranks, case, schedule, recompute, m, precision, zero_stage, cpu_offload):
    """All of it, on every rank: states, offloaded ones too, and the peak of activations, with every schedule.

    Ranks of a pipeline differ; replicas do not.
    """
    p, name, v = schedule
    d, m = 2 if case.t * p <= 4 else 1, 2 * m
    plan = Plan(p, name, v, zero_stage=zero_stage, cpu_offload=cpu_offload and zero_stage > 0, recompute=recompute)
    for one in ranks.run(case.t * p * d, memory_of_a_run, case, plan, m, precision):
        assert one.as_predicted, [x for x in one.compared if x[1]!=x[2]]
        assert len(one.compared) == 8


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_an_instance_holds_what_as_many_replicas_hold(ranks, zero_stage):
    """Hybrid sharding on four replicas, two in each instance, takes the memory of ZeRO on two."""
    case, plan = Case(1, ModelConfig(2, 8, 2, 11, 4), b=2, s=4, seed=1), Plan(bucket_size=100, zero_stage=zero_stage)
    expected = ranks.run(2, memory_of_a_run, case, plan, 1, FLOAT32)
    found = ranks.run(4, memory_of_a_run, case, replace(plan, instances=2), 1, FLOAT32)
    assert found == 2 * expected and all(one.as_predicted for one in found)


@pytest.mark.parametrize("recompute", [Recompute(), Recompute("selective")], ids=lambda r: r.granularity)
@pytest.mark.parametrize("way", CP_COMM_TYPES)
def test_every_way_to_attend_over_ranks(ranks, way, recompute):
    """Several samples, heads and dimensions, so that no other order of axes is the same array."""
    case = Case(1, ModelConfig(2, 24, 4, 11, 8, "rope", num_query_groups=2), b=2, s=8, seed=1)
    for one in ranks.run(2, memory_of_a_run, case, Plan(c=2, cp_comm_type=way, recompute=recompute), 1, FLOAT32):
        assert one.as_predicted, one.compared


@settings(max_examples=settings().max_examples // 2)
@given(cases(sizes=st.sampled_from([1, 2]), architectures=ANY_MODEL, num_layers=4, experts=2), SCHEDULES, recomputes(),
       PRECISIONS, st.integers(0, 3), st.sampled_from([1, 2]))
def test_a_run_with_experts_holds_what_is_predicted(ranks, case, schedule, recompute, precision, zero_stage, e):
    """Two kinds of states; and activations, but where the number of tokens that come to a rank's experts is the data's.
    """
    p, name, v = schedule
    plan = Plan(p, name, v, zero_stage=zero_stage, recompute=recompute, e=e)
    found = ranks.run(case.t * p * 2, memory_of_a_run, case, plan, 4, precision)
    assert any(one.even for one in found) == (e > 1)
    for one in found:
        assert one.as_predicted, [x for x in one.compared if x[1] != x[2]]
        assert len(one.compared) == 8 - 2 * one.even


@settings(max_examples=settings().max_examples // 2)
@given(st.data(), st.sampled_from([(1, 2), (1, 3), (2, 2)]), st.sampled_from(CP_COMM_TYPES), SCHEDULES, recomputes(),
       PRECISIONS, st.integers(0, 3))
def test_a_rank_with_some_positions_holds_what_is_predicted(ranks, data, sizes, way, schedule, recompute, precision,
                                                            zero_stage):
    """Attention keeps no probabilities, but where heads are exchanged for positions."""
    (t, c), (p, name, v) = sizes, schedule
    case = data.draw(cases(sizes=st.just(t), architectures=ANY_MODEL, num_layers=4, c=c,
                           heads_of=c if way == "a2a" else 1))
    p, name, v = (p, name, v) if t * p * c <= 8 else (1, "1f1b", None)
    plan = Plan(p, name, v, zero_stage=zero_stage, recompute=recompute, c=c, cp_comm_type=way)
    for one in ranks.run(t * p * c, memory_of_a_run, case, plan, 2 * p, precision):
        assert one.as_predicted, [x for x in one.compared if x[1] != x[2]]


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("selective"), Recompute("full"),
                                       Recompute("full", num_layers=3), Recompute("full", "block", 2)],
                         ids=lambda r: f"{r.granularity}-{r.method}-{r.num_layers}")
def test_every_way_to_recompute(ranks, recompute, positions):
    """The two stages have three and two layers, which share rope's tables."""
    case = Case(1, ModelConfig(5, 8, 2, 11, 4, positions), b=2, s=4, seed=1)
    for one in ranks.run(2, memory_of_a_run, case, Plan(2, recompute=recompute), 2, FLOAT32):
        assert one.as_predicted, one.compared


def memory_of_a_run(group, case, plan, m, precision):
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = train(case, topology, m, precision)
        return memory.rank_memory(trainer, predicted(trainer, case, m))


def predicted(trainer, case, m):
    """Return the prediction of this rank."""
    world, topology = trainer.topology.world, trainer.topology
    imagined = ImaginedWorld(case.model, topology.config, trainer.state.precision, case.b, case.s, m)
    return predict(imagined, world.rank, imagined.colors())


def train(case, topology, m, precision=FLOAT32, steps=2):
    trainer = Trainer(ModelState(case.model, topology, case.seed, precision), OptimizerConfig(1e-3, 10))
    trainer.measured = True
    batch = m * topology.data.size * case.b
    for _ in range(steps):
        trainer.step(dealt(trainer, case.b, case.batch("", batch)), batch)
    return trainer


# ---- the process ----------------------------------------------------------------------------------------------------

MEDIUM = Case(1, ModelConfig(4, 128, 4, 250, 16), b=1, s=16, seed=1)
LARGE = Case(1, ModelConfig(4, 192, 4, 250, 16), b=1, s=16, seed=1)      # Python's own objects are 0.06 to 0.09 MB


@pytest.mark.parametrize("stage, offloaded_to", one_fast_of(3, [
    (0, ""), (1, ""), (3, ""), (2, ""), (1, "memory"), (1, "files"), (3, "files"), (3, "memory")]))
def test_what_is_held_is_what_the_process_allocates(ranks, tmp_path, stage, offloaded_to):
    """NumPy tells tracemalloc of every array. Shards offloaded to files take none of the process's memory."""
    plan = Plan(zero_stage=stage, cpu_offload=bool(offloaded_to))
    for held, *allocated in ranks.run(2, allocations, LARGE, plan, str(tmp_path) if offloaded_to == "files" else None):
        expected = sum(held[:3]) + (0 if offloaded_to == "files" else held.offloaded)
        assert bool(held.offloaded) == bool(offloaded_to) and allocated == pytest.approx([expected] * 2, rel=0.05)


def allocations(group, case, plan, folder):
    """Return the bytes that a rank holds and has allocated: after a Trainer's construction, and after a step."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        for traced in (False, True):         # the first time, modules are imported and the like
            if traced:
                gc.collect()
                tracemalloc.start()
            try:
                trainer = Trainer(ModelState(case.model, topology, case.seed, FLOAT32, offload_folder=folder),
                                  OptimizerConfig(1e-3, 10))
                gc.collect()
                constructed = tracemalloc.get_traced_memory()[0]
                tokens = case.ids("tokens", 2, case.s)
                trainer.step(dealt(trainer, 1, GPTBatch(tokens, tokens)), 2)
                gc.collect()
                stepped = tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
        return trainer.held(), constructed, stepped


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(), Plan(zero_stage=1), Plan(zero_stage=2), Plan(zero_stage=3),
                                  Plan(zero_stage=3, cpu_offload=True)])
def test_the_report(ranks, plan):
    """One row for ranks that hold as much: Psi, what was measured, and that it is the formula's; alike on all ranks."""
    texts, everyone = zip(*ranks.run(3, report_of_a_run, MEDIUM, plan))
    assert len(set(texts)) == 1
    report, psi, n = texts[0], everyone[0].psi + everyone[0].padding, 3
    published = {0: 16 * psi, 1: 8 * psi + 8 * psi // n, 2: 4 * psi + 12 * psi // n, 3: 16 * psi // n}[plan.zero_stage]
    assert everyone[0].held.states == published
    row = report.splitlines()[2].split()
    assert row[:4] == ["0", "to", "2", f"{psi:,}"] and row[4] == f"{everyone[0].held.parameters:,}"
    assert "NOT" not in report and f"{published:,}\n" in report + "\n"
    assert ("padded by" in report) == (everyone[0].padding > 0)
    if plan.zero_stage:
        assert everyone[0].padding > 0, "then this test shows less than it could"
    papers = {2: [16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n],
              4: [18 * psi, 6 * psi + 12 * psi / n, 2 * psi + 16 * psi / n, 18 * psi / n]}
    for line, two, four in zip(report.splitlines()[-4:], papers[2], papers[4], strict=True):
        assert f"{two:,.0f}" in line and f"{four:,.0f}" in line


def report_of_a_run(group, case, plan):
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = train(case, topology, m=1, steps=1)
        mine = predicted(trainer, case, 1)
        return memory.report(trainer, [mine]), memory.rank_memory(trainer, mine)


def test_a_report_names_ranks_that_differ(ranks):
    """The stages of a pipeline. And what is not as predicted is called so."""
    lines = ranks.run(4, wrong_report, MEDIUM, Plan(2, bucket_size=1))[0].splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["0 to 1", "2 to 3"]
    assert all(line.count("NOT") == 2 for line in lines[2:4]), "gradients, and with them the sum"


def wrong_report(group, case, plan):
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = train(case, topology, m=2, steps=1)
        trainer.state.gradients.own.flat = np.concatenate([trainer.state.gradients.own.flat, np.zeros(1, np.float32)])
        everyone = topology.pipeline.allgather_objects(predicted(trainer, case, 2))
        return memory.report(trainer, everyone)


def test_ranks_are_named_in_spans():
    assert memory.spans([0, 1, 2, 4, 6, 7]) == "0 to 2, 4, 6 to 7" and memory.spans([3]) == "3"


@given(cases(), recomputes())
def test_the_tables_add_up(case, recompute):
    """A layer's items add up to the printed sums, and the steps lead from the formula's bytes to ours in 16 bits."""
    inventory = ActivationInventory(case.model, case.b, case.s, FLOAT32, ParallelConfig(
        case.t, sequence_parallel=case.sequence_parallel, keep_gathered_inputs=case.keep_gathered_inputs,
        recompute=recompute))
    ours = total(inventory.layer())
    head, *items, end = layer_memory.layer_table(inventory, ours).split("In 16 bits")[0].splitlines()
    assert len(items) == len(inventory.layer()) and end.startswith("sum") and end.endswith("measured: = the sum")
    assert f" {ours:,}  " in end and layer_memory.layer_table(inventory, ours + 1).count("NOT") == 1
    steps = layer_memory.layer_table(inventory, ours).split("In 16 bits")[1].splitlines()[1:]
    signed = sum(int(line.split()[1].replace(",", "")) * (1 if line.split()[0] == "+" else -1) for line in steps)
    narrow = replace(inventory, precision=layer_memory.HALF)
    assert total(narrow.layer()) == layer_memory.layer_formula(inventory) + signed
