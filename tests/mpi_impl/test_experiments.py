"""The experiments: small runs of each end well, what they say follows from their results, and options are checked."""

import numpy as np
import pytest

from mpi_impl.comm.trace import Slice
from reference.schedules.generators import make
from reference.schedules.simulate import Times, simulate
from shardlab.experiments import layer_norm_order, prefetch, stale_weights, training_data
from shardlab.experiments.batch_size import BatchSize, BatchSizeOptions, Measured, hyperbola
from shardlab.experiments.layer_norm_order import LayerNormOrder
from shardlab.experiments.model_size import ModelSize
from shardlab.experiments.prefetch import Prefetch
from shardlab.experiments.shared_layers import SharedLayers
from shardlab.experiments.stale_weights import StaleWeights
from tests.program import refusal


def rows_of(ranks, capfd, tmp_path, program, options, start, n=2) -> list[list[str]]:
    """Return the words of the lines that a program on n ranks prints, and that begin so. It draws a picture, too."""
    plot = tmp_path / f"{n}.png"
    ranks.run(n, program.show, [*options.split(), "--plot", str(plot)])
    lines = capfd.readouterr().out.splitlines()
    assert plot.read_bytes().startswith(b"\x89PNG") and f"drawn in {plot}" in lines
    return [line.split() for line in lines if line.startswith(start)]


@pytest.mark.parametrize("program, options, said", [
    (LayerNormOrder, "--layers 4 0", "--layers is 0"), (StaleWeights, "--lr 0.1 0", "--lr is 0,"),
    (ModelSize, "--hidden-size 16 24", "must be a multiple of 16, the size of a head"),
    (BatchSize, "--plot /nowhere/at/all.png", "cannot be written")])
def test_options_are_checked_before_any_model_is_trained(ranks, program, options, said):
    assert said in ranks.run(2, refusal, program.show, options.split())[0]


def test_a_rank_alone_has_nothing_to_prefetch(ranks):
    assert "at least 2 ranks" in ranks.run(1, refusal, Prefetch.show, [])[0]


# ---- training in several ways ---------------------------------------------------------------------------------------


def test_the_result_does_not_depend_on_the_ranks(ranks, tmp_path, capfd):
    """The table is the same however the runs are divided among the ranks."""
    one, three = (rows_of(ranks, capfd, tmp_path, LayerNormOrder, "--layers 1 2 --seeds 1 --train-iters 4",
                          ("1 layer,", "2 layers,"), n) for n in (1, 3))
    assert one == three and len({tuple(row[-3:]) for row in one}) == 4        # depths and orders differ


def test_stale_weights_are_compared_over_the_same_microbatches(ranks, tmp_path, capfd):
    """With one stage nothing is late: three ways are one, and take as long; a flush after several has fewer updates."""
    each, some, *others = (row[-5:] for row in rows_of(
        ranks, capfd, tmp_path, StaleWeights, "--stages 1 --microbatches 8 --flush-after 4 --seeds 1 --lr 0.05",
        "rate 0.05, "))
    assert others == [each, each] and each[:2] == ["8", "8"] and some[:2] == ["8", "2"] and some[2:] != each[2:]


def test_the_time_of_a_step_is_its_microbatches_and_the_fill():
    """The simulator's time for 1F1B, once for each step."""
    experiment = StaleWeights(stale_weights.StaleWeightsOptions(stages=3, microbatches=12, flush_after=4))
    for kind in experiment.kinds():
        m = experiment.step_of(kind.name)
        span = simulate(make("1f1b", 3, m), Times()).makespan / 3       # F = I = W = 1
        assert experiment.at(kind, 12)[-1] == 12 // m * span


def test_shared_layers_save_parameters_alone(ranks, tmp_path, capfd):
    """One block for all layers has the parameters and states of one layer, the activations and FLOPs of all."""
    own, shared, one = (row[-7:] for row in rows_of(
        ranks, capfd, tmp_path, SharedLayers, "--num-layers 2 --seeds 1 --train-iters 2",
        ("a block for each layer", "one block for all layers", "one layer")))
    assert shared[:2] == one[:2] != own[:2] and shared[2:4] == own[2:4] != one[2:4]
    assert len({row[4] for row in (own, shared, one)}) == 3


def test_models_of_two_sizes(ranks, tmp_path, capfd):
    """Each kind and size has a row, and a wider model more parameters."""
    rows = rows_of(ranks, capfd, tmp_path, ModelSize, "--hidden-size 32 16 --seeds 1 --train-iters 1", ("GPT", "BERT"))
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("GPT,", "16", "11,200"), ("GPT,", "32", "34,688"), ("BERT,", "16", "11,809"), ("BERT,", "32", "36,161")]


# ---- prefetch -------------------------------------------------------------------------------------------------------


def test_prefetch_hides_gathers_and_changes_nothing(ranks, tmp_path, capfd):
    """Without it nothing is hidden; with it, all gathers but the first. Both ways compute the same, to the bit."""
    no, yes = rows_of(ranks, capfd, tmp_path, Prefetch,
                      "--num-layers 3 --hidden-size 64 --steps 1 --message-time 0.5", "0.5 ")
    assert max(int(share[:-1]) for share in no[3:]) < 10 and yes[4] == yes[6] == "67%"
    args = prefetch.PrefetchOptions(num_layers=2, hidden_size=16, steps=2)
    runs = {early: ranks.run(2, prefetch.train, args, early, 1e-3) for early in (False, True)}
    late, early = ([step.loss for step in of_ranks[0]] for of_ranks in runs.values())
    assert late == early and late[0] != late[1]


def test_what_of_gathers_is_hidden():
    """Two gathers of blocks take 4 and 2 seconds, of which a rank computes for 2 and 0."""
    waits = [Slice("communication", "", "communication", *each) for each in ((3.0, 4.0), (5.0, 9.0))]
    gathers = [Slice("gathers", name, "communication", *each) for name, *each in (
        ("blocks.0", 2.0, 6.0), ("blocks.1", 7.0, 9.0), ("head", 0.0, 2.0), ("blocks.1", 10.0, 12.0))]
    step = prefetch.TracedStep([Slice("compute", "0F0", "F", 0.0, 9.5), *waits, *gathers], 0.0)
    assert prefetch.hidden_share([step], "F") == 2 / 6


# ---- the data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", layer_norm_order.TASKS)
def test_masked_numbers_can_be_known(task):
    """In walks what follows a number is in the sample's table, and only that is masked; with equal steps each number
    follows from any two that are not masked. Each sample has one.
    """
    numbers, positions, batch = layer_norm_order.TASKS[task]
    one = batch(np.random.default_rng(0))
    whole = np.where(one.weights, one.targets, one.tokens)
    assert one.weights.any(1).all() and whole.shape[1] == positions and (one.weights == (one.tokens == numbers)).all()
    if task == "walks":
        assert (whole[:, numbers + 1:] == np.take_along_axis(whole[:, :numbers], whole[:, numbers:-1], 1)).all()
        assert (np.sort(whole[:, :numbers], 1) == np.arange(numbers)).all()
    else:
        steps = np.diff(whole, axis=1) % numbers
        assert (steps == steps[:, :1]).all()


def test_a_berts_masked_bytes_give_back_the_text():
    text = np.arange(40, dtype=np.uint8)
    bert = training_data.bert_batch(text, np.random.default_rng(1), 300, 8)
    whole = np.where(bert.weights, bert.targets, bert.tokens)
    assert (whole == whole[:, :1] + np.arange(8)).all() and {*whole[:, 0]} == {*range(33)} and bert.weights.any(1).all()


# ---- batch_size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, rows", [
    ("--loss 9", ["1 0.001 1 1 1 1", "2 0.001 1 1 1 100% 2", "4 0.001 1 1 1 100% 4"]),
    ("--loss 0.1 --max-steps 3 --max-samples 4", [f"{b} 0.001 inf inf inf inf" for b in (1, 2, 4)])])
def test_batches_of_several_sizes(ranks, tmp_path, capfd, options, rows):
    """A loss above the first is reached after a step, by every batch; one below all of them by none."""
    options = f"--batch-size 4 1 2 --seeds 2 --lr 0.001 {options}"
    assert [" ".join(row) for row in rows_of(ranks, capfd, tmp_path, BatchSize, options, "    ")] == rows


def test_mccandlishs_curve_is_found_again():
    """Steps computed from the curve give back its two numbers, and their quotient is the critical batch size. Of two
    rates, the one with the least median counts.
    """
    sizes = 1, 2, 4, 8, 16, 32, 64
    assert hyperbola({b: Measured(0.1, np.array([60 + 1200 / b])) for b in sizes}) == pytest.approx((60, 1200))
    experiment = BatchSize(BatchSizeOptions(batch_size=sizes, lr=(0.1, 0.2)))
    results = {kind: np.array([[59], [60], [62 if lr == 0.1 else 10_000]]) * 1.0 + 1200 / b + (lr == 0.2)
               for kind, (b, lr) in experiment.kinds().items()}
    assert "At B = 20," in experiment.note(results) and " 58% " in experiment.table(results)      # 210 / 360
    assert all(one.lr == 0.1 for one in experiment.best(results).values())
