"""A measurement of what fused kernels and the layout of arrays win on this machine: `python -m benchmarks.fusion`.

A fused kernel reads each array once, and writes its result once; without it, NumPy writes an array of full size for
every operation. Megatron's arrays are [s, b, h], ours [b, s, h]: the same numbers, whose positions are farther apart or
nearer. All variants take turns, and a median is printed for each.
"""
import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from mpi_impl import kernels
from reference import ops

B, S, A, D, T = 4, 256, 8, 64, 4       # samples, positions, heads, columns of a head; ranks whose shards are gathered
H = A * D
TURNS = 15

Variants = Mapping[str, Callable[[], object]]


def milliseconds(variants: Variants) -> dict[str, float]:
    """Return the median time of each variant. They take turns, after one turn that does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(TURNS + 1):
        for name, function in variants.items():
            began = time.perf_counter()
            function()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - began))
    return {name: median(found) for name, found in times.items()}


def fused_variants() -> dict[str, Variants]:
    """Return by operation: one array for every step of the formula, as in the textbook; tiles; one compiled pass."""
    rng = np.random.default_rng(0)
    x, wide = (rng.normal(size=(B, S, n)).astype(np.float32) for n in (H, 4 * H))
    weight, offset = np.ones(H, np.float32), np.zeros(H, np.float32)
    heads = [rng.normal(size=(B, S, A, D)).astype(np.float32) for _ in range(3)]
    calls = {"GeLU": (kernels.gelu, lambda: (wide.copy(),)),
             "layer norm": (kernels.layer_norm, lambda: (x, weight, offset, 1e-5)),
             "attention core": (kernels.attention_core, lambda: (*heads, True))}
    return {name: {column: call(getattr(kernel, column), make) for column in ("textbook", "numpy", "compiled")}
            for name, (kernel, make) in calls.items()}


def call(function: Callable, make: Callable[[], tuple]) -> Callable[[], object]:
    """Return a call of a kernel, which may overwrite its arguments, without its cache."""
    return lambda: function(*make())[0]


def layout_variants() -> dict[str, Variants]:
    """Return by operation: the same numbers as [b, s, ...] and as [s, b, ...]."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, S, A, D)).astype(np.float32) for _ in range(2))
    first_s = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k)]
    x, w = q.reshape(B, S, H), rng.normal(size=(H, 4 * H)).astype(np.float32)
    x_first_s = first_s[0].reshape(S, B, H)
    arrived, arrived_first_s = np.stack(np.split(x, T, 1)), np.stack(np.split(x_first_s, T, 0))   # a message each
    return {
        "product with weights": {"[b, s, h]": lambda: ops.linear(x, w), "[s, b, h]": lambda: ops.linear(x_first_s, w)},
        "scores of all heads": {
            "[b, s, a, d]": lambda: q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1),
            "[s, b, a, d]": lambda: first_s[0].transpose(1, 2, 0, 3) @ first_s[1].transpose(1, 2, 3, 0)},
        f"{T} ranks' positions, joined": {     # one message lies behind the other, which is [s, b, h] already
            "[b, s, h]": lambda: arrived.swapaxes(0, 1).reshape(B, S, H),
            "[s, b, h]": lambda: arrived_first_s.reshape(S, B, H)}}


def main() -> None:
    print(f"b = {B}, s = {S}, a = {A}, d = {D}, float32; median milliseconds of {TURNS} turns")
    for name, variants in {**fused_variants(), **layout_variants()}.items():
        print(f"{name:28} " + "   ".join(f"{what} {ms:.3f}" for what, ms in milliseconds(variants).items()))


if __name__ == "__main__":
    main()
