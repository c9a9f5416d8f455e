"""The benchmarks: profiles from measurements, and that what is measured can run."""
import json
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig, ParallelConfig
from reference.costs.hardware import Passes
from reference.costs.plans import LayerCounts, Plan
from reference.costs.step_time import work_of
from shardlab.plan.profiles import load
from tests.launching import environment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
calibrate, cuda_step, fusion, gpu_rounds, machine, overlap_ranks, steps = map(import_module, (
    "calibrate", "cuda_step", "fusion", "gpu_rounds", "machine", "contenders.overlap_ranks", "steps"))

BARE = replace(load("dgx-a100"), passes=Passes(*[(0.0, 0.0)] * 5), overhead=(0.0, 0.0), element_bytes=4)


# ---- calibrate: from measurements to a profile ----------------------------------------------------------------------


@given(st.lists(st.floats(1e-9, 1e-7), min_size=10, max_size=10))
def test_the_factors_of_times_that_are_such_sums_are_found(factors):
    """A profile is found whose model of time gives what the shards took, forward and backward."""
    truth = replace(BARE, passes=Passes(*((forward * BARE.bandwidth / 4, backward * BARE.bandwidth / 4)
                                          for forward, backward in zip(factors[:2], factors[2:4])),
                                        (0.0, 0.0), *((forward * BARE.bandwidth / 4, backward * BARE.bandwidth / 4)
                                                      for forward, backward in zip(factors[4:6], factors[6:8]))),
                    overhead=(1e3 * factors[8], 1e3 * factors[9]))
    times = {shard: seconds(truth, shard) for shard in machine.SHARDS}
    found = calibrate.with_kernels(BARE, times)
    for shard, took in times.items():
        assert seconds(found, shard) == pytest.approx(took, rel=1e-6)
    assert found.overhead == pytest.approx(truth.overhead, rel=1e-3)
    assert [way for kind in vars(found.passes).values() for way in kind] == pytest.approx(
        [way for kind in vars(truth.passes).values() for way in kind], rel=1e-3)


def seconds(hardware, shard) -> tuple[float, float]:
    """Return the seconds of a shard's forward and backward by the model of time, without messages."""
    plan = Plan(shard.model, ParallelConfig(shard.t), m=1, b=shard.b)
    work = work_of(plan, hardware, LayerCounts(shard.L, 0, True, True))
    return tuple(sum(part.products + part.kernels for part in parts) for parts in (work[:1], work[1:]))


# ---- what ranks run -------------------------------------------------------------------------------------------------


def test_ranks_take_the_steps_of_a_plan_on_either_clock(ranks):
    """The slowest rank's time is every rank's."""
    model = ModelConfig(2, 16, 2, 32, 8, hidden_dropout=0, attention_dropout=0)
    for virtual in (False, True):
        found = ranks.run(4, steps.step_seconds, Plan(model, ParallelConfig(2, 2), m=2), virtual, 2)
        assert len(set(found)) == 1 and min(found[0]) > 0


# ---- overlap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [ParallelConfig(data_parallel_size=2, ddp_bucket_size=1),
                                      ParallelConfig(data_parallel_size=2, zero_stage=3),
                                      ParallelConfig(context_parallel_size=2)])
def test_ranks_help_on_what_they_have_posted_while_they_compute(ranks, parallel):
    """Only then, and only if the way is to help; in all ways they wait."""
    kind = "ring" if parallel.context_parallel_size > 1 else "prefetch" if parallel.zero_stage else "buckets"
    case = overlap_ranks.Case(kind, overlap_ranks.gpt(2, 16, 8, 512, 8), parallel, 1)
    for found in ranks.run(2, spent_in_each_way, case):
        assert {way for way, spent in found.items() if spent["help"]} == {"overlapped"}
        assert all(spent["post"] and spent["wait"] for spent in found.values()) and len(found) == 4


def spent_in_each_way(group, case):
    work = overlap_ranks.CaseOnRank(group, case)
    found = {way: work.step(way) for way in overlap_ranks.WAYS}
    overlap_ranks.disconnect(work.topology)
    return found


@pytest.mark.parametrize("name", [*fusion.fused_variants(), *fusion.layout_variants()])
def test_variants_that_are_timed_against_one_another_compute_the_same(name):
    """One operation unfused, in tiles and compiled; and one in both layouts, whose first two axes are exchanged."""
    if name in fusion.fused_variants():
        first, *others = (np.asarray(function()) for function in fusion.fused_variants()[name].values())
    else:
        first, other = (function() for function in fusion.layout_variants()[name].values())
        others = [other if name.startswith("scores") else other.swapaxes(0, 1)]
    for other in others:
        assert np.allclose(other, first, rtol=1e-4, atol=1e-4)


def test_a_contender_that_fails_loses_only_its_own_rounds(tmp_path, monkeypatch):
    """One does not start, and one ends in its first step. The others' turns are in the file, and in the table."""
    broken = {"graph": "raise ValueError('no start')",
              "compiled": "from turns import serve\ndef step(): raise ValueError('no step')\nserve(step)"}
    works = {label: broken.get(key, "from turns import serve\nserve(lambda: None)")
             for key, (label, *_) in gpu_rounds.WAYS.items()}
    monkeypatch.setattr(gpu_rounds, "command_of", lambda way, work: [sys.executable, "-c", works[way.label]])
    options = Namespace(rounds=2, seconds=1e-6, patience=60.0, json=str(tmp_path / "lines"))
    rounds = gpu_rounds.Rounds("h256", cuda_step.GPU_WORKS["h256"], options, time.monotonic() + 60)
    rounds.measure(["ours", "graph", "compiled", "eager", "tuned"], 3 * gpu_rounds.memory_of(rounds.work))
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert rounds.errors == {"graph": "ValueError: no start", "compiled": "ValueError: no step"}
    assert Counter(line["contender"] for line in lines if "ms" in line) == {"ours": 4, "eager": 2, "tuned": 2}
    assert not rounds.alive and "compiled: ValueError: no step\nours / best" in cuda_step.table(rounds, 1e12)


def test_no_contender_starts_after_the_limit():
    options = Namespace(rounds=2, seconds=1e-6, patience=60.0, json=None)
    rounds = gpu_rounds.Rounds("h256", cuda_step.GPU_WORKS["h256"], options, time.monotonic())
    rounds.measure(["ours", "eager"], 1e12)
    assert rounds.times == rounds.errors == {}


# ---- programs -------------------------------------------------------------------------------------------------------


SMALLEST = {        # programs on one process or two ranks, their options, and the packages that they need
    "calibrate": "--ranks 2", "checkpoints": "--turns 1", "formats": "--seeds 1 --iters 2", "fusion": "",
    "cpu_step": "h128:2 --turns 1 --seconds 0.1 --without compiled JAX bfloat16",
    "generation": "1:1 --prompt 2 --new 2 --turns 1", "measured_scaling": "--turns 1 --steps 1",
    "overlap": "--turns 1", "preparation": "--turns 1 --copies 1",
    "starting": "--turns 1", "cuda_step": "--help"}
NEEDS = {"cpu_step": "torch", "generation": "transformers", "preparation": "rensa"}
ON_RANKS = {"checkpoints"}


def test_the_table_of_programs_is_complete():
    programs = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert programs == SMALLEST.keys()


@pytest.mark.deep
@pytest.mark.parametrize("name", SMALLEST)
def test_each_program_runs_to_its_end(name, tmp_path):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    launcher = ["-m", "mpi_impl.launch", "-n", "2"] if name in ON_RANKS else []
    done = subprocess.run([sys.executable, *launcher, BENCHMARKS / f"{name}.py", *SMALLEST[name].split()], cwd=tmp_path,
                          env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout, done.stderr
