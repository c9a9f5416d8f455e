"""The output of a run: progress for a person, JSON lines for a program, and the ledger beside its predictions."""
import json
from dataclasses import replace
from math import inf, nan

import pytest

from mpi_impl.comm.ledger import Ledger
from mpi_impl.reports.metrics import Metrics, duration
from mpi_impl.reports.traffic import compare, report, summary, table
from mpi_impl.training.trainer import StepResult
from reference.config import ModelConfig, ParallelConfig
from reference.costs.traffic import PassCounts, traffic
from reference.parallel.stages import layouts_of_ranks


def test_progress(capsys, tmp_path):
    """Rates are over the steps since the last line, time left by the mean step so far; every step is in the file."""
    metrics = Metrics(train_iters=100, tokens_per_step=1000, log_interval=2, path=str(tmp_path / "m"), speaks=True)
    for iteration, seconds in enumerate((1.0, 1.0, 3.0, 2.0, 4.0), 1):
        metrics.step(iteration, StepResult((3.5,), 1.25, 1e-3), seconds)
        lines = (tmp_path / "m").read_text().splitlines()        # flushed, though the run goes on
        assert json.loads(lines[-1]) == {"iteration": iteration, "lm_loss": 3.5, "grad_norm": 1.25,
                                         "learning_rate": 1e-3, "tokens_per_second": 1000 / seconds,
                                         "consumed_tokens": 1000 * iteration}
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/100", "2/100", "4/100"]
    assert "1,000 tokens/s | 1m 39s left" in printed[0] and "1,000 tokens/s | 1m 38s left" in printed[1]
    assert "400 tokens/s | 2m 48s left" in printed[2]            # 2,000 tokens in 5 s; 7 s for 4 steps, 96 steps to go
    metrics.evaluation(5, (0.0,))
    assert json.loads((tmp_path / "m").read_text().splitlines()[-1])["validation_perplexity"] == 1.0
    assert metrics.losses == [(i, 3.5) for i in range(1, 6)] and metrics.validation == [(5, 0.0)]


def test_a_scaled_loss_tells_its_scale_and_what_was_skipped(capsys, tmp_path):
    """Each step in the file, in JSON that every parser reads: no norm where there is none; counts on the lines."""
    metrics = Metrics(10, 1000, 2, str(tmp_path / "m"), speaks=True, scaled=True)
    for iteration, (norm, scale) in enumerate(((inf, 2.0**16), (nan, 2.0**16), (1.0, 2.0**15), (1.0, 384.0)), 1):
        metrics.step(iteration, StepResult((3.5,), norm, 1e-3, scale), 1.0)
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "m").read_text().splitlines()]
    assert [row["grad_norm"] for row in rows] == [None, None, 1.0, 1.0]
    assert [row["skipped"] for row in rows] == [True, True, False, False] and rows[3]["loss_scale"] == 384.0
    first, second, last = capsys.readouterr().out.splitlines()
    assert "loss scale 2^16 | 1 skipped" in first and "loss scale 2^16 | 1 skipped" in second
    assert "loss scale 384 | " in last and "skipped" not in last


def test_a_run_that_goes_on_counts_its_own_steps(capsys):
    """After a checkpoint, the time left follows from this run's steps; its first line comes immediately."""
    metrics = Metrics(100, 1000, 50, None, speaks=True)
    for iteration in (81, 82):
        metrics.step(iteration, StepResult((3.5,), 1.0, 1e-3), 2.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[1] == "81/100" and "0m 38s left" in line


def test_a_run_that_goes_on_goes_on_with_its_file(tmp_path):
    """Rows of later iterations and an unfinished line are removed; a new run begins a new file."""
    path = tmp_path / "m"
    for begins, iterations in ((0, (1, 2, 3)), (2, (3, 4)), (0, (1,))):
        if begins:
            path.write_text(path.read_text() + '{"iteration": 1, "lm_')
        metrics = Metrics(9, 1000, 50, str(path), speaks=True, begins=begins)
        for iteration in iterations:
            metrics.step(iteration, StepResult((float(begins),), 1.0, 1e-3), 2.0)
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(row["iteration"], row["lm_loss"]) for row in rows] == (
            [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)] if begins else [(i, 0.0) for i in iterations])


@pytest.mark.parametrize("seconds, text", [(0, "0m 00s"), (59.6, "1m 00s"), (3599, "59m 59s"), (7300, "2h 01m")])
def test_durations(seconds, text):
    assert duration(seconds) == text


MODEL, SPLIT, WORK = ModelConfig(3, 16, 4, 50, 8), ParallelConfig(4, 1, 2), PassCounts(2, 6, 1, 3)
SIZES = (MODEL, SPLIT, 5, 8, WORK)     # b = 5, s = 8
PSI = sum(layout.size for layout in layouts_of_ranks(MODEL, SPLIT))


def predicted_ledger(sizes=SIZES):
    """Return a ledger with exactly the traffic that the formulas predict."""
    ledger = Ledger()
    t, p, d = (getattr(sizes[1], f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "data"))
    members = {"tensor": t, "data": d, "pipeline": p, "embedding": 2, "model": t * p, "world": t * p * d}
    for line in traffic(*sizes):
        with ledger.phase(line.phase):
            for i in range(line.calls):
                elements = line.elements * (i + 1) // line.calls - line.elements * i // line.calls
                ledger.record(line.operation, line.group, members[line.group], line.reason, elements, "float64")
    return ledger


def test_a_ledger_as_predicted():
    ledger = predicted_ledger()
    assert all(line.as_predicted for line in compare(ledger, traffic(*SIZES)))
    assert "NOT" not in table(compare(ledger, traffic(*SIZES)))
    assert summary(ledger, *SIZES).splitlines() == [
        "All-reduces a layer and microbatch: 2 forward, 2 backward. Predicted: 2 and 2.",
        f"Ring elements a layer and microbatch: {8 * 5 * 8 * 16 * 3 // 4:,}. Predicted: 8 b s h (t-1)/t = "
        f"{8 * 5 * 8 * 16 * 3 // 4:,}.",
        "Elements for the loss of a microbatch: 120. Predicted: 3 b s = 120. Gathering the logits would take b s V = "
        "2,000.",
        f"Ring elements of gradients and parameters between the replicas, a step of m = 3: {PSI:,}. Predicted: {PSI:,}."
        f" ZeRO stage 0 in short: 2 Psi (N-1)/N = {PSI:,}, with Psi = {PSI:,}, N = 2."]


@pytest.mark.parametrize("keep, backward, factor", [(False, 6, 10), (True, 4, 8)])
def test_what_sequence_parallelism_sends_is_stated(keep, backward, factor):
    """All-gathers and reduce-scatters, more of them if inputs are gathered again; b s h / t between stages."""
    split = ParallelConfig(4, 2, sequence_parallel=True, keep_gathered_inputs=keep)
    sizes = (MODEL, split, 5, 8, WORK)
    assert all(line.as_predicted for line in compare(predicted_ledger(sizes), traffic(*sizes)))
    ring = factor * 5 * 8 * 16 * 3 // 4
    gathers, rings, _, sent = summary(predicted_ledger(sizes), *sizes).splitlines()
    assert gathers == ("All-gathers and reduce-scatters a layer and microbatch: 4 forward, "
                       f"{backward} backward. Predicted: 4 and {backward}.")
    assert rings == (f"Ring elements a layer and microbatch: {ring:,}. Predicted: {factor} b s h (t-1)/t = {ring:,}.")
    assert sent.endswith("a microbatch: 160. Predicted: b s h / t = 160.")


@pytest.mark.parametrize("stage, formula, times", [(0, "2", 2), (1, "2", 2), (2, "(m + 1)", 4), (3, "3 m", 9)])
@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("untied", [False, True])
def test_what_replicas_send_is_stated(stage, formula, times, d, untied):
    """The statement is exact; the ZeRO paper's formula beside it fails for stage 3, where tables are unlike blocks."""
    model = replace(MODEL, untie_embeddings_and_output_weights=untied)
    sizes = (model, ParallelConfig(data_parallel_size=d, zero_stage=stage), 5, 8, WORK)
    layout, = layouts_of_ranks(*sizes[:2])
    said = summary(predicted_ledger(sizes), *sizes).splitlines()[-1]
    short = times * layout.size * (d - 1) / d
    assert f"ZeRO stage {stage} in short: {formula} Psi (N-1)/N = {short:,.0f}, " in said
    assert f"with Psi = {layout.size:,}, N = {d}" in said
    size = {unit: bucket.size for unit, bucket in layout.bucket_of.items()}
    tables = -size["embedding.position"] + (-size["embedding.word"] if untied else size["embedding.word"])
    exact = short + (3 * tables * (d - 1) / d if stage == 3 else 0)
    assert f"a step of m = 3: {exact:,.0f}. Predicted: {exact:,.0f}. ZeRO" in said
    assert ("needs no parameters" in said) == (stage == 3)
    assert ("a tied table is gathered" in said) == (stage == 3 and not untied)


@pytest.mark.parametrize("t, scatter, sent", [(4, True, "b s h / t = 160"), (4, False, "b s h = 640"),
                                              (1, True, "b s h = 640")])
def test_what_a_pipeline_sends_is_stated(t, scatter, sent):
    """Between two stages, a microbatch: 1/t of b s h where it is scattered, and the report is of all its ranks."""
    split = ParallelConfig(t, 2, 1, "interleaved", 2, scatter)
    sizes = (ModelConfig(5, 16, 4, 50, 8), split, 5, 8, WORK)
    ledger = predicted_ledger(sizes)
    assert all(line.as_predicted for line in compare(ledger, traffic(*sizes)))
    assert summary(ledger, *sizes).splitlines()[-1] == (
        f"Elements that a rank sends on to the next stage, a microbatch: {sent.split()[-1]}. Predicted: {sent}.")
    assert report(ledger, *sizes).startswith("What the 2 ranks of rank 0's pipeline, added up, sent (ledger):\n")
    assert report(predicted_ledger(SIZES), *SIZES).startswith("What rank 0 sent (ledger):\n")


@pytest.mark.parametrize("elements, calls", [(1, 1), (0, 1)])
def test_one_call_too_many_is_marked(elements, calls):
    """A difference in calls or in elements is marked, and so is traffic that never came."""
    ledger = predicted_ledger()
    with ledger.phase("forward"):
        ledger.record("all_reduce", "tensor", 4, "mlp output", elements, "float64")
    assert [line.entry.reason for line in compare(ledger, traffic(*SIZES)) if not line.as_predicted] == ["mlp output"]
    assert report(ledger, *SIZES).count("NOT") == 1


def test_traffic_that_never_came_is_marked():
    lines = compare(Ledger(), traffic(*SIZES))
    assert len(lines) == sum(line.calls > 0 for line in traffic(*SIZES))
    assert not any(line.as_predicted for line in lines)
