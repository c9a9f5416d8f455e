"""The keys of the exam questions: expressions in exam.toml, of the project's own functions and of those below.

An integer has to be met exactly, a float within 1 %. course/tests/test_quizzes.py compares every key with a formula.
"""
from dataclasses import replace
from math import prod, sqrt

import numpy as np

from reference import config as configs, kv_cache, params, positions, precision
from reference.comm import ring
from reference.comm.collectives import all_reduce
from reference.comm.regions import TensorParallelRegion
from reference.config import ExpertsConfig, ModelConfig
from reference.costs import bubbles, flops, hardware, memory, parameters, volumes
from reference.costs.memory import layer_activations
from reference.exact import degree
from reference.layers import mlp
from reference.layers.dispatch import order_of
from reference.parallel import model_states
from reference.precision import FORMATS, rounded
from reference.schedules import generators, simulate

FUNCTIONS: dict = {"prod": prod, "sqrt": sqrt, "np": np, "replace": replace}
for module in (configs, kv_cache, params, positions, precision, ring, bubbles, flops, hardware, memory, parameters,
               volumes, degree, mlp, model_states, generators, simulate):
    FUNCTIONS |= vars(module)


def key_of(expression: str, numbers: dict) -> int | float:
    """Return the value of a key for the drawn numbers."""
    return eval(expression, FUNCTIONS | OWN | numbers)


def gpt(L=1, h=8, a=1, V=8, s=8, **choices) -> ModelConfig:
    """Return a GPT of these sizes."""
    return ModelConfig(L, h, a, V, s, **choices)


def doubled_backward(t, k):
    region, dys = TensorParallelRegion(), [np.ones(1)] * t
    for _ in range(k):
        inside = all_reduce(dys)                                         # g's backward, where dys would be right
        dys = region.enter_backward([each / t for each in inside])       # a region that changes nothing otherwise
    return int(inside[0][0])


def average_of_averages(n, k):
    counts = np.array([n, n, n, k])
    weights = 1 / counts / len(counts)
    return float(weights[3] / weights[0])


def selective(s, h, a):
    kept = layer_activations(gpt(h=h, a=a), 1, s, sequence_parallel=True)
    return 100 * kept.core / sum(kept)


def stalled_sum(form, x):
    total, after = np.float32(0), np.float32(x)
    while after != total:
        total, after = after, rounded(after + np.float32(x), FORMATS[form])
    return int(total)


def loss_scale(e):
    scale = 1
    while not rounded(np.float32(scale * 2.0**-e), FORMATS["float16"]):
        scale *= 2
    return scale


def capacity(tokens, E, factor, n):
    ids = np.array([[0, 1]] * n + [[2, 1]] * (tokens - n))
    return n - int(order_of(ids, ExpertsConfig(E, moe_expert_capacity_factor=factor)).counts[0])


def cache_bytes(L, g, b, s, t):
    config = gpt(L, 128 * g, g)
    one = kv_cache.empty_kv_cache(config, range(L), 1, np.zeros(1, np.float16), t=t)    # room for a position of a text
    return b * s * sum(layer.k.nbytes + layer.v.nbytes for layer in one.values()) / 1e9


OWN = {own.__name__: own for own in (gpt, doubled_backward, average_of_averages, selective, stalled_sum, loss_scale,
                                     capacity, cache_bytes)}
