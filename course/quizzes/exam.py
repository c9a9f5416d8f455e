"""The keys of the exam questions, one function each, of the drawn numbers, by the project's own functions.

An integer has to be met exactly, a float within 1 %. course/tests/test_quizzes.py compares every key with a formula.
"""
from math import prod, sqrt

import numpy as np

from reference.comm.collectives import all_reduce
from reference.comm.mappings import TensorParallelRegion
from reference.comm.ring import ring_all_gather, ring_all_reduce
from reference.config import ExpertsConfig, ModelConfig, ParallelConfig, number_of_microbatches
from reference.costs.flops import iteration_flops, training_seconds
from reference.costs.memory import layer_activations
from reference.costs.parameters import parameters as parameters_of
from reference.costs.volumes import data_parallel_traffic, tensor_parallel_traffic
from reference.exact.degree import INPUT
from reference.kv_cache import empty_kv_cache
from reference.layers.dispatch import order_of
from reference.layers.mlp import mlp_tensors
from reference.parallel.model_states import model_states
from reference.params import leaves
from reference.positions import in_order
from reference.precision import FORMATS, rounded
from reference.schedules.generators import make
from reference.schedules.simulate import Times, activations_in_flight, simulate


def gpt(L=1, h=8, a=1, V=8, s=8, **choices) -> ModelConfig:
    """Return a GPT of these sizes."""
    return ModelConfig(L, h, a, V, s, **choices)


def mlp_shard(t, h):
    return sum(prod(tensor.local_shape(t)) for _, tensor in leaves(mlp_tensors(gpt(h=h))))


def one_sum(b, s, h, t):
    return 2 * ring_all_reduce(b * s * h, t) / 1e6


def doubled_backward(t, k):
    region, dys = TensorParallelRegion(), [np.ones(1)] * t
    for _ in range(k):
        inside = all_reduce(dys)                                         # g's backward, where dys would be right
        dys = region.enter_backward([each / t for each in inside])       # a region that changes nothing otherwise
    return int(inside[0][0])


def layer_traffic(L, h, t, b, s):
    return 2 * L * tensor_parallel_traffic(b, s, h, t) / 1e9


def average_of_averages(n, k):
    counts = np.array([n, n, n, k])
    weights = 1 / counts / len(counts)
    return float(weights[3] / weights[0])


def microbatches(world, t, p, B, b):
    return number_of_microbatches(B, b, ParallelConfig.for_world(world, t, p).replicas)


def packed_qkv(t, h, r):
    return np.split(np.repeat(list("QKV"), h), t)[r].tolist().count("K")


def padded_rows(V, t):
    return gpt(V=V).padded_vocab_size(t) - V


def three_numbers(V, t):
    return ring_all_gather(V, t) / ring_all_reduce(3, t)


def all_reduces_a_step(L, t, m):
    return round(L * m * tensor_parallel_traffic(1, 1, 1, t) / ring_all_reduce(1, t))


def masks_disagree(percent):
    p = percent / 100
    return 100 * 2 * p * (1 - p)


def layer_activations_mb(t, b, s, h, a):
    return sum(layer_activations(gpt(h=h, a=a), b, s, t, sequence_parallel=True)) / 1e6


def selective(s, h, a):
    kept = layer_activations(gpt(h=h, a=a), 1, s, sequence_parallel=True)
    return 100 * kept.core / sum(kept)


def recompute_flops(L, h, s, V):
    none, full = (iteration_flops(gpt(L, h, V=V), 1, s, recompute) for recompute in ("none", "full"))
    return 100 * (full / none - 1)


def bubble(p, v, m):
    return 100 * simulate(make("interleaved", p, m, v), Times()).bubble_fraction


def in_flight(p, m, r):
    return activations_in_flight(make("1f1b", p, m))[r]


def slow_stage(p, m, w):
    times = [1.0] * (p - 1) + [w]
    return simulate(make("gpipe", p, m), Times(times, times, times)).makespan


def zero_states(billions, stage, d):
    return sum(model_states(billions, d, stage))


def zero_traffic(billions, stage, d, m):
    return data_parallel_traffic(billions, d, stage, m)


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


def parameters(L, h, V, s):
    return parameters_of(gpt(L, h, V=V, s=s)) / 1e9


def days(billions, tokens, n, teraflops):
    return training_seconds(tokens * 1e9, billions * 1e9, n, teraflops * 1e12) / 86400


def chance(degree, P, n):
    return 100 * (prod([INPUT] * (degree - 1), start=INPUT).numerator / P)**n


def last_rank_pairs(s, c):
    return sum(i + 1 for chunk in in_order(c, s)[-1] for i in range(s)[chunk])


def ring_keys(c, s, h):
    return 2 * 2 * ring_all_gather(s * h, c) / 1e6


def capacity(tokens, E, factor, n):
    ids = np.array([[0, 1]] * n + [[2, 1]] * (tokens - n))
    return n - int(order_of(ids, ExpertsConfig(E, moe_expert_capacity_factor=factor)).counts[0])


def kv_cache(L, g, b, s, t):
    config = gpt(L, 128 * g, g)
    one = empty_kv_cache(config, range(L), 1, np.zeros(1, np.float16), t=t)      # room for a position of a text
    return b * s * sum(layer.k.nbytes + layer.v.nbytes for layer in one.values()) / 1e9


def ridge(teraflops, terabytes):
    return teraflops / terabytes


def checkpoint_interval(n, hours, seconds):
    return sqrt(2 * seconds * hours * 3600 / n) / 60
