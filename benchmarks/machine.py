"""What ranks measure of a machine, all at the same time, as they share its memory and its caches when they train.

Times are a rank's own CPU time, so that what else the machine does counts little; of messages the wall's.
"""
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from math import log2
from statistics import median
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.comm.topology import connect
from mpi_impl.kernels import accumulate, attention_core, attention_core_backward, linear
from mpi_impl.models.gpt import gpt_backward, gpt_forward
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.parallel.units import Unit
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.hardware import size_of_product
from reference.models.gpt import GPT, gpt_tensors
from reference.optimizer import OptimizerConfig
from reference.params import tree_map
from reference.precision import Precision

ENOUGH = 0.03       # seconds for which one thing is repeated, at least
TURNS = 5           # of all things that are compared, one after another and around again
LARGEST = 1024      # the square product whose rate is taken for the peak


class Shard(NamedTuple):
    """What one of t ranks computes: of a GPT of L layers on b samples."""

    b: int
    s: int
    h: int
    a: int
    t: int
    L: int
    V: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.L, self.h, self.a, self.V, self.s, hidden_dropout=0.0, attention_dropout=0.0)


# Sizes that differ in all that a time may depend on.
SHARDS = [Shard(*sizes) for sizes in (
    (1, 128, 128, 8, 1, 1, 512), (4, 128, 128, 8, 1, 2, 512), (4, 128, 128, 8, 4, 2, 512),
    (4, 128, 256, 8, 1, 1, 2048), (4, 128, 256, 8, 2, 2, 1024), (4, 128, 256, 8, 8, 3, 1024),
    (2, 128, 256, 8, 4, 1, 4096), (1, 128, 256, 8, 1, 2, 512), (8, 128, 256, 8, 8, 1, 2048),
    (2, 128, 512, 8, 1, 1, 1024), (2, 128, 512, 8, 4, 2, 1024), (4, 32, 64, 4, 1, 3, 256))]
TOKENS, WIDTHS = (128, 512, 1024), (32, 64, 128, 256, 512, 1024)


def seconds_of(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    count, began, deadline = 0, time.thread_time(), time.perf_counter() + ENOUGH
    while True:
        work()
        count += 1
        if time.perf_counter() > deadline:
            return (time.thread_time() - began) / count


def in_turn(works: dict, group: Group) -> dict:
    """Seconds of a call of each: the median over turns and ranks."""
    for work in works.values():
        work()
    found: dict = {key: [] for key in works}
    for _ in range(TURNS):
        for key, work in works.items():
            found[key].append(seconds_of(work))
    together = group.from_all(found)
    return {key: median(seconds for one in together for seconds in one[key]) for key in works}


# ---- matrix products ------------------------------------------------------------------------------------------------


class Products(NamedTuple):
    """FLOP/s of one rank, while all of them multiply."""

    peak: float
    efficiency: tuple[tuple[float, float], ...]     # size, share of the peak


def products(group: Group) -> Products:
    """As a step needs them: x w, dy w^T, and x^T dy added to a gradient. Sizes within a factor of 1.4 are one."""
    shapes = [(n, k, m) for n in TOKENS for k in WIDTHS for m in WIDTHS if k * m <= 256 * 1024]
    rates = {shape: 2 * np.prod(shape, dtype=float) / seconds
             for shape, seconds in in_turn({shape: product(*shape) for shape in shapes}, group).items()}
    square = in_turn({"": product(LARGEST, LARGEST, LARGEST)}, group)[""]
    peak, by_size = 2 * LARGEST**3 / square, {}
    for shape, rate in rates.items():
        size = size_of_product(*shape)
        by_size.setdefault(round(2 * log2(size)), []).append((size, rate / peak))
    middle = [tuple(map(median, zip(*found))) for _, found in sorted(by_size.items())]
    return Products(peak, (*middle, (float(LARGEST), 1.0)))


def product(n: int, k: int, m: int) -> Callable[[], object]:
    """The three products of a matrix [k, m], in turn: one a call."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((n, k), (k, m), (n, m)))
    grad = np.zeros_like(w)
    kinds = cycle((lambda: linear(x, w), lambda: linear(dy, w.T), lambda: accumulate(grad, x, dy)))
    return lambda: next(kinds)()


# ---- attention's core -----------------------------------------------------------------------------------------------


def attention(group: Group, peak: float) -> tuple[float, float]:
    """The share of the peak that the core's FLOPs reach, forward and backward, softmax included: the median of a few
    sizes. All s^2 scores count, as in the papers, although the mask leaves half of them.
    """
    sizes = [(4, 128, 4, 16), (4, 128, 4, 32), (2, 128, 8, 64), (4, 128, 1, 32)]
    works, flops = {}, {}
    for b, s, a, d in sizes:
        q, k, v, dy = np.random.default_rng(0).normal(size=(4, b, s, a, d)).astype(np.float32)
        cache = attention_core(q, k, v, True)[1]
        works[b, s, a, d, 0] = lambda q=q, k=k, v=v: attention_core(q, k, v, True)
        works[b, s, a, d, 1] = lambda dy=dy, cache=cache: attention_core_backward(dy, cache)
        flops[b, s, a, d, 0], flops[b, s, a, d, 1] = 4 * b * s**2 * a * d, 8 * b * s**2 * a * d
    found = in_turn(works, group)
    shares = [[flops[key] / found[key] / peak for key in works if key[-1] == way] for way in (0, 1)]
    return median(shares[0]), median(shares[1])


# ---- whole shards ---------------------------------------------------------------------------------------------------


def shards(group: Group) -> dict[Shard, tuple[float, float]]:
    """Seconds of forward and backward of each, without messages: a rank works on its shard, alone."""
    alone = group.part(group.rank, "one rank")
    works = {}
    for shard in SHARDS:
        forward, both = passes(shard, TensorParallelRegion(alone))
        works |= {(shard, "forward"): forward, (shard, "both"): both}
    found = in_turn(works, group)
    alone.free()
    return {shard: (found[shard, "forward"], found[shard, "both"] - found[shard, "forward"]) for shard in SHARDS}


def passes(shard: Shard, region: TensorParallelRegion) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward; and a forward with its backward."""
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
    """As a stage's loop asks for them."""
    return replace(tree, embedding=tree_map(lambda table: Unit("table", table), tree.embedding),
                   blocks={layer: Unit("block", block) for layer, block in tree.blocks.items()},
                   final_layernorm=Unit("norm", tree.final_layernorm))


# ---- the optimizer, and memory --------------------------------------------------------------------------------------


def optimizer(group: Group) -> float:
    """Seconds of a parameter's update by Adam, with the norm before."""
    alone = group.part(group.rank, "one rank")
    trainer = Trainer(ModelConfig(4, 256, 8, 1024, 128), OptimizerConfig(1e-4, 1), connect(alone, ParallelConfig()), 1,
                      Precision("float32"))
    found = in_turn({"": lambda: trainer.optimizer.step(trainer.gradients.own, alone)}, group)[""]
    return found / trainer.layout.size


def bandwidth(group: Group) -> float:
    """Bytes a second that are read and written, of arrays as large as a layer's activations."""
    x = np.ones(1 << 18, np.float32)
    y = np.empty_like(x)
    return 2 * x.nbytes / in_turn({"": lambda: np.copyto(y, x)}, group)[""]


# ---- messages -------------------------------------------------------------------------------------------------------

SIZES = [1 << i for i in range(8, 22, 2)]      # bytes


def messages(group: Group) -> dict[int, float]:
    """Seconds of an all-reduce of so many bytes over all ranks."""
    found = {}
    for size in SIZES:
        x, times = np.zeros(size // 4, np.float32), []
        for _ in range(200 if size < 1 << 16 else 40):
            group.from_all(None)
            began = time.perf_counter()
            group.all_reduce(x, "calibration")
            times.append(time.perf_counter() - began)
        found[size] = max(group.from_all(median(times)))
    return found
