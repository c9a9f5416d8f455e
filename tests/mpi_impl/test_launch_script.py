"""A course's launch script, as docs/megatron.md has it: checked, dry-run, and run for a few steps."""
import json
import re

import pytest

from reference.optimizers.adam import learning_rate
from shardlab.dry_run.__main__ import main
from shardlab.programs.settings import parse
from tests.launching import ROOT
from tests.program import pretrain

PAGE = (ROOT / "docs/megatron.md").read_text()
SCRIPT = re.search(r'GPT_ARGS="(.*?)"', PAGE, re.DOTALL)[1].split()


def test_its_options_mean_what_the_page_says():
    """Those of the checked settings, and a row of the table for each option."""
    named = [name for row in re.findall(r"^\| (`--.*?) \|", PAGE, re.MULTILINE) for name in re.findall("`(.*?)`", row)]
    assert set(" ".join(named).split()) >= set(SCRIPT)
    found = parse(SCRIPT, 4)
    assert found.model(51_200).head_size == 64 and found.microbatches == 4 and found.parallel.data_parallel_size == 1
    rates = {step: learning_rate(found.optimizer, step) for step in (3199, 3200, 320_000, 500_000)}
    assert rates[3199] < rates[3200] == 1.5e-4 and rates[320_000] == pytest.approx(1e-5) and rates[500_000] == 1e-5


def test_its_dry_run_predicts_what_the_page_says(capsys):
    main(["--world-size", "4", *SCRIPT])
    printed, (first, last, seconds) = capsys.readouterr().out, re.search(
        r"predicts ([\d.]+ GB) .*? ([\d.]+ GB) .*? ([\d.]+ s) for a step", PAGE, re.DOTALL).groups()
    assert re.findall(r"^rank \d.*: (.*) at the peak", printed, re.MULTILINE) == [first, last]
    assert f"a step takes {seconds} on dgx-a100" in printed and "355,788,800 parameters" in printed
    assert "no rank waits forever" in printed


def test_it_runs(ranks, corpus, tmp_path):
    """For three steps, with a smaller model and scale of the loss; the learning rates are those of the script."""
    metrics, small = tmp_path / "metrics", """--hidden-size 32 --seq-length 32 --max-position-embeddings 32
        --vocab-size 300 --exit-interval 3 --eval-iters 0 --initial-loss-scale 65536 --metrics-file""".split()
    ranks.run(4, pretrain, [*SCRIPT, *corpus, *small, str(metrics)], timeout=120)
    steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if "lm_loss" in row]
    assert [row["learning_rate"] for row in steps] == pytest.approx([step * 1.5e-4 / 3200 for step in (1, 2, 3)])
