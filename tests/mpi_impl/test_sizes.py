"""The experiments on sizes of models and of batches: their words follow from their results, and small runs work."""
import numpy as np
import pytest

from mpi_impl.experiments import batch_size, byte_windows, model_size
from mpi_impl.experiments.batch_size import BatchRun, BatchSizeOptions, Measured
from mpi_impl.experiments.byte_windows import MASK, bert_batch, gpt_batch
from tests.program import refusal


def test_the_batches_are_pieces_of_the_text():
    """A GPT's targets are the next bytes; a BERT's masked bytes give back the text; only they have a weight."""
    text = np.random.default_rng(0).integers(256, size=40, dtype=np.uint8)
    gpt, bert = (make(text, np.random.default_rng(1), 300, 8) for make in (gpt_batch, bert_batch))
    places = {bytes(text[i:i + 9]) for i in range(32)}
    rows = np.concatenate([gpt.tokens, gpt.targets[:, -1:]], 1)
    assert {row.astype(np.uint8).tobytes() for row in rows} == places and (gpt.targets[:, :-1] == rows[:, 1:-1]).all()
    whole = np.where(bert.weights, bert.targets, bert.tokens).astype(np.uint8)
    assert {row.tobytes() for row in whole} == {bytes(text[i:i + 8]) for i in range(33)}
    assert ((bert.tokens == MASK) == bert.weights).all() and bert.weights.any(1).all() and not bert.counted.any()
    assert not bert.targets[bert.weights == 0].any()


def test_validation_begins_where_training_ends():
    text = byte_windows.read_text()
    assert len(text.validation) == pytest.approx(0.05 * sum(map(len, text)), abs=1)


# ---- sizes of models ------------------------------------------------------------------------------------------------


def test_models_of_two_sizes(ranks, tmp_path, capfd):
    """Each kind and size has a row, and a wider model more parameters."""
    plot = tmp_path / "sizes.png"
    ranks.run(2, model_size.show, f"--hidden-size 32 16 --seeds 1 --train-iters 1 --plot {plot}".split())
    printed = capfd.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG") and "have seen 512 bytes in 1 iteration" in printed
    rows = [line.split()[:3] for line in printed.splitlines() if line.startswith(("GPT  ", "BERT  "))]
    assert rows == [["GPT", "16", "11,200"], ["GPT", "32", "34,688"],
                    ["BERT", "16", "11,809"], ["BERT", "32", "36,161"]]


@pytest.mark.parametrize("losses, said", [
    ({16: [3.0, 3.2], 32: [2.0, 2.2]},
     "GPT: each larger model has a lower loss (3.100, 2.100), and its worst seed is better than the next smaller "
     "model's best."),
    ({16: [3.0, 3.2], 32: [2.0, 3.0]},
     "GPT: each larger model has a lower loss (3.100, 2.500), but the spreads of their seeds overlap."),
    ({16: [3.0], 32: [2.0], 64: [2.5]},
     "GPT: not every larger model has a lower loss. h = 64 has 2.500, and h = 32 2.000."),
    ({16: [3.0]}, "GPT: only one size was trained, so there is nothing to compare.")])
def test_the_words_about_models(losses, said):
    assert model_size.conclusion("GPT", losses) == said


@pytest.mark.parametrize("options, said", [
    ("--seeds 0", "--seeds is 0, but must be at least 1."), ("--train-iters 0", "--train-iters is 0, but must be"),
    ("--hidden-size 16 24", "--hidden-size is 24, but must be a multiple of 16, the size of a head."),
    ("--plot /nowhere/at/all.png", "cannot be written")])
def test_what_model_size_refuses(ranks, options, said):
    assert said in ranks.run(2, refusal, model_size.show, options.split())[0]


# ---- sizes of batches -----------------------------------------------------------------------------------------------


def test_batches_of_several_sizes(ranks, tmp_path, capfd):
    """A loss above the first is reached after a step, by every batch; one below all of them by none."""
    plot = tmp_path / "batches.png"
    sizes = f"--batch-size 4 1 2 --seeds 2 --lr 0.001 --plot {plot}"
    ranks.run(2, batch_size.show, [*sizes.split(), "--loss", "9"])
    printed = capfd.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("    ")]
    assert rows == [["1", "0.001", "1", "1", "1", "1"], ["2", "0.001", "1", "1", "1", "100%", "2"],
                    ["4", "0.001", "1", "1", "1", "100%", "4"]]
    assert "Doubling a batch of 1 no longer halves them" in printed and plot.read_bytes().startswith(b"\x89PNG")
    ranks.run(2, batch_size.show, [*sizes.split(), "--loss", "0.1", "--max-steps", "3", "--max-samples", "4"])
    printed = capfd.readouterr().out
    assert printed.count("inf to inf steps") == 3 and "there is nothing to compare" in printed


def test_the_best_rate_has_the_least_median_and_no_run_takes_twice_as_long():
    steps = {0.1: [900, 950, 300], 0.2: [400, 700, 350], 0.4: [399, 398, 999], 0.8: [100, np.inf, 798]}
    limits = []

    def count(one: BatchRun, limit: int) -> float:
        limits.append(limit)
        assert one.batch_size == 8
        return steps[one.lr][one.seed] if steps[one.lr][one.seed] <= limit else np.inf

    args = BatchSizeOptions(lr=(0.8, 0.2, 0.1, 0.4), seeds=3, max_steps=5000, max_samples=8000)
    assert batch_size.measure(8, count, args) == Measured(0.4, [398, 399, np.inf])
    assert limits == 3 * [1000] + 3 * [1000] + 3 * [800] + 3 * [798]


def test_mccandlishs_curve_is_found_again():
    """Steps computed from the curve give back its two numbers, and their quotient is the critical batch size."""
    steps = {b: [59 + 1200 / b, 60 + 1200 / b, 62 + 1200 / b] for b in (1, 2, 4, 8, 16, 32, 64)}
    assert batch_size.hyperbola(steps) == pytest.approx((60, 1200))
    assert batch_size.doublings(steps)[4] == pytest.approx(210 / 360)
    said = batch_size.conclusions(steps)
    assert ("From 1 to 8 samples, each doubling of the batch leaves at most 60% of the steps.\nDoubling a batch of 8 "
            "no longer halves them: 16 samples need 64% of its steps. Doubling 32 leaves 81%.\n") in said
    assert "critical batch size" in said and "At B = 20," in said
    assert "fewest samples are those of batch size 1; batch size 64 needs 4.0 times as many." in said


@pytest.mark.parametrize("steps, said", [
    ({1: [80], 2: [40], 4: [20]}, "Every doubling leaves at most 60% of the steps, so no batch here is too large."),
    ({1: [np.inf], 2: [40], 4: [20]}, "Every doubling leaves"),
    ({1: [80], 4: [20]}, "there is nothing to compare"), ({1: [80], 2: [np.inf]}, "there is nothing to compare")])
def test_the_words_about_batches(steps, said):
    assert said in batch_size.conclusions(steps)


@pytest.mark.parametrize("options, said", [
    ("--seeds 0", "--seeds is 0, but must be at least 1."), ("--batch-size 4 0", "--batch-size is 0, but must be"),
    ("--batch-size 4 10000000", "--batch-size is 10,000,000, but must be at most"),
    ("--loss 0", "--loss is 0, but no model has a loss of 0 or less."),
    ("--lr 0", "--lr is 0, but each must be a number above 0."), ("--plot /nowhere/at/all.png", "cannot be written")])
def test_what_batch_size_refuses(ranks, options, said):
    assert said in ranks.run(2, refusal, batch_size.show, options.split())[0]
