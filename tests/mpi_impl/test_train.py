"""`mpi_impl.train`, the file that a reader opens first: every split learns the same, and a wrong one is a sentence."""
import re

import numpy as np
import pytest

from tests.launching import launch

SMALL = "--num-layers 2 --hidden-size 16 --seq-length 16 --global-batch-size 8 --train-iters 3".split()


def losses(ranks: int, *options: str) -> list[float]:
    done = launch(ranks, "-m", "mpi_impl.train", *SMALL, *options)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_every_split_prints_the_losses_of_one_rank():
    alone = losses(1)
    assert len(alone) == 3 and alone[-1] < alone[0]
    for split in ("--t 2 --p 2", "--zero-stage 3 --micro-batch-size 1"):
        np.testing.assert_allclose(losses(4, *split.split()), alone, rtol=0, atol=2e-4)


@pytest.mark.parametrize("options, named", [
    ("--t 3", "--t x --p"), ("--global-batch-size 7", "--global-batch-size"), ("--text nowhere", "nowhere"),
    ("--train-iters 0", "--train-iters"), ("--lengt 3", "--lengt")])
def test_what_does_not_fit_is_a_sentence(options, named):
    done = launch(2, "-m", "mpi_impl.train", *options.split())
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: ") and named in done.stderr
    assert "Traceback" not in done.stderr
