"""The ranks' devices: which GPU each rank gets, the error where there is none, and a whole run on a device."""
import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from mpi_impl.comm.device import Device, Memory, RankDevice, backend_of, device_of, gpus_here, path_of
from mpi_impl.comm.mpi_library import library, reads_devices
from mpi_impl.comm.transports.nccl import NCCL
from mpi_impl.comm.transports.staging import PinnedStaging
from mpi_impl.runtime import pinned
from reference.params import HOST
from shardlab.programs import program
from tests.fake_cuda import fake_cuda
from tests.program import pretrain, refusal
from tests.spy import SpyArray

SMALL = """--num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --micro-batch-size 2
    --global-batch-size 8 --train-iters 4 --lr 0.01 --vocab-size 300 --log-interval 1 --eval-interval 2 --eval-iters 1
    --split 8,2 --dtype float64 --verify --sample-tokens 3""".split()


@pytest.mark.parametrize("n, count, sentence", [
    (3, 2, "computing on 2 GPUs (A GPU), which 3 ranks share; messages go through pinned host memory"),
    (2, 4, "computing on 2 GPUs (A GPU); collectives go by NCCL, messages through pinned host memory")])
def test_a_rank_takes_the_gpu_of_its_number(ranks, n, count, sentence):
    ways = PinnedStaging, NCCL if n <= count else type(None)
    assert ranks.run(n, gpu_of, count) == [(rank % count, sentence, ways) for rank in range(n)]


def gpu_of(group, count):
    with fake_cuda(gpus=count, free=7) as cupy:
        device = device_of("cuda", group)
        assert isinstance(device.like, SpyArray) and device.memory == Memory(gpus_here()[cupy.used][0], 7)
        assert device.gpus == ["A GPU"] * min(group.size, count), "each once, though ranks share it"
        return cupy.used, device.description, tuple(map(type, device.path))


def devices(*gpus, nccl=True, mpi=False, version=22907, multiprocessors=132, mps=True):
    return [RankDevice(gpu, "A100" if gpu.startswith("two") else "H100", version if nccl else 0, mpi, multiprocessors,
                       mps) for gpu in gpus]


@pytest.mark.parametrize("nccl, mpi, asked, chosen", [
    (True, False, None, "nccl"), (True, True, None, "nccl"), (False, True, None, "mpi"), (False, False, None, "staged"),
    (True, True, "mpi", "mpi"), (True, True, "staged", "staged")])
def test_the_way_from_gpu_to_gpu_is_the_best_there_is_or_the_one_that_is_asked_for(nccl, mpi, asked, chosen):
    """One rank is enough without NCCL, with another MPI, or without a GPU of its own."""
    found = devices("one 0", "two 0", nccl=nccl, mpi=mpi)
    assert backend_of(found, asked) == chosen
    with fake_cuda():
        path = path_of(found, chosen)
    assert (path.nccl is not None) == (chosen == "nccl") and (path.staging is None) == (mpi and chosen != "staged")
    for other in (devices("two 1", nccl=False, mpi=True), devices("one 0", mpi=True)):
        assert asked or backend_of([*found, *other], None) == ("mpi" if mpi else "staged")


@pytest.mark.parametrize("asked, machine, said", [
    ("nccl", {"gpus": 2}, "ranks 0 and 2 share one: from 2.30 on it allows that, and this is 2.29.7"),
    ("nccl", {"gpus": 1, "nccl": 23007, "multiprocessors": 8}, "ranks 0, 1 and 2 share one, and it has room for those "
                                                               "of 2. Start fewer ranks"),
    ("nccl", {"gpus": 4, "nccl": 0}, "no NCCL on ranks 0, 1 and 2"),
    ("mpi", {"gpus": 4}, f"{library()} is not CUDA-aware")])
def test_a_way_that_is_not_there_is_refused_by_all_ranks(ranks, asked, machine, said):
    assert f"--distributed-backend is {asked}" in (found := ranks.run(3, refusal, device_on, asked, machine)[0])
    assert said in found


def device_on(group, asked, machine):
    with fake_cuda(**machine):
        device_of("cuda", group, asked)


@pytest.mark.parametrize("n, gpus, mps, blocks, turns", [
    (2, 1, True, 8, False), (8, 1, False, 4, True), (3, 2, True, 8, False), (4, 1, None, 8, True)])
def test_ranks_share_a_gpu_with_a_new_nccl_that_is_told_to(ranks, n, gpus, mps, blocks, turns):
    """And only if it is asked for; what the user has set stays. Each call then has the textbook's result."""
    for blocks_set in (None, "1"):
        found = ranks.run(n, sum_on_shared_gpus, gpus, mps, blocks_set)
        assert {(total, set_to) for total, set_to, _ in found} == {(n * (n - 1) / 2, blocks_set or str(blocks))}
        sentence, = {sentence for *_, sentence in found}
        assert f"which {n} ranks share; collectives go by NCCL" in sentence and "how long they take is not" in sentence
        assert ("--mps" in sentence) == turns


def sum_on_shared_gpus(group, gpus, mps, blocks_set):
    told = {} if blocks_set is None else {"NCCL_MAX_CTAS": blocks_set}
    with mock.patch.dict(os.environ, told), fake_cuda(gpus=gpus, nccl=23007, mps=mps):
        assert device_of("cuda", group).path.nccl is None, "nobody has asked for it"
        device = device_of("cuda", group, "nccl")
        group.instruments.device_path = device.path
        total = group.all_reduce(SpyArray(np.full(3, float(group.rank))), "test").get()
        for transport in group.transports.on_device:
            transport.free()
        del group.transports.on_device
        return total[0], os.environ["NCCL_MAX_CTAS"], device.description


@pytest.mark.parametrize("functions, aware", [
    ({"MPIX_Query_cuda_support": 0}, False), ({"MPIX_GPU_query_support": 0, "MPIX_Query_cuda_support": 1}, True)])
def test_an_mpi_is_asked_in_its_own_way(ranks, functions, aware):
    """MPICH's answer comes by a pointer, and is one about CUDA. That of the wheels does not read devices."""
    assert ranks.run(1, answers, functions) == [(False, aware)]


def answers(group, functions):
    """Return what this MPI says, and what one with these functions does."""
    calls = {"MPIX_Query_cuda_support": ctypes.CFUNCTYPE(ctypes.c_int)(lambda: functions["MPIX_Query_cuda_support"]),
             "MPIX_GPU_query_support": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))(
                 lambda kind, out: write_answer(out, kind == 0 and functions["MPIX_GPU_query_support"]))}
    itself = reads_devices()
    with mock.patch.object(ctypes, "CDLL", lambda path: SimpleNamespace(**{name: calls[name] for name in functions})):
        return itself, reads_devices()


def write_answer(out, answer):
    out[0] = answer
    return 0


def test_machines_are_told_apart_by_more_than_their_names(ranks):
    """Two machines, or containers on them, of one name, with a GPU each at the same address of the bus; and two
    containers on one machine, with names of their own.
    """
    assert ranks.run(2, on_machines, ["one", "two"], ["same", "same"]) == [NCCL] * 2
    assert ranks.run(2, on_machines, ["one", "one"], ["a", "b"]) == [type(None)] * 2


def on_machines(group, boots, names):
    with mock.patch.object(Path, "read_text", lambda *_, **__: boots[group.rank]), fake_cuda(), \
            mock.patch("socket.gethostname", lambda: names[group.rank]):
        return type(device_of("cuda", group).path.nccl)


@pytest.mark.parametrize("cupy, sentence", [
    (False, "--device is cuda, which needs CuPy, and that is not installed"),
    (True, "--device is cuda, but CUDA finds no GPU on this machine (cudaErrorNoDevice")])
def test_without_a_gpu_all_ranks_say_so(ranks, cupy, sentence):
    assert ranks.run(3, refusal, without_gpu, cupy)[0].startswith(sentence)


def without_gpu(group, cupy):
    """Ask for the ranks' GPUs where only rank 0 has one, so that the error must reach all ranks."""
    if group.rank == 0 or cupy:
        with fake_cuda(gpus=int(group.rank == 0)):
            device_of("cuda", group)
    with mock.patch.dict(sys.modules, cupy=None):
        assert device_of("cpu", group) == Device(HOST, "")
        device_of("cuda", group)


@pytest.mark.parametrize("n, way, more", [
    (4, "nccl", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    pytest.param(4, "mpi", "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --zero-stage 1 --cpu-offload "
                           "--recompute-granularity full", marks=pytest.mark.deep)])
def test_a_whole_run_on_a_device(ranks, corpus, tmp_path, capfd, n, way, more):
    """Trained, verified against one process, evaluated, sampled, recorded, traced, saved, and gone on with: nothing
    takes an array on a device for one on the host.
    """
    folder = str(tmp_path / "saved")
    options = [*SMALL, *corpus, *more.split(), "--device", "cuda", "--distributed-backend", way]
    ranks.run(n, pretrain_on_spies, [*options, "--save", folder, "--exit-interval", "2", "--record",
                                     str(tmp_path / "record"), "--trace", str(tmp_path / "trace")], timeout=120)
    printed = capfd.readouterr().out
    assert "computing on spies" in printed and "on all of them; a GPU has 1 GB free" in printed
    ranks.run(n, pretrain_on_spies, [*options, "--load", folder, "--plot", str(tmp_path / "loss.png")], timeout=120)
    printed = capfd.readouterr().out
    assert "verified against one process, every iteration" in printed and "NOT" not in printed


def pretrain_on_spies(group, options):
    with mock.patch.object(program, "device_of", on_spies), fake_cuda(gpus=group.size) as cupy, \
            mock.patch("shardlab.report.forecast.DEVICE_SIZE", 100), mock.patch.object(pinned, "PIECE", 1000):
        cupy.used = group.rank
        pretrain(group, options)
        assert (cupy.cuda.nccl.begun > 0) == ("nccl" in options)


def on_spies(name, ranks, backend):
    assert name == "cuda"
    taken = devices(*map(str, range(ranks.size)), nccl=backend == "nccl", mpi=backend == "mpi")
    return Device(SpyArray(np.empty(0)), "computing on spies", path_of(taken, backend_of(taken, backend)),
                  Memory(str(ranks.rank), 10**9))
