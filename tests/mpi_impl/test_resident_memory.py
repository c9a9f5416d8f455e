"""The memory that a rank has in use, as the system counts it."""
import re
from contextlib import contextmanager
from mmap import PAGESIZE, mmap
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from mpi_impl.launch.entry import keep_freed_memory
from reference.params import HOST
from shardlab.report import resident_memory
from shardlab.report.resident_memory import ResidentMemory
from tests.deep import every_other_deep
from tests.program import pretrain

MB = 10**6
NEAR = 5 * MB       # pages may be huge
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system forgets no peak")


@linux
def test_it_is_the_most_at_once_since_then(ranks):
    """Memory freed before does not count, though the process has kept it; memory freed since counts."""
    before, first, both, after = ranks.run(1, arrays)[0]
    assert abs(before) < NEAR
    assert first == pytest.approx(40 * MB, abs=NEAR) and both == pytest.approx(100 * MB, abs=NEAR)
    assert after == pytest.approx(both, abs=NEAR)


def arrays(group):
    keep_freed_memory()
    np.ones(200 * MB, np.uint8)                # and freed again
    counted, found = ResidentMemory(HOST), []
    found.append(counted.bytes)
    array = np.ones(40 * MB, np.uint8)
    found.append(counted.bytes)
    with touch(60 * MB):                     # which go back
        found.append(counted.bytes)
    found.append(counted.bytes)
    del array
    return found


@contextmanager
def touch(size):
    """Allocate these bytes for a while, and touch their pages, so that they are resident."""
    with mmap(-1, size) as pages:
        for first in range(0, size, PAGESIZE):
            pages[first] = 1
        yield


@linux
def test_a_system_that_has_no_proc(ranks):
    """There it is what the peak has grown by."""
    assert ranks.run(1, on_another_system)[0] == pytest.approx(60 * MB, abs=NEAR)


def on_another_system(group):
    resident_memory.forget_freed()
    with mock.patch.object(resident_memory, "status", return_value=0):
        counted = ResidentMemory(HOST)
        with touch(60 * MB):
            return counted.bytes


@linux
@pytest.mark.parametrize("n, more", every_other_deep([(2, "--tensor-model-parallel-size 2"), (1, "")]))
def test_a_run_takes_what_theory_says(ranks, corpus, capfd, n, more):
    """It takes less than half as much again, if it is so large that the rest of the process is small."""
    ranks.run(n, pretrain, [*corpus, *"""--num-layers 6 --hidden-size 512 --seq-length 128 --global-batch-size 4
                            --vocab-size 300 --micro-batch-size 2 --train-iters 3 --log-interval 1 --eval-iters 0
                            --split 8,2 --log-throughput""".split(), *more.split()], timeout=120)
    printed = capfd.readouterr().out
    line, = re.findall(r"iteration +1/.*\n(theoretical memory .*)\n", printed)
    states, activations, total, found = (float(size) for size in re.findall(r"([\d.,]+) MB", line))
    assert total == pytest.approx(states + activations, rel=0.01)
    assert f"{states:g} MB of parameters, gradients and moments, and at most {activations:g} MB of act" in printed
    assert total < found < 1.5 * total
