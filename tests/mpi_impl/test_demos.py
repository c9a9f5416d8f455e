"""The memory demo is right on any number of ranks, and refuses wrong options with a sentence."""
import re

import pytest
from matplotlib.figure import Figure

from mpi_impl.demos import memory
from mpi_impl.launching.pool import RankAssertion, RankFailure
from mpi_impl.reports.charts import MEMORY
from mpi_impl.reports.layer_memory import variants
from tests.deep import one_fast_of
from tests.launching import launch

SMALL = "--num-layers 2 --seq-length 12 --vocab-size 50 --micro-batch-size 1 --train-iters 1".split()

def show(group, argv):
    memory.show(group, argv)


@pytest.mark.parametrize("n", one_fast_of(3, (3, 1, 2)))
def test_all_is_as_predicted(ranks, n, tmp_path, capsys):
    """On any number of ranks each run has two lines, measured and predicted, with the same numbers; and a picture."""
    ranks.run(n, show, [*SMALL, "--output", str(tmp_path / "memory.png")])
    text = capsys.readouterr().out
    runs, end = 5 + len(variants(n)), text.splitlines()[-1]
    assert end.startswith("Every measured number equals its prediction") and f"from {runs} runs on {n} rank" in end
    lines = [re.split(" {2,}", line) for line in text.splitlines()]
    measured = [cells[2:] for cells in lines if cells[1:2] == ["measured"] and "our inventory" not in cells]
    predicted = [cells[2:] for cells in lines if cells[1:2] == ["= predicted"]]
    assert len(measured) == runs and measured == predicted and max(map(len, text.splitlines())) <= 120
    assert "NOT" not in text and (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture(ranks, tmp_path, monkeypatch):
    """Its bars are the bytes, measured above predicted, and their lengths add up."""
    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (kept.append(figure), save(figure, *a, **k)))
    panels = {title: {name: list(map(foreseen, everyone)) for name, everyone in panel.items()}
              for title, panel in ranks.run(2, found_in_a_run)[0].items()}
    memory.draw(str(tmp_path / "picture.png"), panels, "a model")
    figure, = kept
    for axes, panel in zip(figure.axes, panels.values(), strict=True):
        assert [label.get_text() for label in axes.get_yticklabels()] == list(panel)
        bars = [(round(bar.get_y() + bar.get_height() / 2, 2), bar.get_x(), bar.get_width()) for bar in axes.patches]
        for row, everyone in enumerate(panel.values()):
            for middle, states in ((row - 0.19, everyone[0].held), (row + 0.19, everyone[0].expected)):
                mine = [(x, width) for y, x, width in bars if y == pytest.approx(middle)]
                assert [width for _, width in mine] == pytest.approx([n / 1e3 for n in memory.parts(states).values()])
                assert [x for x, _ in mine] == pytest.approx([sum(w for _, w in mine[:i]) for i in range(len(mine))])
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [*MEMORY, "measured", "predicted"]


def foreseen(one):
    """Return the same memory with a wrong prediction, so that the bars can be told apart."""
    return one._replace(expected=one.expected._replace(gradients=one.expected.gradients + 1000))


def found_in_a_run(group):
    options = memory.parse_options([*SMALL, "--hidden-size", "8"], group.size)
    model = memory.model_of(options)
    return {title: {name: memory.train(group, parallel, model, options) for name, parallel in runs.items()}
            for title, runs in (("replicas", memory.replica_runs(2, model)),
                                ("shards", memory.sharing_runs(2, model, 12)))}


def test_a_number_that_is_not_as_predicted_fails(ranks, tmp_path):
    """It fails on every rank, with a sentence that names the number."""
    with pytest.raises(RankAssertion, match="not as predicted: ZeRO 1: optimizer, rank 1, gradients: .* bytes"):
        ranks.run(2, show_what_is_wrong, [*SMALL, "--output", str(tmp_path / "memory.png")])


def show_what_is_wrong(group, argv):
    measure = memory.rank_memory

    def wrong(trainer, *sizes):
        one = measure(trainer, *sizes)
        wrong_here = group.rank == 1 and trainer.topology.config.zero_stage == 1
        return one._replace(held=one.held._replace(gradients=one.held.gradients + 4)) if wrong_here else one

    memory.rank_memory = wrong
    try:
        memory.show(group, argv)
    finally:
        memory.rank_memory = measure


@pytest.mark.parametrize("arguments, sentence", [
    ("--num-layers 100000", r"--num-layers is 100,000, but must be at most 10,000"),
    ("--num-layers 10000 --hidden-size 100000", r"Of .* parameters a rank would hold 16 bytes each"),
    ("--micro-batch-size 100000 --seq-length 10000", r"of activations. It has"),
    ("--num-layers 0", r"--num-layers is 0, but must be at least 1"),
    ("--train-iters 0", r"--train-iters is 0, but must be at least 1"),
    ("--num-attention-heads 3", r"--tensor-model-parallel-size is 2, but must divide --num-attention-heads"),
    ("--num-attention-heads 0", r"--num-attention-heads is 0, but must be at least 1"),
    ("--hidden-size 30", r"--num-attention-heads is 4, but must divide --hidden-size, which is 30"),
    ("--seq-length 13", r"--tensor-model-parallel-size is 2, but must divide --seq-length, which is 13"),
    ("--dtype float8", r"invalid choice: 'float8'|Did you mean float"),
    ("--layers 3", r"has no option --layers"),
    ("--output LICENSE/memory.png", "LICENSE is a file, where a folder is needed"),
])
def test_a_wrong_option_gets_a_sentence(ranks, capsys, arguments, sentence):
    """Nothing is printed besides."""
    with pytest.raises(RankFailure, match=f"UserError: .*({sentence})"):
        ranks.run(2, show, [*SMALL, *arguments.split()])
    assert capsys.readouterr().out == ""


@pytest.mark.deep
def test_the_program(tmp_path):
    """Started as the README says."""
    done = launch(2, "-m", "mpi_impl.demos.memory", *SMALL, "--output", tmp_path / "memory.png")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines()[-1].startswith("Every measured number equals its prediction")


@pytest.mark.deep
def test_the_program_with_an_option_that_is_wrong(tmp_path):
    wrong = launch(2, "-m", "mpi_impl.demos.memory", "--seq-length", "13", "--output", tmp_path / "memory.png")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: --tensor-model-parallel-size is 2, but must divide --seq-length")
