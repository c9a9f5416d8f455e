"""What a run takes, forecast before it begins: memory and time; and its rates, the FLOPs of the model by seconds."""
import json
import re
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from mpi_impl.comm.device import Memory
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.flops import iteration_flops
from reference.errors import UserError
from reference.parallel.model_states import model_states
from reference.precision import Precision
from shardlab.predict.predict import predict_alone
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.forecast import (Forecast, MeasuredRate, MemoryHost, bytes_of_parameter, check_memory,
                                      check_one_rank, describe, describe_time, forecast_of, hosts_of, measure_rate,
                                      remedy)
from shardlab.report.throughput import Throughput, describe_flops, peak_of, throughput_of
from tests.program import pretrain, pretrain_bert
from tests.spy import SpyArray

MODEL = ModelConfig(4, 64, 4, 512, 16)      # 512 words need no padding
FLOAT32 = Precision("float32")


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage, expected", [(1, 4 + 4), (2, 4 + 4 / 64), (3, 4 / 64)])
def test_what_is_offloaded_from_a_gpu_takes_nothing_of_it(zero_stage, expected):
    """Of a parameter, its gradient and moments, here in float32 on 64 replicas."""
    parallel = ParallelConfig(data_parallel_size=64, zero_stage=zero_stage, cpu_offload=True)
    run = ImaginedWorld(MODEL, parallel, FLOAT32, 1, 16, 1)
    here, elsewhere = (bytes_of_parameter(run, offloaded) for offloaded in (True, False))
    assert here == sum(model_states(1, 64, zero_stage, 4, 4, 8)) and elsewhere == expected


def machine(memory, *places, kind="machine") -> MemoryHost:
    return MemoryHost(round(memory), Counter(places), kind)


@pytest.mark.parametrize("kind", ["machine", "GPU"])
def test_a_machine_that_has_less_refuses(kind):
    """The ranks on one machine, or on one GPU, count together; each of several has its own."""
    run = ImaginedWorld(MODEL, ParallelConfig(pipeline_model_parallel_size=2), FLOAT32, 2, 16, 4)
    predicted = predict_alone(run)
    first, last = (forecast_of(one.held) for one in predicted)
    both = first.total + last.total
    assert first.activations > last.activations > 0
    for hosts in ([machine(1.01 * both, 0, 1)], [machine(1.01 * first.total, 0), machine(1.01 * last.total, 1)]):
        assert check_memory(hosts, run, predicted) == [first, last]
    for hosts in ([machine(0.99 * both, 0, 1, kind=kind)],
                  [machine(2 * both, 0, kind=kind), machine(0.99 * last.total, 1, kind=kind)]):
        with pytest.raises(UserError, match=rf"The [12] ranks of a {kind} would hold .* \(16 bytes a parameter\)"):
            check_memory(hosts, run, predicted)


def test_a_model_that_is_far_too_large_is_refused_at_once():
    """Not after a look at each of its layers."""
    large = replace(MODEL, num_layers=10_000, hidden_size=1000 * MODEL.hidden_size)
    with pytest.raises(UserError, match="parameters a rank would hold 16 bytes each, .* a higher --zero-stage"):
        check_one_rank([machine(1e12, 0)], ImaginedWorld(large, ParallelConfig(), FLOAT32, 1, 16, 1))


@pytest.mark.parametrize("share, given", [
    (0.1, Recompute("full", "uniform", 4)), (0.3, Recompute()), (0.5, Recompute("full", "block", 1)),
    (0.7, Recompute()), (0.95, Recompute())])
def test_the_remedy_helps(share, given):
    """The option that is named makes it fit, and is not what was given; where none is named, no single one does."""
    run = ImaginedWorld(MODEL, ParallelConfig(data_parallel_size=4, recompute=given), FLOAT32, 8, 16, 2)
    found = forecast_of(predict_alone(run)[0].held)
    host = machine(share * 4 * found.total, 0, 0, 0, 0)
    choices = {f"--zero-stage {stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
    if given == Recompute():
        choices["--recompute-granularity full"] = {"recompute": Recompute("full")}

    def fits(choice):
        other = replace(run, parallel=replace(run.parallel, **choice))
        try:
            return bool(check_memory([host], other, predict_alone(other)))
        except UserError:
            return False

    advice = remedy([host], run, True)
    if named := re.match("With (.*) it would be ", advice):
        assert fits(choices[named[1]])
    else:
        assert not any(map(fits, choices.values())) and "a smaller --num-layers" in advice


def test_ranks_that_share_a_gpu_count_together(ranks):
    """They share its free memory, of which each rank that looks later sees less."""
    gpus = [machine(70, 0, 1, kind="GPU"), machine(90, 2, kind="GPU")]
    assert ranks.run(3, gpus_of) == [gpus] * 3
    assert describe([Forecast(0, 0)] * 3, gpus).endswith("a GPU has 70 bytes to 90 bytes free")


def gpus_of(group):
    return hosts_of(group, group.rank, [Memory("a", 70), Memory("a", 80), Memory("b", 90)][group.rank])


# ---- time, and rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near, form", [
    (np.empty(0, np.float64), "float64"), (np.empty(0, np.float16), "float32"),
    (SpyArray(np.empty(0, np.float32)), "float32")])
def test_the_time_is_that_of_the_multiplications(ranks, near, form):
    """All ranks say the same, from the rates that each has measured."""
    run = ImaginedWorld(MODEL, ParallelConfig(), FLOAT32, 2, 16, 4)
    (text,) = set(ranks.run(3, describe_with_small_matrices, run, near))
    assert f"multiply in {form}" in text
    flops, seconds, rate = map(float, re.search(r"takes (.*) FLOPs .*: (.*) s at the (.*) GFLOP/s", text).groups())
    assert flops == pytest.approx(iteration_flops(MODEL, 8, 16), rel=0.1)
    assert seconds == pytest.approx(flops / (1e9 * rate), rel=0.2)


def describe_with_small_matrices(group, run, near):
    with mock.patch("shardlab.report.forecast.DEVICE_SIZE", 100):
        return describe_time(run, measure_rate(group, near))


SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2
    --global-batch-size 8 --train-iters 4 --vocab-size 300 --log-interval 2 --eval-iters 0 --split 8,2
    --log-throughput""".split()
RATE = 5e9          # at which matrices are multiplied in these tests
FOUND = MeasuredRate(RATE, "float32")


def count_measurements(group, program, options):
    """Run the program; return how often it measured the ranks' speed of multiplication."""
    with mock.patch("shardlab.report.forecast.multiplications_per_second", return_value=RATE) as measure:
        program(group, options)
    return measure.call_count


@pytest.mark.parametrize("program, n, more", [
    (pretrain, 4, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 500 --bf16"),
    (pretrain_bert, 2, "--zero-stage 3 --micro-batch-size 1")])
def test_rates_of_a_run(ranks, corpus, tmp_path, capfd, program, n, more):
    """A row of the metrics file has FLOP/s per rank, which x ranks x seconds are the FLOPs of the model, and MFU, its
    share of all ranks' peak: whatever else is computed. Printed lines have the same for the mean of the steps.
    """
    path = tmp_path / "metrics"
    options = [*SMALL, *corpus, *more.split(), "--metrics-file", str(path)]
    assert ranks.run(n, count_measurements, program, options, timeout=120) == [1] * n
    printed = capfd.readouterr().out
    V = int(re.search(r"vocabulary (\d+), padded", printed)[1])
    bert = {"architecture": "bert", "heads": ("lm", "sop"), "predicted_share": 0.15}
    flops = iteration_flops(ModelConfig(2, 32, 4, V, 24, **(bert if program is pretrain_bert else {})), 8, 24)
    for row in map(json.loads, path.read_text().splitlines()):
        seconds = 8 * 24 / row["tokens_per_second"]
        assert 1e12 * row["tflops_per_rank"] * n * seconds == pytest.approx(flops, rel=1e-12)
        assert row["mfu"] * seconds * RATE == pytest.approx(flops, rel=1e-12)
    line = re.search(r"\| (\S+) s/iteration \|.*\| (\S+) GFLOP/s per rank \| MFU", printed)
    seconds, rate = map(float, line.groups())
    assert 1e9 * rate * n * seconds == pytest.approx(flops, rel=0.02)
    assert ("with what is computed again" in printed) == (program is pretrain)


def test_a_utilization_of_what_was_computed_would_be_another():
    """Korthikanti et al. 2022, table 5: 175B at 13.75 s on 64 GPUs are 51.4 % of an A100's peak, with selective
    recompute, which does not count.
    """
    run = ImaginedWorld(ModelConfig(96, 12_288, 96, 51_200, 2048),
                        ParallelConfig(8, 8, recompute=Recompute("selective")), Precision("bfloat16"), 1, 2048, 64)
    found = throughput_of(run, ["NVIDIA A100-SXM4-80GB"] * 64, FOUND)
    assert found.describe(13.75) == "160 TFLOP/s per rank | MFU 51.4%"
    computed = iteration_flops(run.model, 64, 2048, "selective")
    assert f"{found.flops:.3e} FLOPs of the model, and {computed:.3e} with" in describe_flops(run, found)


@pytest.mark.parametrize("gpus, form, rate, source", [
    ([], "float64", RATE, "measured 5 GFLOP/s at which all ranks together multiply in float32"),
    (["NVIDIA H200"], "float16", 989e12, "989 TFLOP/s of dense products in float16"),
    (["NVIDIA H100 80GB HBM3", "Tesla T4"], "float32", 75.1e12, "2 GPUs (NVIDIA H100 80GB HBM3, Tesla T4)"),
    (["NVIDIA H200"], "float64", RATE, "have a peak in float64"),
    (["NVIDIA H200", "A GPU"], "float16", RATE, "known here (A GPU, NVIDIA H200)"),
    (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], "float16", RATE, "measured 5 GFLOP/s")])      # a seventh of it
def test_the_peak(gpus, form, rate, source):
    """It is the sum of known data sheets, each GPU counted once, or else the measured rate; and it names its source."""
    found = peak_of(gpus, form, FOUND)
    assert found.rate == pytest.approx(rate, rel=1e-15) and source in found.source


def test_ranks_that_share_a_gpu_share_its_peak():
    """MFU is of the machine: the same for 4 ranks on it as for 1 that takes as long. FLOP/s are a rank's."""
    one, four = (Throughput(10**15, ranks, peak_of(["NVIDIA H200"], "bfloat16", FOUND)) for ranks in (1, 4))
    assert one.utilization(2.0) == pytest.approx(four.utilization(2.0)) == pytest.approx(500 / 989)
    assert one.of_a_rank(2.0) == 4 * four.of_a_rank(2.0) == 500e12
