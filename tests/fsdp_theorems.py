"""Layers for FSDP, and what ranks do with them."""
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.comm.topology import disconnect
from mpi_impl.training.fsdp import FSDP
from reference import ops
from reference.optimizers.adam import OptimizerConfig, adam_update, clip_coefficient
from reference.parallel.fsdp import AnyLayer
from tests.cases import close

OPTIMIZER = OptimizerConfig(1e-2, 10, lr_decay_style="constant", weight_decay=0.1, clip_grad=0.5)


def linear(rng, n, m) -> AnyLayer:
    """Make a linear layer with random numbers."""
    def backward(dy, p, x):
        dx, dw, db = ops.linear_backward(dy, x, p["w"])
        return dx, {"b": db, "w": dw}       # in another order than the parameters

    params = {"w": rng.normal(size=(n, m)), "b": rng.normal(size=m)}
    return AnyLayer(params, lambda x, p: (ops.linear(x, p["w"], p["b"]), x), backward)


def tanh() -> AnyLayer:
    """Make a layer without parameters."""
    def forward(x, p):
        y = np.tanh(x)
        return y, y

    return AnyLayer({}, forward, lambda dy, p, y: (dy * (1 - y * y), {}))


def one_process(layers, params, x, dy):
    """Return y, dx and each layer's gradients, without a wrapper."""
    caches, grads = [], []
    for layer, p in zip(layers, params):
        x, cache = layer.forward(x, p)
        caches.append(cache)
    for layer, p, cache in zip(reversed(layers), reversed(params), reversed(caches)):
        dy, grad = layer.backward(dy, p, cache)
        grads.insert(0, grad)
    return x, dy, grads


class Wrapping(NamedTuple):
    """A model of linear layers, each followed by a tanh, and the way in which it is sharded."""

    sizes: tuple[int, ...]
    cuts: tuple[int, ...]       # where units begin and end, among the layers
    strategy: str = "FULL_SHARD"
    instances: int = 1
    cpu_offload: bool = False


def layers_of(wrapping: Wrapping, rng) -> list[AnyLayer]:
    return [layer for a, b in zip(wrapping.sizes, wrapping.sizes[1:]) for layer in (linear(rng, a, b), tanh())]


def wrapped(group, wrapping: Wrapping, layers: list[AnyLayer]) -> FSDP:
    return FSDP(layers, group, wrapping.strategy, lambda all_: [all_[a:b] for a, b in zip(wrapping.cuts,
                wrapping.cuts[1:])], wrapping.cpu_offload, wrapping.instances)


def fsdp_trains_as_one_process(group, wrapping: Wrapping, microbatches: int, seed: int) -> None:
    """Outputs, dx, norms and weights after two steps of Adam are those of the whole batch."""
    rng, d = np.random.default_rng(seed), group.size
    layers = layers_of(wrapping, rng)
    fsdp = wrapped(group, wrapping, layers)
    adam, params = fsdp.adam(OPTIMIZER), [{name: x.copy() for name, x in layer.params.items()} for layer in layers]
    moments = [{name: (np.zeros_like(x), np.zeros_like(x)) for name, x in p.items()} for p in params]
    for step in (1, 2):
        fsdp.zero_grad(microbatches)
        total = [{name: np.zeros_like(x) for name, x in p.items()} for p in params]
        for _ in range(microbatches):
            x, dy = (rng.normal(size=(d, 3, wrapping.sizes[i])) for i in (0, -1))
            y, caches = fsdp.forward(x[group.rank])
            dx = fsdp.backward(dy[group.rank], caches)
            expected_y, expected_dx, grads = one_process(layers, params, x, dy)
            close(y, expected_y[group.rank])
            close(dx, expected_dx[group.rank], 1e-10)
            for sums, grad in zip(total, grads):
                for name, each in grad.items():
                    sums[name] += each
        norm = np.sqrt(sum((x * x).sum() for p in total for x in p.values()))
        close(fsdp.step(adam), norm, 1e-10)
        for p, grads, states in zip(params, total, moments):
            for name, x in p.items():
                adam_update(x, grads[name] * clip_coefficient(norm, OPTIMIZER.clip_grad), *states[name], step,
                            OPTIMIZER.lr, True, OPTIMIZER)
    for found, p in zip(fsdp.parameters(), params, strict=True):
        for name, x in p.items():
            close(found[name], x, 1e-8)
    disconnect(fsdp.topology)


def sent_and_kept(group, wrapping: Wrapping) -> tuple[float, int]:
    """Return what this rank has sent in a step, by ring algorithms, and keeps of parameters and gradients."""
    layers = layers_of(wrapping, np.random.default_rng(0))
    fsdp = wrapped(group, wrapping, layers)
    fsdp.zero_grad()
    ledger = group.ledger.totals
    ledger.clear()
    y, caches = fsdp.forward(np.ones((2, wrapping.sizes[0])))
    fsdp.backward(y, caches)
    fsdp.zero.gradients.finish()
    kept = fsdp.zero.parameters.own.flat.size + fsdp.zero.gradients.own.flat.size
    disconnect(fsdp.topology)
    return sum(ring_bytes(entry, total) for entry, total in ledger.items()) / 8, kept
