"""The experiments, with models small enough for seconds."""
import numpy as np
import pytest

from mpi_impl.comm.trace import Slice
from mpi_impl.experiments import layer_norm_order, model_size, prefetch, shared_layers, stale_weights
from mpi_impl.experiments.divided_runs import final
from mpi_impl.experiments.layer_norm_order import CHANCE, ORDERS, POSITIONS, Run, Trained, batches, table
from reference.errors import UserError
from reference.schedules.generators import make
from reference.schedules.simulate import Times, simulate
from tests.program import refusal

SMALL = ["--layers", "1", "2", "--seeds", "2", "--train-iters", "6"]


def test_the_result_does_not_depend_on_the_ranks(ranks, tmp_path, capfd):
    """The table is the same, and there is a picture, however the runs are divided among the ranks."""
    told = []
    for n in (1, 3):
        plot = tmp_path / f"{n}.png"
        ranks.run(n, layer_norm_order.show, [*SMALL, "--plot", str(plot)])
        printed = capfd.readouterr().out
        assert plot.read_bytes().startswith(b"\x89PNG") and f"losses drawn in {plot}" in printed
        told.append(printed[printed.index("layers  order"):printed.index("\nWith 1 layer ")])
        assert sum(" of 8: " in line for line in printed.splitlines()) == 8
    assert told[0] == told[1] and told[0].count("rearranged") == told[0].count("original") == 2


def test_a_batch_can_be_filled_in():
    """Every masked number follows from any two that are not; each sample has one; seeds differ."""
    one, other = (next(batches(seed)) for seed in (0, 1))
    assert not np.array_equal(one.targets, other.targets)
    whole = np.where(one.weights, one.targets, one.tokens)
    steps = np.diff(whole, axis=1) % layer_norm_order.NUMBERS
    assert (steps == steps[:, :1]).all() and one.weights.any(1).all() and (one.lengths == POSITIONS).all()
    assert ((one.tokens == layer_norm_order.MASK) == one.weights).all()


def test_the_table_has_the_median_and_the_spread():
    """A run that diverged is no better than chance; the median is not moved by it."""
    curves = {Run(3, order, seed): np.full(20, value) for order in ORDERS
              for seed, value in enumerate((1.0, 2.0, np.inf))}
    lines = table(curves, 20).splitlines()
    assert all(line.split() == ["3", order, "2.000", "1.000", "inf", "1", "of", "3"]
               for line, order in zip(lines[1:], reversed(ORDERS)))
    assert final(np.arange(20.0)) == 18.5 and pytest.approx(np.log(24)) == CHANCE


def trained(curves: dict) -> dict:
    """Make three runs of every curve, which is by (layers, order)."""
    return {Run(*kind, seed): Trained(curve + 0.01 * (seed - 1), 0.5) for kind, curve in curves.items()
            for seed in range(3)}


def test_the_words_follow_from_the_curves():
    """Whichever order wins is named; so is whether deeper is better; a deep model at half the pace needs twice as long.
    """
    falling = np.linspace(3.0, 1.0, 200)
    half_the_pace = np.repeat(falling[:100], 2)
    kinds = {(4, "rearranged"): falling, (4, "original"): falling - 0.5,
             (24, "rearranged"): half_the_pace, (24, "original"): np.full(200, CHANCE)}
    first, second, third, *forecast, last = layer_norm_order.conclusions(trained(kinds), 2).splitlines()
    assert first == ("With 4 layers the original order has the lower median: 0.595, and 1.095 in the rearranged order. "
                     "The seeds' spreads do not overlap.")
    assert second.startswith("With 24 layers the rearranged order") and second.endswith("3 of 3 are not below chance.")
    assert third == "In the rearranged order 24 layers are worse than 4: 2.050 and 1.095."
    assert last == "In the original order 24 layers are worse than 4: 3.178 and 0.595."
    assert " ".join(forecast) == (
        "What 24 layers reached after 200 iterations, 4 had reached after 105. At that pace 24 layers need about 381 "
        "iterations to reach 1.095: with the 0.500 s of an iteration here, 4.8 minutes for 3 models on 2 ranks.")
    better = layer_norm_order.conclusions(trained({(1, order): falling for order in ORDERS}
                                                  | {(2, order): falling / 2 for order in ORDERS}), 1)
    assert better.count("The seeds' spreads overlap.") == better.count("2 layers are better than 1: 0.548") == 2
    assert "an iteration here" not in better


@pytest.mark.parametrize("options, said", [
    ("--seeds 0", "--seeds is 0, but must be at least 1."), ("--layers 4 0", "--layers is 0, but must be at least 1."),
    ("--plot /nowhere/at/all.png", "/nowhere/at/all.png cannot be written"),
    ("--plot curves.xyz", "--plot is 'curves.xyz', but must be a file that ends in .png, .pdf, .svg.")])
def test_what_is_refused(ranks, options, said):
    assert said in ranks.run(2, refusal, layer_norm_order.show, options.split())[0]


@pytest.mark.parametrize("program, options", [
    (layer_norm_order, "--lr -1"), (layer_norm_order, "--layers 4 20000"), (shared_layers, "--lr -1"),
    (shared_layers, "--num-layers 20000"), (model_size, "--lr -1"), (model_size, "--hidden-size 16 1600000")])
def test_rates_and_sizes_are_checked_before_any_model_is_trained(program, options):
    with pytest.raises(UserError, match="must be a number that is not negative|must be at most"):
        program.parse_options(options.split())


def test_stale_weights_are_compared_over_the_same_microbatches(ranks, tmp_path, capfd):
    """With one stage nothing is late: three ways are one, and take as long; a flush after several has fewer updates."""
    plot = tmp_path / "stale.png"
    options = f"--stages 1 --microbatches 8 --flush-after 4 --seeds 1 --lr 0.05 0.1 --plot {plot}"
    ranks.run(2, stale_weights.show, options.split())
    printed = capfd.readouterr().out
    rows = [line.split()[-4:] for line in printed.splitlines() if line.startswith(("a flush", "no flush"))]
    assert rows[0] == rows[2] == rows[3] and rows[0][:2] == ["8", "8"] and rows[1][:2] == ["8", "2"]
    assert rows[1][2:] != rows[0][2:] and plot.read_bytes().startswith(b"\x89PNG")


def test_the_time_of_a_step_is_its_microbatches_and_the_fill():
    """The simulator's time for 1F1B, once for each step."""
    args = stale_weights.StaleWeightsOptions(stages=3, microbatches=12, flush_after=4)
    for way in stale_weights.WAYS:
        m = stale_weights.step_of(way, args)
        span = simulate(make("1f1b", 3, m), Times()).makespan / 3       # F = I = W = 1
        assert stale_weights.times(way, args)[-1] == 12 // m * span


@pytest.mark.parametrize("options, said", [
    ("--stages 0", "--stages is 0, but must be at least 1."), ("--lr 0.1 0", "--lr is 0.1 0, but each must be"),
    ("--lr inf", "inf is not a finite number"), ("--plot /nowhere/at/all.png", "cannot be written")])
def test_what_stale_weights_refuses(ranks, options, said):
    assert said in ranks.run(2, refusal, stale_weights.show, options.split())[0]


def test_shared_layers_save_parameters_alone(ranks, tmp_path, capfd):
    """One block for all layers has the parameters and states of one layer, the activations and FLOPs of all; and it is
    trained on the same numbers, which follow from the two before them.
    """
    plot = tmp_path / "shared.png"
    ranks.run(2, shared_layers.show, f"--num-layers 2 --seeds 1 --train-iters 2 --plot {plot}".split())
    printed = capfd.readouterr().out.splitlines()
    own, shared, one = (next(line for line in printed if line.startswith(f"{kind}  ")).split()[-7:]
                        for kind in shared_layers.KINDS)
    assert shared[:2] == one[:2] != own[:2] and shared[2:4] == own[2:4] != one[2:4]
    assert len({row[4] for row in (own, shared, one)}) == 3 and plot.read_bytes().startswith(b"\x89PNG")
    tokens, targets = next(shared_layers.batches(0))[:2]
    found = {}
    for two, third in zip(zip(tokens[:, :-1].flat, tokens[:, 1:].flat), targets[:, 1:].flat):
        assert found.setdefault(two, third) == third


@pytest.mark.parametrize("options, said", [
    ("--num-layers 0", "--num-layers is 0, but must be at least 1."), ("--lr -1", "--lr is -1.0, but must be"),
    ("--plot /nowhere/at/all.png", "cannot be written")])
def test_what_shared_layers_refuses(ranks, options, said):
    assert said in ranks.run(2, refusal, shared_layers.show, options.split())[0]


def test_prefetch_hides_gathers_and_changes_nothing(ranks, tmp_path, capfd):
    """Without it every gather begins when all ranks want it; with it, before the last of them does. Both ways compute
    the same, to the bit.
    """
    plot = tmp_path / "prefetch.png"
    options = f"--num-layers 3 --hidden-size 64 --steps 1 --message-time 0.5 --plot {plot}"
    ranks.run(2, prefetch.show, options.split())
    rows = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("0.5 ")]
    assert [row[1] for row in rows] == ["no", "yes"] and plot.read_bytes().startswith(b"\x89PNG")
    assert rows[0][3:] == ["0%"] * 4 and rows[1][4] == rows[1][6] == "67%"
    assert all(0 <= float(share.rstrip("%")) <= 67 for share in (rows[1][3], rows[1][5]))
    args = prefetch.PrefetchOptions(num_layers=2, hidden_size=16, steps=2)
    runs = {early: ranks.run(2, prefetch.train, args, early, 1e-3) for early in (False, True)}
    late, early = ([step.loss for step in of_ranks[0]] for of_ranks in runs.values())
    assert late == early and late[0] != late[1]
    for early, of_ranks in runs.items():
        for steps in zip(*of_ranks):
            for gathers in zip(*(step.gathers for step in steps), strict=True):     # the same one, on both ranks
                assert (gathers[0].start < max(one.wanted for one in gathers)) == early


@pytest.mark.parametrize("wanted, waits, expected", [
    (10.0, [], 4.0), (3.0, [], 1.0), (2.0, [], 0.0), (1.0, [], 0.0), (10.0, [(0.0, 3.0), (5.0, 7.0)], 2.0),
    (4.0, [(3.0, 9.0)], 1.0)])
def test_what_of_a_gather_is_hidden(wanted, waits, expected):
    """The time from 2 to 6 that the rank computes: until it wants the unit, less its waits for something else."""
    slices = [Slice("communication", "gradients", "communication", *each) for each in waits]
    assert prefetch.hidden(prefetch.Gather("blocks.0", 2.0, 6.0, wanted), slices) == expected


@pytest.mark.parametrize("options, said", [
    ("--steps 0", "--steps is 0, but must be at least 1."), ("--message-time 1 0", "--message-time is 1 0, but each"),
    ("--plot /nowhere/at/all.png", "cannot be written")])
def test_what_prefetch_refuses(ranks, options, said):
    assert said in ranks.run(2, refusal, prefetch.show, options.split())[0]


def test_a_rank_alone_has_nothing_to_prefetch(ranks):
    assert "Start at least 2 ranks." in ranks.run(1, refusal, prefetch.show, [])[0]
