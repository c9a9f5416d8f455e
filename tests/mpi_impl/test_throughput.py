"""--log-throughput: rates are the model's FLOPs by seconds and ranks, whatever else is computed, however it is cut."""
import json
import re
from unittest import mock

import pytest

from mpi_impl.reports.forecast import MeasuredRate, RunSizes
from mpi_impl.reports.throughput import PEAKS, Throughput, describe_flops, format_rate, peak_of, throughput_of
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.flops import iteration_flops
from reference.precision import Precision
from tests.program import pretrain, pretrain_bert

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2
    --global-batch-size 8 --train-iters 4 --vocab-size 300 --log-interval 2 --eval-iters 0 --split 8,2
    --log-throughput""".split()
RATE = 5e9          # at which matrices are multiplied in these tests
FOUND = MeasuredRate(RATE, "float32")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    sentences = [f"Here {i} times {i % 7} is {i * (i % 7)}." for i in range(400)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(sentences[i:i + 12]) for i in range(0, 400, 12)))
    return ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]


def count_measurements(group, program, options):
    """Run the program; return how often it measured the ranks' speed of multiplication."""
    with mock.patch("mpi_impl.reports.forecast.multiplications_per_second", return_value=RATE) as measure:
        program(group, options)
    return measure.call_count


@pytest.mark.parametrize("program, n, more", [
    (pretrain, 1, ""),
    (pretrain, 4, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 500"),
    (pretrain, 4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --recompute-granularity full"),
    (pretrain, 2, "--zero-stage 3 --recompute-granularity selective --micro-batch-size 1"),
    (pretrain, 2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16"),
    (pretrain_bert, 4, "--tensor-model-parallel-size 2 --recompute-granularity full"),
    (pretrain_bert, 2, "--bert-no-binary-head"),
])
def test_rates_of_a_run(ranks, corpus, tmp_path, capfd, program, n, more):
    """A row of the metrics file has FLOP/s per rank, which x ranks x seconds are the FLOPs of the model, and MFU, its
    share of all ranks' peak: for every topology, schedule, padding, precision and recompute. Printed lines have the
    same for the mean of the steps.
    """
    path = tmp_path / "metrics"
    options = [*SMALL, *corpus, *more.split(), "--metrics-file", str(path)]
    assert ranks.run(n, count_measurements, program, options, timeout=120) == [1] * n
    printed = capfd.readouterr().out
    V = int(re.search(r"vocabulary (\d+), padded", printed)[1])
    bert = {"architecture": "bert", "heads": ("lm",) if "no-binary" in more else ("lm", "sop")}
    model = ModelConfig(2, 32, 4, V, 24, **(bert if program is pretrain_bert else {}))
    flops = iteration_flops(model, 8, 24)
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert len(rows) == 4
    for row in rows:
        seconds = 8 * 24 / row["tokens_per_second"]
        assert 1e12 * row["tflops_per_rank"] * n * seconds == pytest.approx(flops, rel=1e-12)
        assert row["mfu"] * seconds * RATE == pytest.approx(flops, rel=1e-12)
    lines = re.findall(r"\| (\S+) s/iteration \|.*\| (\S+) GFLOP/s per rank \| MFU (\S+)% \|", printed)
    assert len(lines) == 3
    for seconds, rate, percent in (map(float, line) for line in lines):
        assert 1e9 * rate * n * seconds == pytest.approx(flops, rel=0.02)
        assert percent / 100 == pytest.approx(flops / (seconds * RATE), rel=0.02, abs=0.001)
    assert f"a step is {flops:.3e} FLOPs of the model" in printed
    assert ("with what is computed again" in printed) == ("recompute" in more or "bf16" in more)


def test_nothing_is_said_unless_it_is_asked_for(ranks, corpus, tmp_path, capfd):
    path = tmp_path / "metrics"
    options = [option for option in SMALL if option != "--log-throughput"]
    ranks.run(1, pretrain, [*options, *corpus, "--metrics-file", str(path)])
    printed = capfd.readouterr().out
    assert "MFU" not in printed and "theoretical memory" not in printed and "mfu" not in path.read_text()


def test_a_utilization_of_what_was_computed_would_be_another():
    """Korthikanti et al. 2022, table 5: 175B at 13.75 s on 64 GPUs are 51.4 % of an A100's peak, with selective
    recompute, which does not count.
    """
    plan = RunSizes(ModelConfig(96, 12_288, 96, 51_200, 2048), ParallelConfig(8, 8, recompute=Recompute("selective")),
                Precision("bfloat16"), 1, 2048, 64)
    found = throughput_of(plan, 64, ["NVIDIA A100-SXM4-80GB"] * 64, FOUND)
    assert found.describe(13.75) == "160 TFLOP/s per rank | MFU 51.4%"
    computed = iteration_flops(plan.model, 64, 2048, "selective")
    assert describe_flops(plan, found) == (
        f"a step is {found.flops:.3e} FLOPs of the model, and {computed:.3e} with what is computed again, which does "
        "not count; MFU is their share of the 20 PFLOP/s of dense products in bfloat16 that NVIDIA publishes for 64 "
        "GPUs (NVIDIA A100-SXM4-80GB)")


@pytest.mark.parametrize("gpus, form, rate, source", [
    ([], "float64", RATE, "measured 5 GFLOP/s at which all ranks together multiply in float32"),
    (["NVIDIA H200"], "bfloat16", 989e12, "989 TFLOP/s of dense products in bfloat16 that NVIDIA publishes for 1 GPU"),
    (["NVIDIA H200"], "float16", 989e12, "989 TFLOP/s of dense products in float16"),
    (["NVIDIA H100 80GB HBM3", "Tesla T4"], "float32", 75.1e12, "75.1 TFLOP/s of dense products in float32 that NVIDIA "
     "publishes for 2 GPUs (NVIDIA H100 80GB HBM3, Tesla T4)"),
    (["NVIDIA H200"], "float64", RATE, "multiply in float32, for not all of their GPUs have a peak in float64 that is"),
    (["NVIDIA H200", "A GPU"], "float16", RATE, "that is known here (A GPU, NVIDIA H200)"),
    (["NVIDIA A100-SXM4-40GB MIG 1g.5gb"], "float16", RATE, "measured 5 GFLOP/s"),      # a seventh of it
])
def test_the_peak(gpus, form, rate, source):
    """It is the sum of known data sheets, each GPU counted once, or else the measured rate; and it names its source."""
    found = peak_of(gpus, form, FOUND)
    assert found.rate == pytest.approx(rate, rel=1e-15) and source in found.source


def test_ranks_that_share_a_gpu_share_its_peak():
    """MFU is of the machine: the same for 4 ranks on it as for 1 that takes as long. FLOP/s are a rank's."""
    peak = peak_of(["NVIDIA H200"], "bfloat16", FOUND)
    one, four = (Throughput(10**15, ranks, peak) for ranks in (1, 4))
    assert one.utilization(2.0) == pytest.approx(four.utilization(2.0)) == pytest.approx(500 / 989)
    assert one.of_a_rank(2.0) == 4 * four.of_a_rank(2.0) == 500e12


def test_tensor_cores_are_faster():
    assert all(half > single for half, single in PEAKS.values())


@pytest.mark.parametrize("rate, text", [
    (21.3e6, "0.0213 GFLOP/s"), (8.456e9, "8.46 GFLOP/s"), (230.1e9, "230 GFLOP/s"), (999.7e9, "1,000 GFLOP/s"),
    (989e12, "989 TFLOP/s"), (7.912e15, "7.91 PFLOP/s")])
def test_rates_are_easily_read(rate, text):
    assert format_rate(rate) == text
