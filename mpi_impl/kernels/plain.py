"""Functions that reference/ops.py does not have, in plain NumPy operations on arrays of any library."""
import numpy as np

from mpi_impl.runtime.arrays import narrowed, widened
from reference import optimizer
from reference.ops import rows

# ---- gradients, which are float32 where dy is of halves ----


def accumulate(grad, x, dy):
    """Add x^T dy to grad [n, m], over all positions of x [..., n] and dy [..., m]: the immediate sink."""
    grad += rows(widened(x)).T @ rows(widened(dy))


def total(dy):
    """Sum dy [n, ...] over n: the gradient of whatever was added everywhere, as a bias is."""
    return widened(dy).sum(0)


# ---- the loss ----


def exp_and_sum(logits, highest):
    """Overwrite logits [b, s, n] with exp(logits - highest), highest [b, s]. Return its sums over n, [b, s]."""
    logits -= highest[..., None]
    return np.exp(logits, out=logits).sum(-1)


def cross_entropy_backward(probs, dloss, ids, held):
    """Overwrite probs [b, s, n] with (probs - one at the target) x dloss, dloss [b, s], and return it.

    ids [b, s] are the targets' columns, and held [b, s] is whether they are among these.
    """
    probs *= dloss[..., None]
    at, dtarget = ids[..., None], (dloss * held)[..., None]
    np.put_along_axis(probs, at, np.take_along_axis(probs, at, -1) - dtarget, -1)
    return probs


# ---- the optimizer ----


def adam_update(states, grad, model, runs, factor, step, rate, config):
    """Take one AdamW step (reference/optimizer.py) in place on `states`, parameters and both moments, flat like grad.

    The gradient is multiplied by `factor` first, in place. `model` gets the parameters in the model's own format,
    unless it is None. `runs` are slices that make up the whole, each with whether it has weight decay.
    """
    if factor != 1:
        grad *= factor
    param, m, v = states
    for part, decays in runs:
        if decays:
            optimizer.decay_weights(param[part], rate, config)
    optimizer.adam_update(param, grad, m, v, step, rate, False, config)
    copy_to_model(param, model)


def copy_to_model(param, model):
    """Round the master weights to the model's format, if the model has one of its own."""
    if model is not None:
        model[...] = narrowed(param, model.dtype)


def sum_of_squares(x):
    """Return the sum over the flat x: on a device, a number there, for which the host does not wait."""
    return np.vdot(x, x)
