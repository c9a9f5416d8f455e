"""Half precision in NumPy, without a C++ compiler: read float16 or bfloat16, compute in float32, round once.

Each function computes with its namesake for float32, in cpu.py or reference/ops.py, where its docstring is. It rounds
its result to the format of its first argument, except for statistics and gradients of parameters. A cache keeps inputs
rather than what can be recomputed from them, so it may differ from the namesake's.
"""
from functools import wraps

import numpy as np

from mpi_impl.kernels import blockwise, cpu, plain
from mpi_impl.kernels.cpu import tiles
from mpi_impl.runtime.arrays import narrowed, widened
from reference import ops
from reference.layers import rope
from reference.ops import CoreInputs

HALF, AS_IS = "rounded", "as it is"


def rounding(kernel, returns=HALF):
    """Make a kernel for halves of one for float32. `returns` has the shape of its result, and says what is rounded."""
    @wraps(kernel)
    def round_result(x, *others):
        return rounded(kernel(widened(x), *map(widened, others)), returns, x.dtype)

    return round_result


def rounded(result, returns, dtype):
    if type(returns) is tuple:
        return tuple(rounded(*one, dtype) for one in zip(result, returns, strict=True))
    return narrowed(result, dtype) if returns is HALF else result


# These compute with the textbook's functions, and so run on a GPU, too.
rotate, rotate_backward = rounding(rope.rotate), rounding(rope.rotate_backward)
relu, relu_backward = rounding(ops.relu, (HALF, AS_IS)), rounding(ops.relu_backward)            # y, x > 0

layer_norm = rounding(cpu.layer_norm, (HALF, (HALF, AS_IS)))                                    # y, (normed, 1 / std)
layer_norm_backward = rounding(cpu.layer_norm_backward, (HALF, AS_IS, AS_IS))                   # dx, dweight, dbias
rms_norm = rounding(cpu.rms_norm, (HALF, (HALF, AS_IS)))                                        # y, (normed, 1 / rms)
rms_norm_backward = rounding(cpu.rms_norm_backward, (HALF, AS_IS))                              # dx, dweight
lookup_backward = rounding(cpu.lookup_backward, AS_IS)                                          # dtable
cached_attention = rounding(blockwise.cached_attention)


# ---- linear ---------------------------------------------------------------------------------------------------------


def linear(x, w, b=None):
    y, w, b = np.empty_like(x, order="C", shape=(*x.shape[:-1], w.shape[-1])), widened(w), widened(b)
    for x_, y_ in tiles(x, y, elements=1 << 20):
        y_[...] = narrowed(cpu.linear(widened(x_), w, b), y.dtype)
    return y


# ---- GeLU -----------------------------------------------------------------------------------------------------------


def keeping_input(forward, backward):
    """Make an activation function's two kernels for halves: they cache x alone, and recompute the rest."""
    @wraps(forward)
    def round_forward(x):
        y = np.empty_like(x, order="C")
        for x_, y_ in tiles(x, y):
            y_[...] = narrowed(forward(widened(x_))[0], x.dtype)
        return y, x

    @wraps(backward)
    def round_backward(dy, x):
        dx = np.empty_like(dy, order="C")
        for dx_, dy_, x_ in tiles(dx, dy, x):
            _, cache = forward(widened(x_))
            dx_[...] = narrowed(backward(widened(dy_), cache), dy.dtype)
        return dx

    return round_forward, round_backward


gelu, gelu_backward = keeping_input(cpu.gelu, cpu.gelu_backward)
gelu_exact, gelu_exact_backward = keeping_input(ops.gelu_exact, ops.gelu_exact_backward)


def swiglu(x):
    return narrowed(cpu.swiglu(widened(x))[0], x.dtype), x


def swiglu_backward(dy, cache):
    _, wide = cpu.swiglu(widened(cache))
    return narrowed(cpu.swiglu_backward(widened(dy), wide), dy.dtype)


# ---- dropout --------------------------------------------------------------------------------------------------------


def dropout(x, site):
    if site is None:
        return x, None
    y, mask = cpu.dropout(widened(x), site)
    return narrowed(y, x.dtype), mask


def dropout_backward(dy, mask):
    return dy if mask is None else narrowed(cpu.dropout_backward(widened(dy), mask), dy.dtype)


# ---- the loss -------------------------------------------------------------------------------------------------------


def exp_and_sum(logits, highest):
    total = np.empty_like(highest)
    for logits_, highest_, total_ in tiles(logits, highest[..., None], total[..., None]):
        total_[...] = np.exp(widened(logits_) - widened(highest_)).sum(1, keepdims=True)
    return logits, total


def cross_entropy_backward(kept, highest, total, dloss, ids, held):
    columns = (x[..., None] for x in (highest, total, dloss, ids, held))
    for kept_, highest_, total_, dloss_, ids_, held_ in tiles(kept, *columns):
        exps, (total_, dloss_) = np.exp(widened(kept_) - widened(highest_)), widened((total_, dloss_))
        kept_[...] = narrowed(plain.cross_entropy_backward(exps, highest_, total_[:, 0], dloss_[:, 0], ids_[:, 0],
                                                           held_[:, 0]), kept.dtype)
    return kept


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_core(q, k, v, causal, site=None, lengths=None):
    """Keep no probabilities, as FlashAttention (Dao et al. 2022): the cache is the inputs.

    Compute one sample at a time, so that no more than its probabilities, [1, a, s, s], exist at any moment.
    """
    inputs, context = CoreInputs(q, k, v, causal, site, lengths), np.empty_like(q)
    for i in range(len(q)):
        context[i:i + 1] = narrowed(blockwise.attention_core(*sample(inputs, i))[0], q.dtype)
    return context, inputs


def attention_core_again(inputs):
    return inputs


def attention_core_backward(dcontext, cache):
    gradients = [np.empty_like(x) for x in cache[:3]]
    for i in range(len(dcontext)):
        _, core = blockwise.attention_core(*sample(cache, i))
        mine = blockwise.attention_core_backward(widened(dcontext[i:i + 1]), core)
        del core                     # or its probabilities would be there until the next sample's are
        for whole, one in zip(gradients, mine):
            whole[i:i + 1] = narrowed(one, whole.dtype)
    return tuple(gradients)


def sample(inputs, i):
    """Select the inputs of sample i, in float32; dropout draws what it draws for that sample among all."""
    q, k, v, causal, site, lengths = inputs
    q, k, v = (widened(x[i:i + 1]) for x in (q, k, v))
    return CoreInputs(q, k, v, causal, site and site.moved(i), None if lengths is None else lengths[i:i + 1])
