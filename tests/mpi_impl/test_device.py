"""Where ranks compute: which GPU is whose, what is said where there is none, and a whole run on a device."""
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from mpi_impl import pretrain_gpt
from mpi_impl.device import Device, device_of, names_of_gpus, told
from mpi_impl.pool import RankFailure
from reference.errors import UserError
from reference.params import HOST
from tests.program import pretrain
from tests.spy import SpyArray

SMALL = """--num-layers 3 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --micro-batch-size 2
    --global-batch-size 8 --train-iters 4 --lr 0.01 --vocab-size 300 --log-interval 1 --eval-interval 2 --eval-iters 1
    --split 8,2 --dtype float64 --verify --sample-tokens 3""".split()


class FakeCuda:
    """CuPy as a machine with some GPUs has it, as far as choosing one goes."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, count):
        self.count, self.used = count, None
        self.cuda = SimpleNamespace(runtime=self, Device=self.device)

    def device(self, i):
        return SimpleNamespace(use=lambda: setattr(self, "used", i))

    def getDeviceCount(self):
        if self.count == 0:
            raise self.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return self.count

    def getDeviceProperties(self, i):
        return {"name": b"A GPU"}

    def empty(self, shape):
        return SpyArray(np.empty(shape))


@pytest.mark.parametrize("n, count, sentence", [
    (3, 2, "computing on 2 GPUs (A GPU), which 3 ranks share; messages go through host memory"),
    (2, 4, "computing on 2 GPUs (A GPU); messages go through host memory"),
    (4, 1, "computing on 1 GPU (A GPU), which 4 ranks share; messages go through host memory")])
def test_a_rank_takes_the_gpu_of_its_number(ranks, n, count, sentence):
    assert ranks.run(n, gpu_of, count) == [(rank % count, sentence) for rank in range(n)]


def gpu_of(group, count):
    fake = FakeCuda(count)
    with mock.patch.dict(sys.modules, cupy=fake):
        device = device_of("cuda", group)
    assert isinstance(device.like, SpyArray)
    return fake.used, device.told


def test_gpus_of_several_machines():
    used = [("one", 0, "H100"), ("one", 1, "H100"), ("two", 0, "A100"), ("two", 0, "A100")]
    assert told(used) == "computing on 3 GPUs (A100, H100), which 4 ranks share; messages go through host memory"


def test_cores_need_no_cupy(ranks):
    ranks.run(2, on_cores)


def on_cores(group):
    with mock.patch.dict(sys.modules, cupy=None):
        assert device_of("cpu", group) == Device(HOST, "")


@pytest.mark.parametrize("cupy, sentence", [
    (None, "--device is cuda, which needs CuPy, and that is not installed"),
    (FakeCuda(0), "--device is cuda, but CUDA finds no GPU on this machine (cudaErrorNoDevice")])
def test_without_a_gpu_all_ranks_say_so(ranks, cupy, sentence):
    for said in ranks.run(3, sentence_of, cupy and 0):
        assert said.startswith(sentence) and said.endswith("or leave --device out, to compute on CPU cores.")


def sentence_of(group, count):
    """On one rank there is none; all hear of it."""
    cupy = FakeCuda(1) if group.rank == 0 else None if count is None else FakeCuda(count)
    with mock.patch.dict(sys.modules, cupy=cupy), pytest.raises(UserError) as error:
        device_of("cuda", group)
    return str(error.value)


def test_a_cupy_that_cannot_be_loaded_says_why(monkeypatch):
    broken = ImportError("libnvrtc.so.12: cannot open shared object file")
    monkeypatch.setattr("builtins.__import__", mock.Mock(side_effect=broken))
    with pytest.raises(UserError, match="cannot be loaded .libnvrtc.so.12: cannot open"):
        names_of_gpus()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(" ".join(f"{i} times {i % 7} is {i * (i % 7)}." for i in range(400)))
    return ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]


@pytest.mark.parametrize("n, more", [
    (8, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    (2, "--zero-stage 3 --cpu-offload"),
    (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --position-embedding-type rope --zero-stage 1 "
        "--recompute-granularity full")])
def test_a_whole_run_on_a_device(ranks, corpus, tmp_path, capfd, n, more):
    """Trained, verified against one process, evaluated, sampled, recorded, traced, saved, and gone on with: nothing
    takes an array on a device for one on the host.
    """
    folder = str(tmp_path / "saved")
    options = [*SMALL, *corpus, *more.split(), "--device", "cuda"]
    ranks.run(n, pretrain_on_spies, [*options, "--save", folder, "--exit-interval", "2", "--record",
                                     str(tmp_path / "record"), "--trace", str(tmp_path / "trace")], timeout=120)
    assert "computing on spies" in capfd.readouterr().out
    ranks.run(n, pretrain_on_spies, [*options, "--load", folder, "--plot", str(tmp_path / "loss.png")], timeout=120)
    printed = capfd.readouterr().out
    assert "verified against one process, every iteration" in printed and "NOT" not in printed


def pretrain_on_spies(group, options):
    with mock.patch.object(pretrain_gpt, "device_of", on_spies):
        pretrain(group, options)


def on_spies(name, ranks):
    assert name == "cuda"
    return Device(SpyArray(np.empty(0)), "computing on spies")


def test_a_run_on_a_device_that_diverges_says_where(ranks, corpus):
    with pytest.raises(RankFailure, match="the run has diverged"):
        ranks.run(2, pretrain_on_spies, [*(word for word in SMALL if word != "--verify"), *corpus, "--device", "cuda",
                                         "--lr", "1e200", "--tensor-model-parallel-size", "2"], timeout=60)
