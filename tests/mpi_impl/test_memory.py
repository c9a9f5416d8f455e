"""Ranks hold the predicted bytes exactly, and the bytes of arrays are those that the process allocates."""
import gc
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.prediction.predict import predict
from mpi_impl.prediction.rank import ImaginedWorld
from mpi_impl.report import layer_memory, memory
from reference.config import ModelConfig, ParallelConfig
from reference.costs.activation_inventory import ActivationInventory, StageBytes, total
from reference.precision import FORMATS, Precision
from tests.deep import one_fast_of
from tests.mpi_impl.test_training import SAMPLES, runs
from tests.sampled_runs import sampled_runs
from tests.strategies import ANY_MODEL, Case, cases, recomputes
from tests.training_theorems import Plan, batch_of, trainer_on

FLOAT32 = Precision("float32")
PRECISIONS = st.sampled_from([Precision(name) for name in FORMATS])


# ---- activations ----------------------------------------------------------------------------------------------------


@given(cases(architectures=ANY_MODEL), recomputes(), PRECISIONS)
def test_the_account_of_a_layer_is_exact(ranks, case, recompute, precision):
    """Until its backward, and from I to W: whatever format, activation, dropout, positions, split and recompute."""
    inventory = inventory_of(case, recompute, precision)
    expected = StageBytes(total(inventory.layer()), total(inventory.layer_deferred()))
    assert ranks.run(case.t, measured_layer, inventory) == [expected] * case.t


def inventory_of(case, recompute, precision=FLOAT32):
    parallel = ParallelConfig(case.t, sequence_parallel=case.sequence_parallel,
                              keep_gathered_inputs=case.keep_gathered_inputs, recompute=recompute)
    return ActivationInventory(case.model, case.b, case.s, precision, parallel)


def measured_layer(group, inventory):
    return layer_memory.measure_layer(inventory, group)


@settings(max_examples=settings().max_examples // 2)
@given(st.one_of(runs(), runs(least_c=2), runs(experts=True)), PRECISIONS)
def test_any_run_holds_what_is_predicted(ranks, run, precision):
    holds_what_is_predicted(ranks, *run, precision)


@pytest.mark.parametrize("model, number", one_fast_of(17, SAMPLES))
def test_sampled_runs_hold_what_is_predicted(ranks, model, number):
    choices, case, m, plan = sampled_runs(model)[number]
    holds_what_is_predicted(ranks, choices.ranks, case, m, plan, FLOAT32)


def holds_what_is_predicted(ranks, n, case, m, plan, precision):
    """Compare all of it, on every rank: states, offloaded ones too, and the peak of activations.

    Where experts are dealt out, the number of tokens that come to a rank's experts is the data's.
    """
    found = ranks.run(n, memory_of_a_run, case, plan, m, precision)
    assert any(one.even for one in found) == (plan.e > 1)
    for one in found:
        assert one.as_predicted, [line for line in one.compared if line[1] != line[2]]
        assert len(one.compared) == len(one.expected) - 2 * one.even


def memory_of_a_run(group, case, plan, m, precision):
    with trained_on(group, case, plan, m, precision) as trainer:
        return memory.rank_memory(trainer, predicted(trainer, case, m))


def predicted(trainer, case, m):
    """Return the prediction of this rank."""
    world, config = trainer.topology.world, trainer.topology.config
    imagined = ImaginedWorld(case.model, config, trainer.state.precision, case.b, case.s, m)
    return predict(imagined, world.rank, imagined.colors())


@contextmanager
def trained_on(group, case, plan, m, precision=FLOAT32, steps=2):
    """Yield a trainer that has measured some steps."""
    with trainer_on(group, case, plan, precision) as trainer:
        trainer.measured = True
        for _ in range(steps):
            trainer.step(*batch_of(trainer, case, m))
        yield trainer


# ---- the process ----------------------------------------------------------------------------------------------------

LARGE = Case(1, ModelConfig(4, 192, 4, 250, 16), b=1, s=16, seed=1)      # Python's own objects are 0.06 to 0.09 MB


@pytest.mark.parametrize("stage, offloaded_to", one_fast_of(2, [(0, ""), (2, ""), (3, "files"), (1, "memory")]))
def test_what_is_held_is_what_the_process_allocates(ranks, tmp_path, stage, offloaded_to):
    """NumPy tells tracemalloc of every array. Shards offloaded to files take none of the process's memory."""
    plan = Plan(zero_stage=stage, cpu_offload=bool(offloaded_to))
    for held, *allocated in ranks.run(2, allocations, LARGE, plan, str(tmp_path) if offloaded_to == "files" else None):
        expected = sum(held[:3]) + (0 if offloaded_to == "files" else held.offloaded)
        assert bool(held.offloaded) == bool(offloaded_to) and allocated == pytest.approx([expected] * 2, rel=0.05)


def allocations(group, case, plan, folder):
    """Return the bytes that a rank holds and has allocated: after a Trainer's construction, and after a step."""
    for traced in (False, True):         # the first time, modules are imported and the like
        if traced:
            gc.collect()
            tracemalloc.start()
        try:
            with trainer_on(group, case, plan, FLOAT32, offload_folder=folder) as trainer:
                gc.collect()
                constructed = tracemalloc.get_traced_memory()[0]
                trainer.step(*batch_of(trainer, case, 1))
                gc.collect()
                stepped = tracemalloc.get_traced_memory()[0]
                held = trainer.held()
        finally:
            tracemalloc.stop()
        del trainer
    return held, constructed, stepped


# ---- what is said ---------------------------------------------------------------------------------------------------

MEDIUM = Case(1, ModelConfig(4, 128, 4, 250, 16), b=1, s=16, seed=1)


@pytest.mark.parametrize("plan", [Plan(), Plan(zero_stage=1), Plan(zero_stage=2), Plan(zero_stage=3, cpu_offload=True)])
def test_the_report(ranks, plan):
    """One row for ranks that hold as much, with the papers' bytes of states; identical on all ranks."""
    texts, everyone = zip(*ranks.run(3, report_of_a_run, MEDIUM, plan))
    assert len(set(texts)) == 1
    report, psi, n = texts[0], everyone[0].psi + everyone[0].padding, 3
    published = {0: 16 * psi, 1: 8 * psi + 8 * psi // n, 2: 4 * psi + 12 * psi // n, 3: 16 * psi // n}[plan.zero_stage]
    assert everyone[0].held.states == published
    row = report.splitlines()[2].split()
    assert row[:4] == ["0", "to", "2", f"{psi:,}"] and row[4] == f"{everyone[0].held.parameters:,}"
    assert "NOT" not in report and f"{published:,}\n" in report + "\n"
    assert ("padded by" in report) == (everyone[0].padding > 0) == (plan.zero_stage > 0)
    papers = {2: [16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n],
              4: [18 * psi, 6 * psi + 12 * psi / n, 2 * psi + 16 * psi / n, 18 * psi / n]}
    for line, two, four in zip(report.splitlines()[-4:], papers[2], papers[4], strict=True):
        assert f"{two:,.0f}" in line and f"{four:,.0f}" in line


def report_of_a_run(group, case, plan):
    with trained_on(group, case, plan, m=1, steps=1) as trainer:
        mine = predicted(trainer, case, 1)
        return memory.report(trainer, [mine]), memory.rank_memory(trainer, mine)


def test_a_report_names_ranks_that_differ(ranks):
    """The stages of a pipeline. And what is not as predicted is called so."""
    lines = ranks.run(4, wrong_report, MEDIUM, Plan(2, bucket_size=1))[0].splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["0 to 1", "2 to 3"]
    assert all(line.count("NOT") == 2 for line in lines[2:4]), "gradients, and with them the sum"


def wrong_report(group, case, plan):
    with trained_on(group, case, plan, m=2, steps=1) as trainer:
        trainer.state.gradients.own.flat = np.concatenate([trainer.state.gradients.own.flat, np.zeros(1, np.float32)])
        return memory.report(trainer, trainer.topology.pipeline.allgather_objects(predicted(trainer, case, 2)))


@given(cases(), recomputes())
def test_the_tables_add_up(case, recompute):
    """A layer's items add up to the printed sums, and the steps lead from the formula's bytes to ours in 16 bits."""
    inventory = inventory_of(case, recompute)
    ours = total(inventory.layer())
    head, *items, end = layer_memory.layer_table(inventory, ours).split("In 16 bits")[0].splitlines()
    assert len(items) == len(inventory.layer()) and end.startswith("sum") and end.endswith("measured: = the sum")
    assert f" {ours:,}  " in end and layer_memory.layer_table(inventory, ours + 1).count("NOT") == 1
    steps = layer_memory.layer_table(inventory, ours).split("In 16 bits")[1].splitlines()[1:]
    signed = sum(int(line.split()[1].replace(",", "")) * (1 if line.split()[0] == "+" else -1) for line in steps)
    narrow = replace(inventory, precision=layer_memory.HALF)
    assert total(narrow.layer()) == layer_memory.layer_formula(inventory) + signed
