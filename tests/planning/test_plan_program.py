"""The program: its table is the ranking, its picture the table, and nonsense gets a sentence."""
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from mpi_impl.plan import main, model_of, parse, table
from mpi_impl.planning.candidates import PlanSearch
from mpi_impl.planning.launch_line import launch_line
from mpi_impl.planning.picture import LABELS, TIME, draw_plans, label
from mpi_impl.planning.profiles import load, save
from mpi_impl.planning.reasons import reasons
from mpi_impl.programs.presets import PRESETS, VOCABULARIES
from mpi_impl.reports.charts import MEMORY
from reference.config import ModelConfig
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from reference.errors import UserError
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
    assert max(map(len, output.splitlines())) <= 120
    assert all(f"{letter}: " in letters for letter in ranking.split("\n")[0].split() if len(letter) == 1)
    assert f"{parameters(job.model) / 1e6:.2f} million parameters on 8 of dgx-a100, 16 samples of 256 tokens" in summary
    assert f"of {len(job.plans):,} plans {len(job.fitting):,} fit into the 76 GB" in summary
    assert " ".join(told.split()).endswith(": " + " ".join(reasons(job)))
    assert line == launch_line(job.best[0].plan, None, job.hardware)
    assert "--data-path" in last and "51,200 tokens" in last
    assert ranking == table(job, job.best[:6])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_table_has_the_numbers_of_its_plans(job, recompute):
    """FLOPs are the model's: recomputed work does not count."""
    shown = [one for one in job.fitting if one.plan.parallel.recompute.granularity == recompute][::40]
    head, *rows = (row.split() for row in table(job, shown).split("\n"))
    assert len(rows) == len(shown) > 5
    for one, row in zip(shown, rows):
        found, p = dict(zip(head, row)), one.plan.parallel
        assert tuple(int(found[name]) for name in "tpd") == one.shape[:3] and one.shape[3] == 1
        assert (int(found["b"]), int(found["m"]), int(found["ZeRO"])) == (one.plan.b, one.plan.m, p.zero_stage)
        assert (found["v"], found["recompute"]) == (str(p.virtual_pipeline_size or 1), p.recompute.granularity)
        assert found["sequence"] == ("split" if p.sequence_parallel else "whole")
        held = sum(one.plan.memory) / 1e9
        assert float(found["GB"]) == pytest.approx(held, abs=0.051 if held >= 1 else 0.00051)
        assert float(found["s/step"]) == pytest.approx(one.seconds, rel=0.006)
        assert float(found["idle"][:-1]) == pytest.approx(100 * one.time.idle / one.seconds, abs=0.051)
        reached = iteration_flops(job.model, 16, 256) / one.seconds / 8
        assert float(found["TFLOP/s"]) == pytest.approx(reached / 1e12, rel=0.006)
        assert float(found["MFU"][:-1]) == pytest.approx(100 * reached / 312e12, abs=0.051)


@pytest.mark.parametrize("name", [name for models in PRESETS.values() for name in models])
def test_a_preset_is_its_model(name):
    """Its vocabulary is padded as in the papers, or the published one; its sizes may be given anew."""
    options = ["--num-gpus", "8", "--global-batch-size", "8", "--preset", name]
    found, changed = (model_of(parse([*options, *more])) for more in ([], ["--num-layers", "6", "--vocab-size", "100"]))
    preset = PRESETS[found.architecture][name]
    assert name in PRESETS[found.architecture] and found.vocab_size == VOCABULARIES.get(
        name, {"gpt": 51_200, "bert": 30_592}[found.architecture])
    assert (found.num_layers, found.hidden_size, found.num_attention_heads, found.max_position_embeddings) == tuple(
        preset[size] for size in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"))
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


def test_a_profile_may_be_a_file(tmp_path, capsys):
    save(replace(REAL, memory=80e9), str(tmp_path / "mine.toml"))
    main([*SMALL.split(), "--hardware", str(tmp_path / "mine.toml"), "--best", "1"])
    assert "on 8 of mine" in capsys.readouterr().out


# ---- the picture ----------------------------------------------------------------------------------------------------


def test_the_picture_has_a_bar_for_each_plan_of_its_memory_and_of_its_time(job):
    best = job.best[:4]
    figure = draw_plans(job, best, "title")
    memory, seconds = figure.axes
    assert figure.get_suptitle() == "title"
    assert [text.get_text() for text in memory.get_yticklabels()] == list(map(label, best))
    for axes, colors, parts in ((memory, MEMORY, [one.plan.memory._asdict() for one in best]),
                                (seconds, TIME, [one.time._asdict() for one in best])):
        unit = 1e9 if axes is memory else 1
        bars = iter(axes.patches)
        for y, sizes in enumerate(parts):
            left = 0.0
            for name, size in sizes.items():
                bar = next(bars)
                assert (bar.get_x(), bar.get_width()) == pytest.approx((left, size / unit))
                assert bar.get_y() + bar.get_height() / 2 == pytest.approx(y)
                assert to_hex(bar.get_facecolor()).upper() == to_hex(colors[name]).upper()
                left += size / unit
        assert next(bars, None) is None
    held = [sum(one.plan.memory) / 1e9 for one in best]
    for axes, told in ((memory, held), (seconds, [one.seconds for one in best])):
        assert [float(text.get_text().split()[0]) for text in axes.texts] == pytest.approx(told, rel=0.006)
    assert memory.lines[0].get_xdata()[0] == pytest.approx(76) and memory.get_xlim()[1] > 76
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == [
        name for part, name in LABELS.items() if any(getattr(one.time, part) for one in best)]
    assert list(TIME) == list(LABELS) == list(best[0].time._fields)


def test_a_plan_is_labelled_by_what_it_chooses(job):
    for one in job.best:
        p, text = one.plan.parallel, label(one)
        assert ("t {}, p {}, d {}, ".format(*one.shape) + f"b {one.plan.b}") in text
        assert (f", v {p.virtual_pipeline_size}\n" in text) == bool(p.virtual_pipeline_size)
        assert ("ZeRO-" in text) == bool(p.zero_stage) and ("seq. parallel" in text) == p.sequence_parallel
        assert ("recompute" in text) == (p.recompute.granularity != "none")


def test_the_picture_is_a_file(tmp_path, capsys):
    main([*SMALL.split(), "--plot", str(tmp_path / "plans.png")])
    assert (tmp_path / "plans.png").read_bytes()[1:4] == b"PNG"
    assert f"the plans are drawn in {tmp_path / 'plans.png'}" in capsys.readouterr().out


# ---- nonsense -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, says", [
    ("--num-gpus 8 --global-batch-size 8", "needs --num-layers, --hidden-size, --num-attention-heads, --seq-length"),
    (f"{SMALL} --num-layers 0", "--num-layers is 0"), (f"{SMALL} --hidden-size 500", "must divide --hidden-size"),
    (f"{SMALL} --num-gpus 0", "--num-gpus is 0"), (f"{SMALL} --global-batch-size 0", "--global-batch-size is 0"),
    (f"{SMALL} --vocab-size 0", "--vocab-size is 0"), (f"{SMALL} --best 0", "--best is 0, but must be at least 1"),
    (f"{SMALL} --best 11", "at most 10"), (f"{SMALL} --hardware dgx-1", "'dgx-1', but must be dgx-2h"),
    (f"{SMALL} --preset gpt2-8.3", "Did you mean gpt2-8.3b"), (f"{SMALL} --num-gpus 11", "but no t x p x d gives"),
    (f"{SMALL} --num-gpu 11", "Did you mean --num-gpus"), (f"{SMALL} --plot plans.doc", "must be a file that ends in"),
    ("--preset gpt2-8.3b --num-gpus 1 --global-batch-size 8", "With --num-gpus 2 one fits"),
    (f"{SMALL} --num-layers 100000", "--num-layers is 100,000, but must be at most 10,000"),
    (f"{SMALL} --num-gpus 10000000", "--num-gpus is 10,000,000, but must be at most 1,000,000"),
    (f"{SMALL} --global-batch-size 100000000000000", "--global-batch-size is 100,000,000,000,000, but must be at most"),
    (f"{SMALL} --global-batch-size 10000000000000000000", "has more than 15 digits"),
    (f"{SMALL} --seq-length 9999999", "No number of them would do")])
def test_nonsense_gets_a_sentence(options, says):
    with pytest.raises(UserError, match=re.escape(says)):
        main(options.split())


def test_the_sentence_is_all_that_is_said_and_the_status_is_2():
    job = subprocess.run([sys.executable, "-m", "mpi_impl.plan", *SMALL.split(), "--num-gpus", "11"],
                         capture_output=True, text=True, timeout=60)
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr.startswith("error: --num-gpus is 11, but no t x p x d gives 11:")
    assert job.stderr.count("\n") == 1
