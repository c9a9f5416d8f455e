"""What a run reports: progress, metrics, the ledger beside its predictions, and the page of --report."""
import json
import re
from math import inf, nan
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from docs.played_step import picture
from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.trace import Slice
from mpi_impl.training.trainer import StepResult
from reference.config import ModelConfig, ParallelConfig
from reference.costs.volumes import PassCounts
from reference.parallel.stages import schedule_of
from reference.precision import Precision
from reference.schedules.actions import Send, lower, parse_action, result
from reference.schedules.simulate import Times, simulate
from shardlab.predict.predict import predict_alone, sent_by_pipeline
from shardlab.predict.rank import ImaginedWorld
from shardlab.report.metrics import Metrics
from shardlab.report.page.played_step import played_step
from shardlab.report.page.report import MOST_LOSSES, ReportedRun, losses, page
from shardlab.report.page.senders import destinations, sent_by_all
from shardlab.report.summary import traffic_line
from shardlab.report.timelines.timelines import slices_of
from shardlab.report.traffic import compare, report, summary
from tests.program import pretrain, pretrain_bert

SMALL = """--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 8 --train-iters 3 --vocab-size 300 --eval-interval 2 --eval-iters 1 --split 8,2
    --dtype float64""".split()
LIMIT = 2_000_000       # bytes of a page


def data_of(path: Path) -> dict:
    """Return the JSON of a page."""
    text = path.read_text()
    assert len(text.encode()) < LIMIT
    found, = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def rows_of(path: Path) -> list[dict]:
    """Return the lines of a metrics file."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_the_pages_numbers_are_the_runs(ranks, corpus, tmp_path, capfd):
    """Losses, ledger, actions and memory: in the page as in the run's other files; and a run without
    a page computes the same to the last bit.
    """
    files = {name: tmp_path / f"{name}.html" for name in ("metrics-file", "ledger", "report")}
    options = [*SMALL, *corpus, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    ranks.run(4, pretrain, [*options, "--verbose", *(
        word for name, path in files.items() for word in (f"--{name}", str(path)))], timeout=120)
    printed, data = capfd.readouterr().out, data_of(files["report"])
    for kind, name in (("training", "lm_loss"), ("validation", "validation_loss")):
        assert data["losses"][kind] == [[row["iteration"], row[name]] for row in rows_of(files["metrics-file"])
                                        if name in row] != []
    assert data["ledger"] == json.loads(files["ledger"].read_text())
    ring = sum(row["ring_bytes"] for row in data["ledger"])             # of one pipeline of t
    assert sum(row[3] for row in data["sent"]["rows"]) == pytest.approx(2 * ring, rel=1e-12)
    assert data["text"] in printed and "NOT" not in printed
    for one in data["memory"]:
        assert all(found == value == one["held"][name] for name, found, value in one["compared"])
    drawn = ElementTree.fromstring("\n".join(picture(data)))        # as the README's moving picture is
    texts = [one.text for one in drawn.iterfind(".//{*}g/{*}text")]
    assert texts == 2 * [name[1:] for rank in data["player"]["ranks"] for name, _, _ in rank["actions"]]
    assert len(drawn.findall(".//{*}g/{*}circle")) == len(data["player"]["messages"]) > 0

    ranks.run(4, pretrain, [*options, "--metrics-file", str(tmp_path / "alone")], timeout=120)
    assert data["text"] not in capfd.readouterr().out
    curves = [[(row.get("lm_loss"), row.get("grad_norm")) for row in rows_of(path)]
              for path in (tmp_path / "alone", files["metrics-file"])]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("n, program, options", [
    (1, pretrain, "--train-iters 1 --sample-tokens 4"),
    (4, pretrain, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
                  "--num-layers-per-virtual-pipeline-stage 1"),
    (4, pretrain_bert, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --zero-stage 1")])
def test_every_kind_of_run_has_a_step_to_play(ranks, corpus, tmp_path, n, program, options):
    """Each rank plays its schedule's actions in order. Each message is the schedule's, is sent after the action that
    makes it, and arrives before the action that uses it.
    """
    tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase"] if program is pretrain_bert else []
    file = tmp_path / "report.html"
    ranks.run(n, program, [*SMALL, *corpus, *tokenizer, *options.split(), "--report", str(file)], timeout=120)
    data = data_of(file)
    run, several = data["run"], "--num-layers-per-virtual-pipeline-stage" in options
    parallel = ParallelConfig(run["t"], run["p"], run["d"], run["schedule"], 2 if several else None)
    m = run["step"]["microbatches of a replica"]
    schedule, player = schedule_of(parallel, m), data["player"]
    lowered, layout = lower(schedule), [one["pipeline"] for one in data["topology"]]
    assert player["clock"] == "virtual" and player["shown_microbatches"] == m
    for rank, one in enumerate(player["ranks"]):
        assert [name for name, _, _ in one["actions"]] == [str(a) for a in schedule.ranks[layout[rank]]]
        assert all(start <= end <= player["end"] for _, start, end in one["actions"])
        assert all(re.match(r"\d+[FBIW]", name)[0] in player["work"] for name, _, _ in one["actions"])
    assert sorted((layout[source], layout[to], name) for source, to, name, *_ in player["messages"]) == sorted(
        (rank, step.to, str(step.action)) for rank in layout for step in lowered[rank] if isinstance(step, Send))
    starts = {(rank, start) for rank, one in enumerate(player["ranks"]) for _, start, _ in one["actions"]}
    assert all(sent <= arrived <= used + 0.2 and (to, used) in starts
               for _, to, _, sent, arrived, used in player["messages"])
    ends = {(rank, str(result(parse_action(name)))): end for rank, one in enumerate(player["ranks"])
            for name, _, end in one["actions"] if "W" not in name}
    assert all(sent == ends[source, name] for source, _, name, sent, _, _ in player["messages"])
    assert all(line["as_predicted"] is not False for line in data["summary"])
    assert data["written"].count("<|>") == ("--sample-tokens" in options)


# ---- who sends how much to whom -------------------------------------------------------------------------------------


def test_a_message_follows_the_schedule():
    """Of a V on four ranks stages 0 to 3 go down, 4 to 7 up again: rank 1 sends half of its activations to each
    neighbour.
    """
    v, ledgers = ParallelConfig(1, 4, 1, "zb-v"), [Ledger() for _ in range(4)]
    assert destinations(v, 8, 0) == {"activation": {1: 1.0}, "gradient": {1: 1.0}}      # the last stage is here, too
    ledgers[1].record("send", "pipeline", 4, "activation", 10, np.float32)
    assert [(one.to, one.bytes) for one in sent_by_all(ledgers, v, 8)] == [(2, 20), (0, 20)]


def test_the_summary_counts_what_is_predicted_and_names_what_is_not():
    ledger, predicted = Ledger(), Ledger()
    for one in ledger, predicted:
        one.record("all_reduce", "tensor", 2, "mlp output", 8, np.float32)
    with ledger.phase("sampling"):
        ledger.record("all_gather", "tensor", 2, "logits", 4, np.float32)
    line = traffic_line(compare(ledger, predicted.totals), 1)
    assert line.as_predicted and line.text.endswith("= the prediction, all 1 lines (1 more have none: sampling)")


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_a_large_run_has_a_small_page():
    """The page shows the first of 2,000 microbatches, with five collectives in each action, and says so."""
    c, m = ParallelConfig(), 2000
    schedule = schedule_of(c, m)
    (own,) = slices_of(simulate(schedule, Times(1e-3, 1e-3, 1e-3)))
    sums = [Slice("communication", "output", "communication", s.start + i * 1e-4, s.start + i * 1e-4 + 5e-5)
            for s in own for i in range(5)]
    found = played_step(VirtualClock(), [own + sums], schedule, c, 4096)
    assert 0 < found["shown_microbatches"] < m == found["microbatches"] and found["left_out"]
    assert len(page({"title": "large", "player": found}).encode()) < LIMIT


def test_of_a_long_run_every_nth_loss_is_shown_as_it_was():
    curve = [(i, 1 / i) for i in range(1, 100_000)]
    model = ModelConfig(2, 16, 2, 300, 16)
    found = losses(ReportedRun("GPT", model, ParallelConfig(), Precision(), 1, 16, 1, [], PassCounts(1, 1, 0, 0),
                               curve, curve))
    for shown in (found["training"], found["validation"]):
        assert len(shown) <= MOST_LOSSES + 2 and set(shown) <= set(curve) and shown[-1] == curve[-1]


def test_no_text_of_a_run_becomes_markup():
    """Neither in the title nor in the JSON; and what is not a number becomes null."""
    evil = "</script><img src=x onerror=alert(1)>"
    text = page({"title": evil, "options": {"load": evil}, "losses": [float("nan"), float("inf"), 1.5]})
    assert "<img" not in text and text.count("</script>") == 2
    found, = re.findall(r'id="data">(.*?)</script>', text)
    assert json.loads(found) == {"title": evil, "options": {"load": evil}, "losses": [None, None, 1.5]}


# ---- progress, and the ledger beside its predictions ----------------------------------------------------------------


def test_progress(capsys, tmp_path):
    """Rates are over the steps since the last line, time left by the mean step so far. Every step is in the file, in
    JSON that every parser reads, with no norm where there is none; lines count what was skipped.
    """
    metrics = Metrics(100, 1000, 2, str(tmp_path / "m"), speaks=True, scaled=True)
    for iteration, (seconds, norm, scale) in enumerate(((1.0, inf, 2.0**16), (1.0, nan, 2.0**16), (3.0, 1.25, 2.0**15),
                                                        (2.0, 1.25, 384.0), (4.0, 1.25, 384.0)), 1):
        metrics.step(iteration, StepResult((3.5,), norm, 1e-3, scale), seconds)
        assert rows_of(tmp_path / "m")[-1] == {        # flushed, though the run goes on
            "iteration": iteration, "lm_loss": 3.5, "grad_norm": norm if iteration > 2 else None,
            "learning_rate": 1e-3, "tokens_per_second": 1000 / seconds, "consumed_tokens": 1000 * iteration,
            "skipped": iteration <= 2, "loss_scale": scale}
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["1/100", "2/100", "4/100"]
    assert "1 skipped |" in printed[1] and "skipped" not in printed[2]
    assert "400 tokens/s | 2m 48s left" in printed[2]            # 2,000 tokens in 5 s; 7 s for 4 steps, 96 steps to go
    metrics.evaluation(5, (0.0,))
    assert rows_of(tmp_path / "m")[-1]["validation_perplexity"] == 1.0
    assert metrics.losses == [(i, 3.5) for i in range(1, 6)] and metrics.validation == [(5, 0.0)]


def test_a_resumed_run_goes_on_with_its_file(tmp_path, capsys):
    """Rows of later iterations and an unfinished line are removed; a new run begins a new file. The time left follows
    from the run's own steps. The first line comes immediately, without it: the first step is slower than all others.
    """
    path = tmp_path / "m"
    for begins, iterations in ((0, (1, 2, 3)), (2, (3, 4)), (0, (1,))):
        if begins:
            path.write_text(path.read_text() + '{"iteration": 1, "lm_')
        metrics = Metrics(7204, 1000, 2, str(path), speaks=True, begins=begins)
        for iteration in iterations:
            metrics.step(iteration, StepResult((float(begins),), 1.0, 1e-3), 1.0 + begins / 2)
        assert [(row["iteration"], row["lm_loss"]) for row in rows_of(path)] == (
            [(1, 0.0), (2, 0.0), (3, 2.0), (4, 2.0)] if begins else [(i, 0.0) for i in iterations])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{i}/7204" for i in (1, 2, 3, 4, 1)]
    assert "2h 00m left" in lines[1] and "4h 00m left" in lines[3] and "left" not in lines[0] + lines[2] + lines[4]


MODEL, WORK = ModelConfig(5, 16, 4, 50, 8), PassCounts(2, 8, 1, 4)
REPLICAS = ParallelConfig(4, 1, 2)


def predicted(parallel) -> dict:
    """Return what a pipeline is predicted to send."""
    m = WORK.microbatches // WORK.steps
    return sent_by_pipeline(predict_alone(ImaginedWorld(MODEL, parallel, Precision(), 5, 8, m)), WORK)


def ledger_of(totals) -> Ledger:
    ledger = Ledger()
    ledger.totals.update(totals)
    return ledger


@pytest.mark.parametrize("parallel, said", [
    (REPLICAS, "8 b s h (t-1)/t = 3,840."),
    (ParallelConfig(4, 2, sequence_parallel=True), " 10 b s h (t-1)/t = 4,800."),
    (ParallelConfig(4, 2, 1, "interleaved", 2), " b s h / t = 160."),
    (ParallelConfig(4, 2, 1, "zb-v"), " b s h / t = 160."), (ParallelConfig(4, 2), " b s h / t = 160."),
    (ParallelConfig(4, 2, 1, "interleaved", 2, False), " b s h = 640."),
    (ParallelConfig(data_parallel_size=3), "2 Psi (N-1)/N = "),
    (ParallelConfig(data_parallel_size=3, zero_stage=2), "(m + 1) Psi (N-1)/N = "),
    (ParallelConfig(data_parallel_size=3, zero_stage=3), ": 3 m Psi (N-1)/N")])
def test_what_is_sent_is_stated(parallel, said):
    """In the papers' terms, each number beside its prediction; and a ledger that is as predicted says so."""
    sizes = MODEL, parallel, 5, 8, WORK      # b = 5, s = 8
    totals = predicted(parallel)
    stated = summary(ledger_of(totals), totals, *sizes)
    assert said in stated and "NOT" not in report(ledger_of(totals), totals, *sizes)
    pairs = re.findall(r": ([\d,]+)\. Predicted: (?:[^.]* = )?([\d,]+)\.", stated)
    assert pairs and all(found == predicted for found, predicted in pairs)


@pytest.mark.parametrize("elements", [0, 1])
def test_one_call_too_many_is_marked(elements):
    """A difference in calls or in elements is marked, and so is traffic that never came."""
    totals = predicted(REPLICAS)
    ledger = ledger_of(totals)
    with ledger.phase("forward"):
        ledger.record("all_reduce", "tensor", 4, "mlp output", elements, "float32")
    assert [line.entry.reason for line in compare(ledger, totals) if not line.as_predicted] == ["mlp output"]
    assert report(ledger, totals, MODEL, REPLICAS, 5, 8, WORK).count("NOT") == 1
    assert not any(line.as_predicted for line in compare(Ledger(), totals))
