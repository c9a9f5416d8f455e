"""The program: its table is the ranking, its picture the table."""
import time
from dataclasses import replace

import pytest

from reference.config import RECOMPUTE, ModelConfig
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from shardlab.plan.__main__ import main, table
from shardlab.plan.candidates import PlanSearch
from shardlab.plan.confirmation import predicted_bytes
from shardlab.plan.launch_line import launch_line
from shardlab.plan.options import model_of, parse
from shardlab.plan.profiles import load, save
from shardlab.plan.reasons import reasons
from shardlab.programs.presets import PRESETS, VOCABULARIES
from tests.plan_cases import REAL

SMALL = "--num-gpus 8 --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --global-batch-size 16"


@pytest.fixture(scope="module")
def job() -> PlanSearch:
    """Return the search for the options SMALL."""
    return PlanSearch(ModelConfig(8, 512, 8, 51_200, 256), 8, 16, load("dgx-a100"))


# ---- what it prints -------------------------------------------------------------------------------------------------


def test_it_prints_the_ranking_its_reasons_and_the_line_to_copy(job, capsys):
    main(SMALL.split())
    output = capsys.readouterr().out
    summary, ranking, letters, told, line, last = output.strip().split("\n\n")
    assert all(f"{letter}: " in letters for letter in ranking.split("\n")[0].split() if len(letter) == 1)
    assert f"{parameters(job.model) / 1e6:.2f} million parameters on 8 of dgx-a100, 16 samples of 256 tokens" in summary
    assert f"of {len(job.plans):,} plans {len(job.fitting):,} fit into the 76 GB" in summary
    assert " ".join(told.split()).endswith(": " + " ".join(reasons(job)))
    assert line == launch_line(job.best[0].plan, None, job.hardware)
    assert "--data-path" in last and "51,200 tokens" in last
    shown = replace(job, predict=predicted_bytes, shown=6)
    assert ranking == table(shown, shown.best) and [one.plan for one in shown.best] == [
        one.plan for one in job.best[:6]]


def test_the_table_has_the_numbers_of_its_plans(job):
    """FLOPs are the model's: recomputed work does not count."""
    shown = job.fitting[::25]
    head, *rows = (row.split() for row in table(job, shown).split("\n"))
    assert len(rows) == len(shown) > 20 and {one.plan.parallel.recompute.granularity for one in shown} == {*RECOMPUTE}
    for one, row in zip(shown, rows):
        found, p = dict(zip(head, row)), one.plan.parallel
        assert [found[name] for name in ("t", "p", "d", "v", "b", "m", "ZeRO", "sequence", "recompute")] == [
            *map(str, (*one.shape[:3], p.virtual_pipeline_size or 1, one.plan.b, one.plan.m, p.zero_stage)),
            "split" if p.sequence_parallel else "whole", p.recompute.granularity]
        reached = iteration_flops(job.model, 16, 256) / one.seconds / 8
        numbers = [float(found[name].rstrip("%")) for name in ("GB", "s/step", "idle", "TFLOP/s", "MFU")]
        assert numbers == pytest.approx([sum(job.needs(one.plan)) / 1e9, one.seconds, 100 * one.time.idle / one.seconds,
                                         reached / 1e12, 100 * reached / 312e12], rel=0.006, abs=0.051)


@pytest.mark.parametrize("name", [name for models in PRESETS.values() for name in models])
def test_a_presets_sizes_may_be_given_anew(name):
    """Its vocabulary is padded as in the papers, or the published one."""
    options = ["--num-gpus", "8", "--global-batch-size", "8", "--preset", name]
    found, changed = (model_of(parse([*options, *more])) for more in ([], ["--num-layers", "6", "--vocab-size", "100"]))
    assert found.vocab_size == VOCABULARIES.get(name, {"gpt": 51_200, "bert": 30_592}[found.architecture])
    assert changed == replace(found, num_layers=6, vocab_size=100)


@pytest.mark.deep
def test_3072_devices_take_seconds(capsys):
    """The trillion parameters of Narayanan et al. 2021: t = 8, the size of a server, and a pipeline."""
    start = time.process_time()
    main("--num-gpus 3072 --num-layers 128 --hidden-size 25600 --num-attention-heads 160 --seq-length 2048 "
         "--global-batch-size 3072 --best 1".split())
    assert time.process_time() - start < 60
    said = capsys.readouterr().out
    assert "1,008.04 billion parameters on 3,072" in said
    assert "Rule 1, t up to the 8 devices of a server, and only then p: holds." in said


def test_a_profile_may_be_a_file_and_the_plans_may_be_drawn(tmp_path, capsys):
    save(replace(REAL, memory=80e9), str(tmp_path / "mine.toml"))
    main([*SMALL.split(), "--hardware", str(tmp_path / "mine.toml"), "--best", "1", "--plot", str(tmp_path / "p.png")])
    assert "on 8 of mine" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes()[1:4] == b"PNG"
