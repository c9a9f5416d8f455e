"""Measurements of a machine by all ranks at the same time, which share its memory and its caches as in training.

Times are a rank's own CPU time, on which other load of the machine has little influence; for messages the wall clock's.
"""
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import NamedTuple

import numpy as np
from models import gpt, trainer_of

from mpi_impl.comm.group import Group
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.comm.topology import connect
from mpi_impl.kernels import accumulate, attention_core, attention_core_backward, linear
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from mpi_impl.models.units import Unit
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig, ParallelConfig
from reference.models.gpt import GPT, gpt_tensors
from reference.params import tree_map

ENOUGH = 0.02       # seconds for which a work is repeated, at least
TURNS = 3           # of all works
PROBE = 7           # the index of one of the shards below
LARGEST = 1024      # the square product whose rate is taken for the peak


class ShardSizes(NamedTuple):
    """The computation of one of t ranks: of a GPT of L layers on b samples."""

    b: int
    s: int
    h: int
    a: int
    t: int
    L: int
    V: int

    @property
    def model(self) -> ModelConfig:
        return gpt(self.L, self.h, self.a, self.V, self.s)


# Sizes that differ in all that a time may depend on.
SHARDS = [ShardSizes(*sizes) for sizes in (
    (1, 128, 128, 8, 1, 1, 512), (4, 128, 128, 8, 1, 2, 512), (4, 128, 128, 8, 4, 2, 512),
    (4, 128, 256, 8, 1, 1, 2048), (4, 128, 256, 8, 2, 2, 1024), (4, 128, 256, 8, 8, 3, 1024),
    (2, 128, 256, 8, 4, 1, 4096), (1, 128, 256, 8, 1, 2, 512), (8, 128, 256, 8, 8, 1, 2048),
    (2, 128, 512, 8, 1, 1, 1024), (2, 128, 512, 8, 4, 2, 1024), (4, 32, 64, 4, 1, 3, 256))]
WIDTHS = (32, 64, 128, 256, 512, 1024)
PRODUCTS = [*((n, k, m) for n in (128, 512, 1024) for k in WIDTHS for m in WIDTHS if k * m <= 256 * 1024),
            (LARGEST, LARGEST, LARGEST)]
CORES = [(4, 128, 4, 16), (4, 128, 4, 32), (2, 128, 8, 64), (4, 128, 1, 32)]      # b, s, a, d
UPDATED, COPIED = ModelConfig(4, 256, 8, 1024, 128), 1 << 20


def seconds_of(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    count, began = 0, time.thread_time()
    while (took := time.thread_time() - began) < ENOUGH:
        work()
        count += 1
    return took / count


# ---- the works, by key ----------------------------------------------------------------------------------------------


def measure(group: Group) -> dict[tuple, float]:
    """Measure the seconds of a call of each work, the median over turns and ranks, and of messages.

    A machine that others use, too, is now faster and now slower. So before each work there is a probe, always the same,
    and the work's time is measured relative to the probe's.
    """
    alone = group.split(group.rank, "one rank")
    works, standard = dict(works_of(alone)), probe(alone)
    ratios: dict[tuple, list[float]] = {key: [] for key in works}
    probes = []
    for work in works.values():
        work()
    for _ in range(TURNS):
        for key, work in works.items():
            probes.append(time_probe(group, standard))
            ratios[key].append(seconds_of(work) / probes[-1])
    together = group.allgather_objects((ratios, median(probes)))
    alone.free()
    usual = median(found for _, found in together)
    return {key: usual * median(ratio for found, _ in together for ratio in found[key])
            for key in works} | messages(group)


def time_probe(group: Group, standard: Callable[[], object]) -> float:
    """Return the CPU time of the probe after all ranks have met: ranks that share a core then take turns, as in a step,
    and each finds the caches as another one has left them.
    """
    times = []
    for _ in range(3):
        group.allgather_objects(None)
        began = time.thread_time()
        standard()
        times.append(time.thread_time() - began)
    return median(times)


def probe(alone: Group) -> Callable[[], object]:
    """Return a function that does a little of everything that a step does, for some milliseconds."""
    return passes(SHARDS[PROBE], TensorParallelRegion(alone))[1]


def works_of(alone: Group) -> Iterator[tuple[tuple, Callable[[], object]]]:
    """Yield the works, each with its key: kind and sizes."""
    yield from ((("product", *shape), product(*shape)) for shape in PRODUCTS)
    for sizes in CORES:
        forward, backward = core(*sizes)
        yield from ((("core forward", *sizes), forward), (("core backward", *sizes), backward))
    for shard in SHARDS:
        forward, both = passes(shard, TensorParallelRegion(alone))
        yield from ((("forward", shard), forward), (("forward and backward", shard), both))
    yield ("copy",), copy()
    yield ("update",), update(alone)


def product(n: int, k: int, m: int) -> Callable[[], object]:
    """Return a function that computes one of the three products of a matrix [k, m] that a step needs, in turn: x w,
    dy w^T, and x^T dy added to a gradient.
    """
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((n, k), (k, m), (n, m)))
    grad = np.zeros_like(w)
    kinds = cycle((lambda: linear(x, w), lambda: linear(dy, w.T), lambda: accumulate(grad, x, dy)))
    return lambda: next(kinds)()


def core(b: int, s: int, a: int, d: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: the forward of attention's core, softmax included, and its backward."""
    q, k, v, dy = np.random.default_rng(0).normal(size=(4, b, s, a, d)).astype(np.float32)
    cache = attention_core(q, k, v, True)[1]
    return lambda: attention_core(q, k, v, True), lambda: attention_core_backward(dy, cache)


def passes(shard: ShardSizes, region: TensorParallelRegion) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: a forward; and a forward with its backward."""
    c, rng = shard.model, np.random.default_rng(0)
    tensors = gpt_tensors(c, range(c.num_layers))
    params = tree_map(lambda tensor: 0.02 * rng.normal(size=tensor.local_shape(shard.t)).astype(np.float32), tensors)
    grads = tree_map(np.zeros_like, params)
    tokens = rng.integers(len(params.embedding.word), size=(shard.b, shard.s))
    units, into, sink = units_of(params), units_of(grads), ImmediateSink()

    def forward():
        return gpt_forward(tokens, units, c, tokens, region)

    def both():
        loss, cache = forward()
        gpt_backward(np.full_like(loss, 1 / loss.size), units, cache, c, into, sink, region)

    return forward, both


def units_of(tree: GPT) -> GPT:
    """Return a tree's units, as a stage's loop materializes them."""
    return replace(tree, embedding=tree_map(lambda table: Unit("table", table), tree.embedding),
                   blocks={layer: Unit("block", block) for layer, block in tree.blocks.items()},
                   final_layernorm=Unit("norm", tree.final_layernorm))


def update(alone: Group) -> Callable[[], object]:
    """Return a function that runs Adam on the model UPDATED, after computing the norm of its gradients."""
    trainer = trainer_of(UPDATED, connect(alone, ParallelConfig()))
    return lambda: trainer.optimizer.step(trainer.state.gradients.own, alone)


def copy() -> Callable[[], object]:
    """Return a function that copies COPIED bytes, the size of a layer's activations: it reads and writes them."""
    x = np.ones(COPIED // 4, np.float32)
    y = np.empty_like(x)
    return lambda: np.copyto(y, x)


# ---- messages -------------------------------------------------------------------------------------------------------

SIZES = [1 << i for i in range(8, 22, 2)]      # bytes


def messages(group: Group) -> dict[tuple, float]:
    """Return the seconds of an all-reduce of this many bytes over all ranks."""
    found = {}
    for size in SIZES:
        x, times = np.zeros(size // 4, np.float32), []
        for _ in range(200 if size < 1 << 16 else 40):
            group.allgather_objects(None)
            began = time.perf_counter()
            group.all_reduce(x, "calibration")
            times.append(time.perf_counter() - began)
        found["all-reduce", size] = max(group.allgather_objects(median(times)))
    return found
