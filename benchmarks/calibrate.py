"""A measurement of this machine for the planner: of its matrix products, its other kernels, and its messages.

    .venv/bin/python benchmarks/calibrate.py --output machine.toml
    .venv/bin/python -m shardlab.plan --num-gpus 8 --num-layers 8 --hidden-size 256 ... --hardware machine.toml

A rank on each core measures at the same time as the others (machine.py). Products are timed one by one. The time of
other kernels comes from whole forwards and backwards of a GPT in a dozen sizes: without the products and attention's
core, their times are a sum of passes over the activations outside and inside the tensor-parallel regions, over the
logits and the embedding, and of an overhead for each layer; least squares give the five factors. The times of messages
are those of all-reduces of many sizes, and a line through them. All this takes half a minute.
"""
import os
from collections.abc import Sequence
from dataclasses import replace
from math import log2, prod
from pathlib import Path
from statistics import median

import machine
import numpy as np
from machine import ShardSizes
from programs import parse, parser_of

from mpi_impl.launch.entry import run_alone
from mpi_impl.launch.pool import Pool
from mpi_impl.runtime.files import check_writable
from mpi_impl.runtime.rank_environment import cores
from reference.config import ParallelConfig
from reference.costs.hardware import Hardware, Link, Passes, size_of_product
from reference.costs.parameters import parameters
from reference.costs.plans import LayerCounts, Plan
from reference.costs.step_time import work_of
from shardlab.plan.profiles import save

BYTES = 4           # of float32
LIMIT = 600.0       # seconds that a measurement may take


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("calibrate", __doc__)
    parser.add_argument("--output", default="machine.toml", metavar="FILE", help="(default: machine.toml)")
    args = parse(parser, argv, ranks=(max(2, cores()), "that measure at the same time, at least 2"))
    check_writable(args.output)
    print(f"{args.ranks} ranks measure, at the same time ...", flush=True)
    save(calibrate(args.ranks), args.output)
    print(f"{Path(args.output).read_text()}\nwritten to {args.output}: shardlab.plan takes it as --hardware")


def calibrate(ranks: int) -> Hardware:
    """Return the profile of one core, while `ranks` are working."""
    with Pool(ranks) as pool:
        return profile(pool.run(ranks, machine.measure, timeout=LIMIT)[0], ranks)


def profile(seconds: dict[tuple, float], ranks: int) -> Hardware:
    """Return the profile from a measurement."""
    largest = machine.LARGEST
    peak = 2 * largest**3 / seconds["product", largest, largest, largest]
    bandwidth = 2 * machine.COPIED / seconds["copy",]
    times = {size: found for (what, *sizes), found in seconds.items() if what == "all-reduce" for size in sizes}
    bare = Hardware(
        name="this machine", about=f"measured by benchmarks/calibrate.py: a core of {cores()}, {ranks} at work",
        peak=peak, memory=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks), reserved=0.0,
        bandwidth=bandwidth, element_bytes=BYTES, efficiency=efficiency(seconds, peak),
        attention=cores_of(seconds, peak), passes=Passes(*[(0.0, 0.0)] * 5),
        optimizer=seconds["update",] / parameters(machine.UPDATED) * bandwidth, overhead=(0.0, 0.0), server=1 << 20,
        inside=link(times, ranks), between=link(times, ranks))
    forward = {shard: seconds["forward", shard] for shard in machine.SHARDS}
    return with_kernels(bare, {shard: (time, seconds["forward and backward", shard] - time)
                               for shard, time in forward.items()})


def efficiency(seconds: dict[tuple, float], peak: float) -> tuple[tuple[float, float], ...]:
    """Return the fraction of the peak by size: sizes within a factor of 1.4 are merged, with the median of both."""
    found: dict[int, list[tuple[float, float]]] = {}
    for shape in machine.PRODUCTS:
        size = size_of_product(*shape)
        share = 2 * prod(shape) / seconds["product", *shape] / peak
        found.setdefault(round(2 * log2(size)), []).append((size, share))
    return tuple(tuple(map(median, zip(*pairs))) for _, pairs in sorted(found.items()))


def cores_of(seconds: dict[tuple, float], peak: float) -> tuple[float, float]:
    """Return the share of the peak that the FLOPs of attention's core reach, forward and backward: the median of a few
    sizes. All s^2 scores count, as in the papers, although the mask leaves half of them.
    """
    flops = {(b, s, a, d): 4 * b * s**2 * a * d for b, s, a, d in machine.CORES}
    return (median(flops[sizes] / seconds["core forward", *sizes] / peak for sizes in flops),
            median(2 * flops[sizes] / seconds["core backward", *sizes] / peak for sizes in flops))


# ---- other kernels --------------------------------------------------------------------------------------------------


def with_kernels(bare: Hardware, times: dict[ShardSizes, tuple[float, float]]) -> Hardware:
    """Return the passes and overheads that explain the time of shards beyond their products, forward and backward."""
    passes = [least_squares([counts(shard) for shard in times],
                            [took[backward] - products(bare, shard, backward) for shard, took in times.items()],
                            [took[backward] for took in times.values()]) for backward in (False, True)]
    outside, inside, overhead, embedding, logits = zip(*passes)
    pass_of_element = BYTES / bare.bandwidth
    scaled = [tuple(seconds / pass_of_element for seconds in pair) for pair in (outside, inside, embedding, logits)]
    return replace(bare, overhead=overhead, passes=Passes(scaled[0], scaled[1], (0.0, 0.0), scaled[2], scaled[3]))


def counts(shard: ShardSizes) -> list[float]:
    """Return the terms of the time: elements outside and inside, layers, elements of the embedding, and logits."""
    x = shard.b * shard.s * shard.h
    logits = shard.b * shard.s * shard.model.padded_vocab_size(shard.t) // shard.t
    return [shard.L * x, shard.L * x / shard.t, shard.L, x, logits]


def products(hardware: Hardware, shard: ShardSizes, backward: bool) -> float:
    """Return the seconds of a shard's matrix products and attention's cores: forward, or backward."""
    plan = Plan(shard.model, ParallelConfig(shard.t), m=1, b=shard.b)
    forward, input_gradient, weight_gradient = work_of(plan, hardware, LayerCounts(shard.L, 0, True, True))
    return input_gradient.products + weight_gradient.products if backward else forward.products


def least_squares(rows: list[list[float]], values: list[float], scales: list[float]) -> list[float]:
    """Return factors, none below 0, whose sums over a row are near its value; a miss counts relative to the row's
    scale.
    """
    a, y = np.array(rows) / np.array(scales)[:, None], np.array(values) / np.array(scales)
    used = list(range(a.shape[1]))
    while True:
        found = np.linalg.lstsq(a[:, used], y, rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            factors = np.zeros(a.shape[1])
            factors[used] = np.maximum(found, 0)
            return factors.tolist()
        used.pop(int(found.argmin()))


# ---- messages -------------------------------------------------------------------------------------------------------


def link(messages: dict[int, float], ranks: int) -> Link:
    """Return the latency and the bandwidth with which a ring would take the same time."""
    sizes = np.array(list(messages))
    turns, sent = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * sizes
    times = list(messages.values())
    latency, each = least_squares([[turns, one] for one in sent], times, times)
    return Link(latency, 1 / max(each, 1e-15))


if __name__ == "__main__":
    run_alone(main)
