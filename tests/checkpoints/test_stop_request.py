"""A SIGTERM to any rank makes a run save a checkpoint and stop; the run that resumes from it is the undisturbed one."""
import re

import numpy as np
import pytest

from mpi_impl.data.indexed import write_indexed
from mpi_impl.launch.restarts import STOPPED
from tests.launching import launch

OPTIONS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1
    --global-batch-size 2 --log-interval 1 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 20
    --dtype float64 --train-iters 5""".split()

# pretrain_gpt, in which this rank gets a SIGTERM after this iteration.
PROGRAM = """
import os, signal, sys
from mpi_impl import pretrain_gpt
from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run
from shardlab.report.metrics import Metrics

rank, iteration, step = int(sys.argv.pop(1)), int(sys.argv.pop(1)), Metrics.step

def step_and_signal(self, number, *arguments):
    step(self, number, *arguments)
    if (world().rank, number) == (rank, iteration):
        os.kill(os.getpid(), signal.SIGTERM)

Metrics.step = step_and_signal
run(pretrain_gpt.main)
"""


@pytest.mark.parametrize("rank, iteration", [(1, 2), (0, 5)])
def test_a_run_stops_on_request_and_resumes(tmp_path, rank, iteration):
    """A request in the last iteration changes nothing."""
    write_indexed(tmp_path / "tokens", [np.arange(500) % 20], 21)
    (tmp_path / "program.py").write_text(PROGRAM)
    given = [*OPTIONS, "--data-path", tmp_path / "tokens", "--save", tmp_path / "saved", "--exit-signal-handler"]
    job = launch(2, tmp_path / "program.py", rank, iteration, *given)
    output, stops = job.stdout, iteration < 5
    assert (job.returncode, job.stderr) == (STOPPED * stops, "")
    assert (f"stopped by SIGTERM: --load {tmp_path}/saved resumes after iteration {iteration}\n" in output) == stops
    if stops:
        output += launch(2, "-m", "mpi_impl.pretrain_gpt", *given, "--load", tmp_path / "saved").stdout
    undisturbed = launch(1, "-m", "mpi_impl.pretrain_gpt", *given[:-3]).stdout
    assert losses(output) == losses(undisturbed) and len(losses(output)) == 5


def losses(output: str) -> list[tuple[str, ...]]:
    return re.findall(r"iteration +(\d+)/.* loss +([\d.]+) \| grad norm +([\d.]+)", output)
