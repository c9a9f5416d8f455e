"""The local math of reference/ops.py, made fast where that is worth it, under the same names.

NumPy arrays take the spellings of compiled.py, or where there is no compiler those of cpu.py; CuPy's those of cuda/;
arrays of another library the textbook's. Halves are computed in float32 by half.py, but on a GPU, which knows them.
"""
from functools import wraps

import numpy as np

from mpi_impl.kernels import compiled, cpu, cuda, half
from mpi_impl.kernels.fused import core
from mpi_impl.runtime.arrays import is_half, narrowed, widened
from reference import ops, optimizer
from reference.ops import lookup, rows

__all__ = ["ACTIVATIONS", "accumulate", "activated_linear", "adam_update", "add_branch", "add_branch_and_norm",
           "attention_core", "attention_core_again", "attention_core_backward", "cached_attention",
           "cross_entropy_backward", "dropout", "dropout_backward", "exp_and_sum", "layer_norm", "layer_norm_backward",
           "linear", "lookup", "lookup_backward", "rotate", "rotate_backward", "rows", "sum_of_squares", "told",
           "total"]


def library_of(arguments):
    """The spellings for the first array among the arguments."""
    for x in arguments:
        if isinstance(x, np.ndarray):
            return compiled if x.dtype.name in core.FORMATS and core.works() else cpu
        if cuda.has_kernels_for(x):
            return cuda
    return ops


def describe() -> str:
    """For a person: by what cores do the element-wise work."""
    return "element-wise work is done by " + (
        "kernels that were compiled for this machine" if core.works() else
        "NumPy; a C++ compiler, and a place to keep what it makes, would let it be several times as fast")


def chosen(plain):
    """The spelling for the arrays among the arguments: for their library, and for their format."""
    name = plain.__name__

    @wraps(plain)
    def choose(*arguments):
        library = library_of(arguments)
        if library is cuda:
            if hasattr(cuda, name):
                return getattr(cuda, name)(*arguments)
            library = ops
        if any(map(is_half, arguments)):
            return getattr(half, name)(library, *arguments)
        return getattr(library, name)(*arguments)

    return choose


linear, rotate, rotate_backward = chosen(ops.linear), chosen(ops.rotate), chosen(ops.rotate_backward)
layer_norm, layer_norm_backward = chosen(ops.layer_norm), chosen(ops.layer_norm_backward)
dropout, dropout_backward = chosen(ops.dropout), chosen(ops.dropout_backward)
attention_core, attention_core_backward = chosen(ops.attention_core), chosen(ops.attention_core_backward)
cached_attention = chosen(ops.cached_attention)


def fused_where_possible(steps):
    """What is spelled here in several steps is one kernel in some libraries. (The textbook's names mean others.)"""
    name = steps.__name__

    @wraps(steps)
    def choose(*arguments):
        library = library_of(arguments)
        return (steps if library is ops else vars(library).get(name, steps))(*arguments)

    return choose


def attention_core_again(inputs):
    """CoreInputs -> the cache of attention_core. Of halves it is the inputs: the backward's kernel does the rest."""
    if library_of(inputs) is cuda:
        return cuda.attention_core_again(inputs)
    return inputs if is_half(inputs.q) else attention_core(*inputs)[1]


# ---- activation functions, and the linear layer before them ----


ACTIVATIONS = {name: tuple(map(chosen, pair)) for name, pair in ops.ACTIVATIONS.items()}


def activated_linear(x, w, b, activation):
    """The activation function of linear(x, w, b), and its cache."""
    together = vars(library_of((x,))).get(f"linear_{activation}")
    if together:
        return together(x, w, b)
    return ACTIVATIONS[activation][0](linear(x, w, b))


# ---- a branch, and the layer norm behind it ----


@fused_where_possible
def add_branch(y, x, site):
    """dropout(y) + x, of one shape -> the sum, and dropout's mask. Overwrites y."""
    y, mask = dropout(y, site)
    y += x
    return y, mask


@fused_where_possible
def add_branch_and_norm(y, x, site, weight, bias, epsilon):
    """What add_branch gives, and what layer_norm gives for the sum."""
    summed, mask = add_branch(y, x, site)
    return (summed, mask), layer_norm(summed, weight, bias, epsilon)


# ---- what is added to gradients, which are float32 where dy is of halves ----


@fused_where_possible
def accumulate(grad, x, dy):
    """The sink that does not wait: grad [n, m] += x^T dy, over all positions of x [..., n] and dy [..., m]."""
    grad += rows(widened(x)).T @ rows(widened(dy))


@fused_where_possible
def total(dy):
    """dy [n, ...] -> its sum over n: what is added everywhere, as a bias is, has the sum of the gradients."""
    return widened(dy).sum(0)


def lookup_backward(dy, ids, dtable):
    library = cpu if isinstance(dtable, np.ndarray) else ops
    return library.lookup_backward(widened(dy), ids, dtable)


# ---- the loss ----


@fused_where_possible
def exp_and_sum(logits, highest):
    """logits [b, s, n], highest [b, s]: overwrite the logits with exp(logits - highest) -> its sums over n, [b, s]."""
    logits -= highest[..., None]
    return np.exp(logits, out=logits).sum(-1)


@fused_where_possible
def cross_entropy_backward(probs, dloss, ids, held):
    """probs [b, s, n], dloss [b, s] -> (probs - one at the target) x dloss, in the place of probs.

    ids [b, s] are the targets' columns, and held [b, s] is whether they are among these.
    """
    probs *= dloss[..., None]
    at, dtarget = ids[..., None], (dloss * held)[..., None]
    np.put_along_axis(probs, at, np.take_along_axis(probs, at, -1) - dtarget, -1)
    return probs


# ---- the optimizer ----


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """One AdamW step (reference/optimizer.py) in place on `states`, parameters and both moments, flat like grad.

    The gradient is multiplied by `factor` first, in place. `model` gets the parameters in the model's own format,
    unless it is None. `runs` are slices that make up the whole, each with whether it has weight decay.
    """
    if library_of((grad,)) is cuda:
        return cuda.adam_update(states, grad, model, runs, factor, step, rate, config)
    update_states(states, grad, runs, factor, step, rate, config)
    if model is not None:
        param, *_ = states
        model[...] = narrowed(param, model.dtype)


@fused_where_possible
def update_states(states, grad, runs, factor, step, rate, config):
    """adam_update of the states alone."""
    if factor != 1:
        grad *= factor
    param, m, v = states
    for part, decays in runs:
        if decays:
            optimizer.decay_weights(param[part], rate, config)
    optimizer.adam_update(param, grad, m, v, step, rate, False, config)


@fused_where_possible
def sum_of_squares(x):
    """Of the flat x, on a device a number there: nobody waits for it yet."""
    return np.vdot(x, x)
