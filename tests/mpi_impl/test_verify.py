"""The measurements of --verify: the differences between the ranks and the textbook, each relative to its own scale."""
from math import nan, sqrt
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_impl.training.trainer import StepResult
from mpi_impl.training.verify import SMALL, Verifier
from reference.params import tree_map
from reference.precision import Precision

RATE = 0.01


class OneProcess(Verifier):
    """A verifier that is given the textbook's step, and every replica's tree as it is."""

    def __init__(self, loss: float, norm: float, grads, params, compute: str = "float64"):
        self.precision = Precision(compute)
        self.textbook = SimpleNamespace(step=lambda batch, skipped: (loss, norm, grads), params=params)

    def whole(self, flats):
        return iter(flats)


def params():
    """Return parameters of which one, b_qkv [3, a, d], has the queries', the keys' and the values' biases."""
    return {"w": np.full((4, 5), 0.5), "attention.b_qkv": np.full((3, 1, 2), 0.5),
            "attention.k_norm.bias": np.full(2, 0.5)}


def grads():
    return {"w": np.full((4, 5), -4.0), "attention.b_qkv": np.full((3, 1, 2), 0.25),
            "attention.k_norm.bias": np.full(2, 0.25)}


def perturb(tree, name: str, at, by: float):
    """Return a copy of the tree in which one element differs."""
    tree = tree_map(np.copy, tree)
    tree[name][at] += by
    return tree


def differences(loss=(2.0, 2.0), norm=(3.0, 3.0), gradient=(), weight=(), skipped=False, compute="float64"):
    """Compare two replicas with the textbook, and return the differences. `loss` and `norm` are (the ranks', the
    textbook's); the second replica may have one other gradient and one other weight: (name, index, by how much).
    """
    result = StepResult((loss[0],), nan if skipped else norm[0], RATE)
    verifier = OneProcess(loss[1], norm[1], grads(), params(), compute)
    return verifier.compare(None, result, [grads(), perturb(grads(), *gradient) if gradient else grads()],
                            [params(), perturb(params(), *weight) if weight else params()])


BIAS, OF_NORM = "attention.b_qkv", "attention.k_norm.bias"


@pytest.mark.parametrize("expected, found", [
    ((0.005, 0, 0), {"loss": (100.5, 100.0)}), ((0.25, 0, 0), {"loss": (0.25, 0.5)}),
    ((0, 0.005, 0), {"norm": (99.5, 100.0)}), ((0, 0.2, 0), {"norm": (3e-4, 1e-4)}),
    ((0, 0.5 / 4, 0), {"gradient": (BIAS, (1, 0, 1), -0.5)}),       # the largest element of all is 4
    ((0, 0, 0.2 / sqrt(20)), {"weight": ("w", (1, 2), 0.002)}),     # the root of the mean of squares
    ((0, 0, 0.2 / sqrt(SMALL)), {"weight": ("w", (1, 2), 0.002), "compute": "bfloat16"}),   # as if it had more elements
    ((0, 0, 0.3 / sqrt(4)), {"weight": (BIAS, (2, 0, 0), 0.003)}),
    ((0, 0, 0), {"weight": (BIAS, (1, 0, 0), 1.0)}), ((0, 0, 0), {"weight": (OF_NORM, 1, 1.0)}),    # move nothing
    ((0, 0, 0), {"gradient": ("w", (0, 0), nan), "skipped": True}), ((nan, 0, 0), {"loss": (nan, 2.0)}),
    ((0, nan, 0), {"gradient": (BIAS, (2, 0, 1), nan)}), ((0, 0, nan), {"weight": ("w", (3, 4), nan)}),
    ((0, 0, nan), {"weight": (BIAS, (2, 0, 1), nan)})])
def test_each_difference_is_measured_on_its_own_scale(expected, found):
    """A loss by the loss or by 1, a norm by itself or by a thousandth, weights tensor by tensor by the rate. What is
    not a number is not passed over, in whichever tensor: max() would not see one that comes after a number.
    """
    assert differences(**found) == pytest.approx(expected, rel=1e-3, abs=0, nan_ok=True)


def test_the_textbook_takes_over_the_first_replicas_weights():
    verifier, other = OneProcess(2.0, 3.0, grads(), params()), perturb(params(), "w", (0, 0), 0.25)
    verifier.compare(None, StepResult((2.0,), 3.0, RATE), [grads()] * 2, [other, params()])
    assert (verifier.textbook.params["w"] == other["w"]).all()


def test_a_weights_rounding_grows_with_the_weight(size=1e6):
    """A step without a rate moves the largest weight by its rounding alone: a difference of 1 is 1 / (16 epsilon)."""
    weights = {"w": np.array([-size, size / 2])}
    verifier = OneProcess(1.0, 1.0, weights, weights)
    found = verifier.compare(None, StepResult((1.0,), 1.0, 0.0), [weights], [perturb(weights, "w", 1, 1.0)])
    assert found.weights == pytest.approx(sqrt(0.5) / (16 * 2.0**-52 * size), rel=1e-6)
