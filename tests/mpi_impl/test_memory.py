"""Ranks hold the predicted bytes exactly, and the bytes of arrays are those that the process allocates."""
import gc
import re
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.models.model import sequences_of
from reference.precision import FORMATS, Precision
from shardlab.predict.predict import predict
from shardlab.predict.rank import ImaginedWorld
from shardlab.report import layer_memory, memory
from tests.deep import one_fast_of
from tests.mpi_impl.test_training import SAMPLES
from tests.sampled_runs import muon_runs, sampled_runs
from tests.strategies import ANY_MODEL, Case, cases, recomputes
from tests.training_theorems import Plan, batch_of, trainer_on

FLOAT32, HALF = Precision("float32"), Precision("bfloat16")


# ---- activations ----------------------------------------------------------------------------------------------------


@given(cases(architectures=ANY_MODEL), recomputes())
def test_a_layer_keeps_what_the_paper_counts(ranks, case, recompute):
    """Until its backward, in 16 bits, but for the named differences: for every activation, dropout, split, and norm."""
    run = run_of(case, recompute)
    choices = replace(run, micro_batch_size=run.micro_batch_size * sequences_of(case.model))
    expected = layer_memory.explained(choices) + of_other_models(choices)
    assert [layer.bytes for layer in ranks.run(case.t, measured_layer, run)] == [expected] * case.t


def of_other_models(run):
    """Return the bytes of a layer in 16 bits that the paper's GPT has not, or has otherwise."""
    c, t = run.model, run.parallel.tensor_model_parallel_size
    if run.parallel.recompute.granularity == "full":
        return 0
    tokens = run.micro_batch_size * run.seq_length
    rope = 2 * run.seq_length * c.rotary_size if c.position_embedding_type == "rope" else 0
    heads = c.num_attention_heads // t + max(1, c.groups // t) if c.qk_layernorm else 0
    signs = c.activation == "relu" and not c.swiglu      # a byte each, not two
    return rope + 4 * tokens * heads - (signs + 2 * c.squared_relu) * tokens * c.ffn_size // t


@given(cases(llama=False))
def test_what_waits_for_w_is_32_sbh(ranks, case):
    """Qi et al. 2023, table 1, of t ranks; also where other inputs were gathered, or recomputed."""
    run = run_of(case, Recompute())
    assert {layer.deferred for layer in ranks.run(case.t, measured_layer, run)} == {layer_memory.deferred_formula(run)}


def run_of(case, recompute, precision=HALF):
    parallel = ParallelConfig(case.t, sequence_parallel=case.sequence_parallel,
                              keep_gathered_inputs=case.keep_gathered_inputs, recompute=recompute)
    return ImaginedWorld(case.model, parallel, precision, case.b, case.s, 1)


def measured_layer(group, run):
    return layer_memory.measure_layer(run, group)


@pytest.mark.parametrize("model, number", one_fast_of(17, SAMPLES))
@pytest.mark.parametrize("runs", [sampled_runs, muon_runs])
def test_a_run_holds_what_is_predicted(ranks, runs, model, number):
    """All of it, on every rank: states, offloaded ones too, and the peak of activations.

    Where experts are dealt out, the number of tokens that come to a rank's experts is the data's.
    """
    choices, case, m, plan = runs(model)[number]
    precision = Precision(sorted(FORMATS)[number % len(FORMATS)])
    found = ranks.run(choices.ranks, memory_of_a_run, case, plan, m, precision)
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
    imagined = ImaginedWorld(case.model, config, trainer.state.precision, case.b, case.s, m,
                             optimizer=trainer.optimizer.config)
    return predict(imagined, world.rank)


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
    for line, two in zip(report.splitlines()[-4:], (16 * psi, 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n,
                                                    16 * psi / n), strict=True):
        assert f"{two:,.0f}" in line


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


def test_the_tables_of_a_layer(ranks):
    """Each way to keep less has its measured bytes beside the paper's; and each array is a row, once."""
    model = ModelConfig(2, 24, 4, 11, 26)
    runs = {name: ImaginedWorld(model, parallel, HALF, 3, 26, 1) for name, parallel in layer_memory.variants(2).items()}
    layers = {name: ranks.run(2, measured_layer, run)[0] for name, run in runs.items()}
    table = layer_memory.variants_table({name: {run: layers[name]} for name, run in runs.items()})
    for line, name in zip(table.splitlines()[1:], runs):
        first, measured, *_ = re.split(" {2,}", line.strip())
        assert (first, number(measured)) == (name, layers[name].bytes)
    assert "NOT" not in table
    *rows, end = layer_memory.arrays_table(layers[name]).splitlines()[1:]
    assert sum(number(row.split()[-1]) for row in rows) == number(end.split()[-1]) == layers[name].bytes


def number(cell):
    return int(cell.replace(",", ""))
