"""Collectives by NCCL between ranks that share one GPU: calls, layers, training and CUDA graphs.

On a GPU (`./run.sh test-cuda`, tests/gpu/one_gpu.sh) with NCCL 2.30 or newer; else in the emulation, which checks
addresses, codes and streams.
"""
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.device import device_of
from mpi_impl.comm.transports.staging import DevicePath
from reference.config import ModelConfig
from tests import collective_theorems, rank_theorems as theorems, training_theorems
from tests.collective_theorems import HALVES, WIDE, Way, collectives_are_the_textbooks, posted_are_the_textbooks
from tests.fake_cuda import on_gpus
from tests.gpu import device
from tests.spy import SpyArray
from tests.strategies import Case, cases
from tests.test_spy_layers import SMALL

RANKS, LIMIT = [2, 4, 8], min(40.0, device.LIMIT)
SIZES = [(1, 1, 1), (3, 2, 0), (0, 2, 1)] + [(70, 50, 0)] * device.REAL      # rows, columns, and the axis of a gather
POSTS = [("all_reduce", False), ("all_gather", True), ("reduce_scatter", True), ("all_gather", False),
         ("reduce_scatter", False), ("all_reduce", False)]


@contextmanager
def by_nccl(group):
    """Yield the function that puts an array where the group's collectives go by NCCL."""
    if not device.REAL:
        with on_gpus(group, "nccl"):
            yield SpyArray
        return
    group.instruments.device_path = device_of("cuda", group, "nccl").path
    vars(group.transports).pop("on_device", None)
    try:
        yield device.put
    finally:
        for transport in vars(group.transports).pop("on_device", []):
            transport.free()
        group.instruments.device_path = DevicePath()


def check(group, theorem, calls) -> None:
    """Check a theorem about collectives for each of these arguments."""
    with by_nccl(group) as wrap, mock.patch.dict(collective_theorems.WAYS, nccl=Way("nccl", (*WIDE, *HALVES), wrap)):
        for arguments in calls:
            group.ledger.totals.clear()
            theorem(group, "nccl", *arguments)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("form", [*WIDE, *HALVES])
def test_collectives(ranks, n, form):
    """Every call of NCCL, of whole arrays, columns and transposed ones, empty ones included."""
    calls = [(form, sizes, layout, 1, seed) for seed, sizes in enumerate(SIZES)
             for layout in ("whole", "columns", "transposed")]
    ranks.run(n, check, collectives_are_the_textbooks, calls, timeout=LIMIT)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("form", [*WIDE, *HALVES])
def test_posted_collectives(ranks, n, form):
    """On the second stream, several at the same time, beside a blocking one; of parts of several sizes, too."""
    posts = [post for post in POSTS if form in WIDE or post[0] == "all_gather"]
    calls = [(posts, length, form, seed, uneven) for seed, length in enumerate((1, 7, 5000))
             for uneven in (False, True)]
    ranks.run(n, check, posted_are_the_textbooks, calls, timeout=LIMIT)


def in_a_layer(group, theorem, *arguments) -> None:
    with by_nccl(group) as wrap:
        theorem(group, *arguments, wrap=wrap)


@settings(max_examples=4)
@given(cases(sizes=st.integers(2, 4)), st.booleans())
def test_column_parallel(ranks, case, gather_output):
    ranks.run(case.t, in_a_layer, theorems.column_parallel_equals_whole, case, gather_output, timeout=LIMIT)


@pytest.mark.parametrize("theorem", [theorems.row_parallel_equals_whole, theorems.block_equals_whole,
                                     theorems.embedding_equals_whole, theorems.loss_equals_whole],
                         ids=lambda theorem: theorem.__name__)
@settings(max_examples=4)
@given(case=st.one_of(SMALL))
def test_layers(ranks, theorem, case):
    """f and g forward and backward, with sequence parallelism or without."""
    ranks.run(case.t, in_a_layer, theorem, case, timeout=LIMIT)


@pytest.mark.parametrize("t, p, d, stage", [(2, 1, 2, 0), (2, 1, 2, 1), (1, 1, 4, 2), (2, 1, 2, 3), (2, 2, 2, 1)])
def test_training(ranks, t, p, d, stage):
    """Losses, gradients and weights are one process's; sums of gradients are posted while the backward computes."""
    case = Case(t, ModelConfig(4, 8, 2, 11, 6, make_vocab_size_divisible_by=4), 2, 6, seed=3,
                sequence_parallel=t > 1)
    plan = training_theorems.Plan(p, bucket_size=200, zero_stage=stage)
    ranks.run(t * p * d, in_a_layer, training_theorems.training_equals_one_process, case, 2, 2, 0.05, plan,
              timeout=LIMIT)


# ---- on a GPU alone -------------------------------------------------------------------------------------------------


@device.needs_a_gpu
def test_a_posted_sum_runs_beside_a_kernel(ranks):
    """The sum ends before products that were launched after it was posted, and began before they ended."""
    answers = ranks.run(2, sum_beside_products, timeout=LIMIT)
    print(answers)
    for before_products_end, products in answers:
        assert 0 < before_products_end < products, "the sum waited for the products"


def sum_beside_products(group):
    """Return the milliseconds from the end of the sum until the end of the products, and those of the products."""
    import cupy
    with by_nccl(group) as wrap:
        x, a = wrap(np.ones(1 << 20, np.float32)), cupy.ones((4096, 4096), np.float32)
        for _ in range(2):                          # the first time compiles
            group.post_all_reduce(x, "test").wait()
            a = a @ a / 4096
            stream, side = cupy.cuda.get_current_stream(), group.instruments.device_path.nccl.side
            stream.synchronize()
            group.comm.barrier()
            begin, end, summed = (cupy.cuda.Event() for _ in range(3))
            pending = group.post_all_reduce(x, "test")
            summed.record(side)
            begin.record(stream)
            for _ in range(40):
                a = a @ a / 4096
            end.record(stream)
            pending.wait()
            stream.synchronize()
        return cupy.cuda.get_elapsed_time(summed, end), cupy.cuda.get_elapsed_time(begin, end)


@device.needs_a_gpu
@pytest.mark.parametrize("n", [2, 4])
def test_collectives_are_recorded(ranks, n):
    """Blocking and posted ones are part of a CUDA graph, and sum what is there when it is replayed."""
    ranks.run(n, record_sums, timeout=LIMIT)


def record_sums(group):
    from mpi_impl.kernels.cuda.recording import Recording
    with by_nccl(group) as wrap:
        x, y = wrap(np.zeros(1000)), wrap(np.zeros(1000))
        group.warm_up(x)
        recording = Recording(partial(sums, group, x, y))
        for step in range(3):
            x[...] = group.rank + step
            y[...] = 10.0 * group.rank
            total, posted = recording.replay()
            whole = sum(range(group.size)) + group.size * step
            assert (total.get() == whole).all() and (posted.get() == 10 * sum(range(group.size))).all()


def sums(group, x, y):
    """Return twice the ranks' sum of x, halved, and the sum of y, which is posted meanwhile."""
    posted = y.copy()
    pending = group.post_all_reduce(posted, "test")
    total = x * 2
    group.all_reduce(total, "test")
    pending.poll()
    return total / 2, pending.wait()


@device.needs_a_gpu
@pytest.mark.parametrize("t, d, form", [(2, 1, "float32"), (1, 2, "float32"), (2, 2, "float32"), (2, 2, "bfloat16")])
def test_steps_with_messages_are_replayed(ranks, t, d, form):
    """Losses, norms and weights are those of steps without recordings, within what the order of sums changes."""
    plain, replayed = (ranks.run(t * d, steps, t, form, again, timeout=LIMIT)[0] for again in (False, True))
    bound = 0.02 if form == "bfloat16" else 1e-3
    for mine, theirs in zip(replayed, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, bound, bound)


def steps(group, t, form, replayed):
    """Return the losses and the norms of six steps."""
    from mpi_impl.comm.topology import connect, disconnect
    from mpi_impl.parallel.model_state import ModelState
    from mpi_impl.training.trainer import Trainer
    from reference.batches import GPTBatch
    from reference.config import ParallelConfig
    from reference.optimizers.adam import OptimizerConfig
    from reference.precision import Precision
    model = ModelConfig(2, 64, 4, 50, 128, make_vocab_size_divisible_by=4, hidden_dropout=0.0, attention_dropout=0.0)
    with by_nccl(group) as put:
        topology = connect(group, ParallelConfig(data_parallel_size=group.size // t,
                                                 tensor_model_parallel_size=t))
        state = ModelState(model, topology, 1, Precision(form), put(np.empty(0)))
        trainer = Trainer(state, OptimizerConfig(1e-3, 6), replayed)
        found = []
        for step in range(6):
            tokens = np.random.default_rng([step, topology.place.data]).integers(50, size=(2, 2, 128))
            result = trainer.step([GPTBatch(*map(put, tokens))], 2 * topology.data.size)
            found.append((result.losses[0], result.grad_norm))
        assert not replayed or trainer.replays.recording is not None
        disconnect(topology)
        return found
