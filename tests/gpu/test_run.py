"""A whole run with CUDA kernels, verified against the textbook step by step: ranks share a GPU, or emulate one."""
from unittest import mock

import numpy as np
import pytest

from mpi_impl.comm.device import Device, Memory
from mpi_impl.comm.transports.staging import DevicePath
from shardlab.programs import program
from tests.gpu import device
from tests.program import pretrain
from tests.spy import SpyArray

pytestmark = device.needs_somewhere
SMALL = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --micro-batch-size 2
    --global-batch-size 4 --train-iters 2 --lr 0.01 --vocab-size 300 --log-interval 1 --eval-iters 0 --split 8,2
    --device cuda --verify""".split()


@pytest.mark.parametrize("n, more", [
    pytest.param(n, more, marks=[] if device.REAL else pytest.mark.deep) for n, more in [
        (2, "--tensor-model-parallel-size 2 --bf16 --log-throughput"),
        (1, "--cuda-graph-impl full_iteration --hidden-dropout 0 --attention-dropout 0 --train-iters 8"),
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --dtype float64 --zero-stage 1"),
        (2, "--pipeline-model-parallel-size 2 --fp16 --loss-scale 1024 --recompute-granularity full"),
        (4, "--zero-stage 3 --dtype float32 --micro-batch-size 1")]])
def test_a_whole_run(ranks, corpus, capfd, n, more):
    ranks.run(n, pretrain_there, [*SMALL, *corpus, *more.split()], timeout=300)
    printed = capfd.readouterr().out
    assert "verified against one process, every iteration" in printed and "NOT" not in printed
    assert ("--attention-dropout" in printed) == ("16" in more), "dropout keeps halves from cuDNN"
    if "throughput" in more:
        assert "FLOP/s per rank | MFU " in printed and "(CuPy's pool, the textbook of --verify included)" in printed


def pretrain_there(group, options):
    if device.REAL:
        pretrain(group, options)
    else:
        with device.gpu(), mock.patch.object(program, "device_of", emulated), \
                mock.patch("shardlab.report.forecast.DEVICE_SIZE", 100):
            pretrain(group, options)


def emulated(name, ranks, backend=None):
    return Device(SpyArray(np.empty(0)), "computing in an emulation", DevicePath(), Memory("emulated", 10**9))
