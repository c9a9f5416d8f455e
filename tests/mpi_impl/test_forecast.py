"""A run takes the memory and time that are forecast before it begins."""
import re
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.device import Memory
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.reports.forecast import (Forecast, MemoryHost, RunSizes, check_memory, describe, describe_time, hosts_of,
                                       measure_rate, remedy)
from mpi_impl.reports.memory import rank_memory
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.flops import iteration_flops
from reference.errors import UserError
from reference.optimizer import OptimizerConfig
from reference.precision import FORMATS, Precision
from tests import training_theorems
from tests.mpi_impl.test_training import runs
from tests.spy import SpyArray

MODEL = ModelConfig(4, 64, 4, 512, 16)      # 512 words need no padding
FLOAT32 = Precision("float32")


# ---- memory ---------------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(runs(), st.sampled_from(sorted(FORMATS)))
def test_a_forecast_is_what_the_account_of_a_trainer_says(ranks, run, compute):
    """It is exact on every rank, but for the padding that makes buckets divisible by the replicas."""
    n, case, m, plan = run
    for forecast, expected, padding, hosts in ranks.run(n, forecast_and_account, case, m, plan, Precision(compute)):
        assert forecast.activations == expected.activations + expected.recomputed
        assert expected.states - padding <= forecast.states <= expected.states + 1
        assert hosts.total() == n


def forecast_and_account(group, case, m, plan, precision):
    """Return one rank's forecast and account, the most bytes of padding, and its machine's number of ranks."""
    with training_theorems.connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, precision), OptimizerConfig(1e-3, 10))
        found = rank_memory(trainer, case.b, case.s, m)
        plan = RunSizes(case.model, topology.config, precision, case.b, case.s, m)
        (host,) = hosts_of(group, topology.place.pipeline)
        return (plan.forecast()[topology.place.pipeline], found.expected,
                found.padding * sum(precision.bytes_each), host.ranks)


@pytest.mark.parametrize("zero_stage, cpu_offload, elsewhere, expected", [
    (0, False, False, 4 + 4 + 8), (1, False, False, 4 + 4 + 8 / 64), (2, False, False, 4 + (4 + 8) / 64),
    (3, False, False, (4 + 4 + 8) / 64), (1, True, False, 4 + 4 + 8 / 64), (3, True, False, (4 + 4 + 8) / 64),
    (1, True, True, 4 + 4), (2, True, True, 4 + 4 / 64), (3, True, True, 4 / 64),
])
def test_what_a_parameter_takes_of_a_rank(zero_stage, cpu_offload, elsewhere, expected):
    """It takes the parameter, gradient and moments that are in memory, here in float32 on 64 replicas."""
    parallel = ParallelConfig(data_parallel_size=64, zero_stage=zero_stage, cpu_offload=cpu_offload)
    assert RunSizes(MODEL, parallel, FLOAT32, 1, 16, 1, elsewhere).bytes_of_parameter() == expected


def machine(memory, *places) -> MemoryHost:
    return MemoryHost(round(memory), Counter(places))


def test_a_machine_that_has_less_refuses():
    """The ranks on one machine count together; each of several machines has its own."""
    plan = RunSizes(MODEL, ParallelConfig(pipeline_model_parallel_size=2), FLOAT32, 2, 16, 4)
    first, last = plan.forecast()
    both = first.total + last.total
    assert first.activations > last.activations > 0
    assert check_memory([machine(1.01 * both, 0, 1)], plan) == [first, last]
    check_memory([machine(1.01 * first.total, 0), machine(1.01 * last.total, 1)], plan)
    for hosts in ([machine(0.99 * both, 0, 1)], [machine(2 * both, 0), machine(0.99 * last.total, 1)]):
        with pytest.raises(UserError, match=r"The [12] ranks of a machine would hold .* \(16 bytes a parameter\)"):
            check_memory(hosts, plan)


@pytest.mark.parametrize("d, stage", [(1, 0), (4, 0), (4, 3)])
def test_what_just_fits_is_not_refused(d, stage):
    """Each replica on a machine of its own, which has hardly more than it needs: nearly all of that for states."""
    parallel = ParallelConfig(data_parallel_size=d, zero_stage=stage)
    plan = RunSizes(replace(MODEL, hidden_size=512), parallel, FLOAT32, 1, 1, 1)
    (found,) = plan.forecast()
    assert found.states > 0.9 * found.total
    assert check_memory([machine(1.01 * found.total, 0)] * d, plan) == [found]


def test_a_model_that_is_far_too_large_is_refused_at_once():
    """Not after a look at each of its layers."""
    large = replace(MODEL, num_layers=10_000, hidden_size=1000 * MODEL.hidden_size)
    plan = RunSizes(large, ParallelConfig(), FLOAT32, 1, 16, 1)
    with pytest.raises(UserError, match="parameters a rank would hold 16 bytes each, .* a higher --zero-stage"):
        check_memory([machine(1e12, 0)], plan)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_remedy_helps(share):
    """The option that is named makes it fit; where none is named, no single one does."""
    plan = RunSizes(MODEL, ParallelConfig(data_parallel_size=4), FLOAT32, 8, 16, 2)
    (found,) = plan.forecast()
    host = machine(share * 4 * found.total, 0, 0, 0, 0)
    advice = remedy([host], plan)
    choices = {f"--zero-stage {stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
    choices["--recompute-granularity full"] = {"recompute": Recompute("full")}
    named = [name for name in choices if advice.startswith(f"With {name} it would be ")]
    for name in named:
        check_memory([host], replace(plan, parallel=replace(plan.parallel, **choices[name])))
    if not named:
        assert share < 0.6 and advice.startswith("Choose a smaller --num-layers")
        for choice in choices.values():
            with pytest.raises(UserError):
                check_memory([host], replace(plan, parallel=replace(plan.parallel, **choice)))


@pytest.mark.parametrize("given", [Recompute("full", "uniform", 4), Recompute("full", "block", 1)])
def test_the_remedy_is_not_what_was_given(given):
    """A run that recomputes fully already is not told to give --recompute-granularity full."""
    plan = RunSizes(MODEL, ParallelConfig(recompute=given), FLOAT32, 8, 16, 2)
    (found,) = plan.forecast()
    for share in (0.3, 0.6, 0.9, 0.95):
        advice = remedy([machine(share * found.total, 0)], plan)
        assert not advice.startswith("With --recompute-granularity full it would be"), advice


def test_the_description():
    hosts = [machine(1e9, 0, 1), machine(1e9, 1)]
    assert describe([Forecast(3e6, 2_000_000), Forecast(1e6, 500)], hosts) == (
        "a rank will hold 1 MB to 3 MB of parameters, gradients and moments, and at most 500 bytes to 2 MB of "
        "activations: 7 MB on all of them")


def test_ranks_that_share_a_gpu_count_together(ranks):
    """They share its free memory, of which each rank that looks later sees less."""
    assert ranks.run(3, gpus_of) == [[MemoryHost(70, Counter([0, 1]), "GPU"), MemoryHost(90, Counter([2]), "GPU")]] * 3


def gpus_of(group):
    return hosts_of(group, group.rank, [Memory("a", 80), Memory("a", 70), Memory("b", 90)][group.rank])


def test_a_gpu_that_has_less_refuses():
    plan = RunSizes(MODEL, ParallelConfig(), FLOAT32, 2, 16, 4)
    (found,) = plan.forecast()
    gpus = [machine(1.1 * found.total, 0)._replace(kind="GPU"), machine(1.5 * found.total, 0, 0)._replace(kind="GPU")]
    assert check_memory(gpus[:1], plan) == [found]
    assert describe([Forecast(3e6, 0)], [machine(1e9, 0)._replace(kind="GPU"), machine(2e9, 0)._replace(kind="GPU")]
                ).endswith(": 6 MB on all of them; a GPU has 1 GB to 2 GB free")
    with pytest.raises(UserError, match=r"The 2 ranks of a GPU would hold .* of activations. It has .* free\. "):
        check_memory(gpus, plan)
    with pytest.raises(UserError, match=r"but the GPU has 1 kB free\. Choose a smaller .* a higher --zero-stage"):
        check_memory([machine(1000, 0)._replace(kind="GPU")], plan)
    assert remedy([machine(1000, 0)._replace(kind="GPU")], plan).endswith("or start the ranks on more GPUs.")


# ---- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near, form", [
    (np.empty(0, np.float32), "float32"), (np.empty(0, np.float64), "float64"), (np.empty(0, np.float16), "float32"),
    (SpyArray(np.empty(0, np.float32)), "float32")])
def test_the_time_is_that_of_the_multiplications(ranks, near, form):
    """All ranks say the same, from the rates that each has measured."""
    plan = RunSizes(MODEL, ParallelConfig(), FLOAT32, 2, 16, 4)
    (text,) = set(ranks.run(3, describe_with_small_matrices, plan, near))
    assert text.endswith(f"multiply in {form}, and more for all else")
    flops, seconds, rate = map(float, re.search(r"takes (.*) FLOPs .*: (.*) s at the (.*) GFLOP/s", text).groups())
    assert flops == pytest.approx(iteration_flops(MODEL, 8, 16), rel=0.1)
    assert seconds == pytest.approx(flops / (1e9 * rate), rel=0.2)


def describe_with_small_matrices(group, plan, near):
    with mock.patch("mpi_impl.reports.forecast.DEVICE_SIZE", 100):
        return describe_time(plan, measure_rate(group, near))
