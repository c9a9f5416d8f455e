"""`dry_run` as a program: what it prints and writes, and its status where ranks do not match."""
import json
from dataclasses import replace

import pytest

from reference.config import Recompute
from reference.costs.plans import Plan
from shardlab.dry_run import options
from shardlab.dry_run.__main__ import main
from shardlab.dry_run.world import DryRun
from shardlab.predict.rank import run_rank
from shardlab.report.forecast import forecast_of
from tests.deep import one_fast_of
from tests.planted import planted

SMALL = ("--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 128 "
         "--global-batch-size 32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --bf16").split()


def test_the_report(capsys, tmp_path):
    """Memory by kind and by line, messages, time, a timeline on which no slices overlap, and a match of all kinds."""
    main(["--world-size", "32", *SMALL, "--trace", str(tmp_path), "--save", str(tmp_path / "none")])
    text = capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    assert "t 2, p 4, d 4, 1f1b;" in text and "without effect on a dry run: --save" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("rank ")] == ["0", "8", "24"]
    for words in ("  gradients ", "  optimizer: m ", "  saved for the backward ", "  mpi_impl/layers/", "  tensor x2 ",
                  "  pipeline x4 ", "  data x4 ", "a step takes ", "ranks match"):
        assert words in text, words
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "rank 0", "rank 8", "rank 24"}
    actions = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert sum(name.startswith("0F") for name in actions) == sum(name.startswith("0B") for name in actions) == 2


def test_a_mismatch_ends_with_status_1(capsys):
    with planted("mpi_impl.parallel.model_state", "if self.embedding_group:",
                 "if self.embedding_group and self.embedding_group.rank == 0:"), pytest.raises(SystemExit, match="1"):
        main(["--world-size", "8", *SMALL])
    assert "The ranks deadlock: rank 0 waits for rank 6" in capsys.readouterr().out


GPT = "--seq-length 2048 --micro-batch-size 1 --tensor-model-parallel-size 8 --bf16 --recompute-granularity full " \
      "--hidden-dropout 0 --attention-dropout 0 --global-batch-size"


@pytest.mark.parametrize("ranks, argv", one_fast_of(3, [
    (16_384, "--preset llama3-405b --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
             "--sequence-parallel --use-distributed-optimizer"),
    (3_072, "--num-layers 128 --hidden-size 25600 --num-attention-heads 160 --pipeline-model-parallel-size 64 "
            f"{GPT} 3072"),
    (1_024, "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --pipeline-model-parallel-size 16 "
            f"{GPT} 1536")]))
def test_formulas_and_dry_runs_agree(ranks, argv):
    """The forecast leaves out what lives within an action, at most a tenth of the peak. The planner, whose `selective`
    is our attention, is within 5 % of the peak, once gradients have 4 bytes.
    """
    world = options.parse(["--world-size", str(ranks), *argv.split()]).world
    dry, parallel = DryRun(world), world.parallel
    if parallel.recompute.granularity == "none":
        parallel = replace(parallel, recompute=Recompute("selective"))
    plan = Plan(world.model, parallel, world.microbatches)
    for stage in (0, parallel.pipeline_model_parallel_size - 1):
        run = run_rank(world, dry.of_pipeline_rank(stage), measured=True)
        peak = run.peak.size
        assert 0.9 * peak < forecast_of(run.held).total < peak
        planned = plan.memory_of(stage)
        assert sum(planned) + planned.gradients == pytest.approx(peak, rel=0.05)
