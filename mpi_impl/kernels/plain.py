"""Functions that reference/ops.py does not have, in plain NumPy operations on arrays of any library."""
from functools import wraps

import numpy as np

from mpi_impl.runtime.arrays import is_half, narrowed, widened
from reference import ops
from reference.ops import rows
from reference.optimizers import adam

UFUNCS = {"sum": np.add, "max": np.maximum}

# ---- sums and stacks ----


def add_to(y, x):
    """Add x to y, in place, and return y: x has the shape of y or of a row of it, as a bias has."""
    y += x
    return y


def sum_in_rank_order(parts, op: str, out):
    """Write the elementwise sum (or maximum) of parts [size, ...], one from each of two ranks or more, to out [...].

    Return out.

    The result has the same bits on every rank and with every MPI. Halves are added in float32 and rounded once.
    """
    total = np.empty_like(out, dtype=np.float32) if is_half(out) else out
    UFUNCS[op](widened(parts[0]), widened(parts[1]), out=total)
    for part in parts[2:]:
        UFUNCS[op](total, widened(part), out=total)
    if total is not out:
        out[...] = narrowed(total, out.dtype)
    return out


def stack(parts):
    """Stack arrays [b, s, heads, d] -> [b, s, number of arrays, heads, d]."""
    return np.stack(parts, 2)


# ---- norms ----


def and_around(backward):
    """Make a norm's backward add to dx what came around the branch behind the norm, if that is given."""
    @wraps(backward)
    def summed(dy, weight, cache, around=None):
        dx, *of_tensors = backward(dy, weight, cache)
        return dx if around is None else add_to(dx, around), *of_tensors

    return summed


layer_norm_backward, rms_norm_backward = and_around(ops.layer_norm_backward), and_around(ops.rms_norm_backward)

# ---- gradients, which are float32 where dy is of halves ----


def accumulate(grad, x, dy):
    """Add x^T dy to grad [n, m], over all positions of x [..., n] and dy [..., m]: the immediate sink."""
    grad += rows(widened(x)).T @ rows(widened(dy))


def total(dy):
    """Sum dy [n, ...] over n: the gradient of whatever was added everywhere, as a bias is."""
    return widened(dy).sum(0)


# ---- the loss ----


def largest(logits):
    """Return the largest of each row: logits [b, s, n] -> [b, s]."""
    return logits.max(-1)


def exp_and_sum(logits, highest):
    """Sum exp(logits - highest) over n: logits [b, s, n], highest [b, s]

    -> what cross_entropy_backward needs, which is the exponentials, written over the logits, or halves as they are;
    and the sums [b, s], in highest's dtype
    """
    logits -= highest[..., None]
    return logits, np.exp(logits, out=logits).sum(-1)


def cross_entropy_backward(kept, highest, total, dloss, ids, held):
    """Return (probabilities - one at the target) x dloss, dloss [b, s], written over `kept` [b, s, n].

    `kept` and `highest` are exp_and_sum's, total [b, s] is the sum over all words, ids [b, s] are the targets' columns,
    and held [b, s] is whether they are among these.
    """
    kept *= (dloss / total)[..., None]
    at, dtarget = ids[..., None], (dloss * held)[..., None]
    np.put_along_axis(kept, at, np.take_along_axis(kept, at, -1) - dtarget, -1)
    return kept


# ---- the optimizer ----


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """Take one AdamW step (reference/optimizers/adam.py) in place on `states`, parameters and both moments, like grad.

    The gradient is multiplied by `factor` first, in place. `model` gets the parameters in the model's own format,
    unless it is None. `runs` are slices that make up the whole, each with whether it has weight decay.
    """
    if factor != 1:
        grad *= factor
    param, m, v = states
    for part, decays in runs:
        if decays:
            adam.decay_weights(param[part], rate, config)
    adam.adam_update(param, grad, m, v, step, rate, False, config)
    copy_to_model(param, model)


def copy_to_model(param, model):
    """Round the master weights to the model's format, if the model has one of its own."""
    if model is not None:
        model[...] = narrowed(param, model.dtype)


def sum_of_squares(x):
    """Return the sum over the flat x: on a device, a number there, for which the host does not wait."""
    return np.vdot(x, x)
