"""Half precision, as a GPU's fused kernels have it: read float16 or bfloat16, compute in float32, round once.

Each function computes with the float32 spellings of a `library`, cpu.py or reference/ops.py, where its namesake's
docstring stands. What it returns is rounded to the format of its arguments, but for statistics and gradients of
parameters. A cache keeps inputs rather than what can be computed from them, so that it may differ from the namesake's.
"""
import numpy as np

from mpi_impl.kernels import cpu
from mpi_impl.runtime.arrays import TILE, is_half, narrowed, widened
from reference.ops import CoreInputs, rows

HALF, AS_IS = "rounded", "as it is"


def rounding(name, returns=HALF):
    """The kernel of this name, for halves. `returns` says, in the shape of what the kernel returns, what is rounded."""
    def kernel(library, *arguments):
        dtype = next(x.dtype for x in arguments if is_half(x))
        return rounded(getattr(library, name)(*map(widened, arguments)), returns, dtype)

    return kernel


def rounded(result, returns, dtype):
    if type(returns) is tuple:
        return tuple(rounded(*one, dtype) for one in zip(result, returns, strict=True))
    return narrowed(result, dtype) if returns is HALF else result


rotate, rotate_backward = map(rounding, ("rotate", "rotate_backward"))
layer_norm = rounding("layer_norm", (HALF, (HALF, AS_IS)))                          # y, (normed, 1 / std)
layer_norm_backward = rounding("layer_norm_backward", (HALF, AS_IS, AS_IS))         # dx, dweight, dbias
relu, relu_backward = rounding("relu", (HALF, AS_IS)), rounding("relu_backward")    # y, x > 0


def in_parts(library, elements, *arrays):
    """The arrays [..., n], all cut alike into parts of whole rows, so that little is in float32 at once.

    A GPU has kernels that do so by themselves, and is given all of them in one.
    """
    flat = [rows(x) for x in arrays]
    step = max(1, elements // flat[0].shape[1]) if library is cpu else max(1, len(flat[0]))
    for start in range(0, len(flat[0]), step):
        yield [x[start:start + step] for x in flat]


# ---- linear ---------------------------------------------------------------------------------------------------------


def linear(library, x, w, b=None):
    y, w, b = np.empty_like(x, order="C", shape=(*x.shape[:-1], w.shape[-1])), widened(w), widened(b)
    for x_, y_ in in_parts(library, 1 << 20, x, y):
        y_[...] = narrowed(library.linear(widened(x_), w, b), y.dtype)
    return y


# ---- GeLU -----------------------------------------------------------------------------------------------------------


def keeping_input(name):
    """An activation function's two kernels, for halves: the cache is x, and what the namesake keeps is computed again.
    """
    def forward(library, x):
        y = np.empty_like(x, order="C")
        for x_, y_ in in_parts(library, TILE, x, y):
            y_[...] = narrowed(getattr(library, name)(widened(x_))[0], x.dtype)
        return y, x

    def backward(library, dy, x):
        dx = np.empty_like(dy, order="C")
        for dx_, dy_, x_ in in_parts(library, TILE, dx, dy, x):
            _, cache = getattr(library, name)(widened(x_))
            dx_[...] = narrowed(getattr(library, f"{name}_backward")(widened(dy_), cache), dy.dtype)
        return dx

    return forward, backward


gelu, gelu_backward = keeping_input("gelu")
gelu_exact, gelu_exact_backward = keeping_input("gelu_exact")


# ---- dropout --------------------------------------------------------------------------------------------------------


def dropout(library, x, site):
    if site is None:
        return x, None
    y, mask = library.dropout(widened(x), site)
    return narrowed(y, x.dtype), mask


def dropout_backward(library, dy, mask):
    return dy if mask is None else narrowed(library.dropout_backward(widened(dy), mask), dy.dtype)


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_core(library, q, k, v, causal, site=None, lengths=None):
    """Keeps no probabilities, as FlashAttention (Dao et al. 2022): the cache is the inputs.

    One sample at a time, so that no more than its probabilities, [1, a, s, s], are ever there.
    """
    inputs, context = CoreInputs(q, k, v, causal, site, lengths), np.empty_like(q)
    for i in range(len(q)):
        context[i:i + 1] = narrowed(library.attention_core(*sample(inputs, i))[0], q.dtype)
    return context, inputs


def attention_core_backward(library, dcontext, inputs):
    gradients = [np.empty_like(x) for x in inputs[:3]]
    for i in range(len(dcontext)):
        _, core = library.attention_core(*sample(inputs, i))
        mine = library.attention_core_backward(widened(dcontext[i:i + 1]), core)
        del core                     # or its probabilities would be there until the next sample's are
        for whole, one in zip(gradients, mine):
            whole[i:i + 1] = narrowed(one, whole.dtype)
    return tuple(gradients)


def sample(inputs, i):
    """The i-th one's inputs of attention's core, alone, in float32; dropout draws what it draws for it among all."""
    q, k, v, causal, site, lengths = inputs
    q, k, v = (widened(x[i:i + 1]) for x in (q, k, v))
    site = site and site._replace(first=(site.first[0] + i, *site.first[1:]))
    return CoreInputs(q, k, v, causal, site, None if lengths is None else lengths[i:i + 1])


cached_attention = rounding("cached_attention")
