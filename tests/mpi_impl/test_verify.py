"""The measurements of --verify: the differences between the ranks and the textbook, each relative to its own scale."""
from math import isnan, nan, sqrt
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
    return {"w": np.full((4, 5), 0.5), "attention.b_qkv": np.full((3, 1, 2), 0.5)}


def grads():
    return {"w": np.full((4, 5), -4.0), "attention.b_qkv": np.full((3, 1, 2), 0.25)}


def perturb(tree, name: str, at, by: float):
    """Return a copy of the tree in which one element differs."""
    tree = tree_map(np.copy, tree)
    tree[name][at] += by
    return tree


def differences(loss=(2.0, 2.0), norm=(3.0, 3.0), found_grads=None, found_params=None, skipped=False, **choices):
    """Compare two replicas with the textbook, and return the differences. `loss` and `norm` are (the ranks', the
    textbook's); the second replica's gradients and parameters may be other ones.
    """
    result = StepResult((loss[0],), nan if skipped else norm[0], RATE)
    verifier = OneProcess(loss[1], norm[1], grads(), params(), **choices)
    return verifier.compare(None, result, [grads(), found_grads or grads()], [params(), found_params or params()])


def test_what_is_equal_differs_by_nothing():
    assert differences() == (0, 0, 0)


@pytest.mark.parametrize("textbook, by, expected", [(100.0, 0.5, 0.005), (100.0, -0.5, 0.005), (0.5, 0.25, 0.25)])
def test_a_loss_is_measured_by_the_loss_or_by_1(textbook, by, expected):
    assert differences(loss=(textbook + by, textbook)) == (pytest.approx(expected), 0, 0)


@pytest.mark.parametrize("textbook, by, expected", [(100.0, 0.5, 0.005), (100.0, -0.5, 0.005), (1e-4, 2e-4, 0.2)])
def test_a_norm_is_measured_by_the_norm_or_by_a_thousandth(textbook, by, expected):
    assert differences(norm=(textbook + by, textbook)) == (0, pytest.approx(expected), 0)


def test_a_gradient_is_measured_by_the_largest_element_of_all():
    """On any replica. Here that is 4; and of a gradient that is almost nothing, a thousandth."""
    found = differences(found_grads=perturb(grads(), "attention.b_qkv", (1, 0, 1), -0.5))
    assert found == (0, pytest.approx(0.5 / 4), 0)
    verifier = OneProcess(2.0, 1e-5, {"w": np.array([1e-5, 0.0])}, params())
    found = verifier.compare(None, StepResult((2.0,), 1e-5, RATE), [{"w": np.array([1e-5, 1e-4])}], [params()])
    assert found == (0, pytest.approx(1e-4 / 1e-3), 0)


def test_weights_are_measured_tensor_by_tensor_by_the_rate():
    """By the root of the mean of squares. In 16 bits a small tensor counts as if it had more elements."""
    other = perturb(params(), "w", (1, 2), 0.002)
    assert differences(found_params=other) == (0, 0, pytest.approx(0.002 / sqrt(20) / RATE))
    in_half = differences(found_params=other, compute="bfloat16")
    assert in_half == (0, 0, pytest.approx(0.002 / sqrt(SMALL) / RATE, rel=1e-3))
    other = perturb(other, "attention.b_qkv", (2, 0, 0), 0.003)
    assert differences(found_params=other) == (0, 0, pytest.approx(0.003 / sqrt(4) / RATE))


def test_of_biases_the_keys_are_left_out():
    assert differences(found_params=perturb(params(), "attention.b_qkv", (1, 0, 0), 1.0)) == (0, 0, 0)


def test_what_is_no_number_is_not_passed_over():
    """In whichever tensor of whichever replica: max() would not see one that comes after a number."""
    for name, at in (("w", (3, 4)), ("attention.b_qkv", (2, 0, 1))):
        assert isnan(differences(found_grads=perturb(grads(), name, at, nan)).gradient)
        assert isnan(differences(found_params=perturb(params(), name, at, nan)).weights)
    assert isnan(differences(loss=(nan, 2.0)).loss)


def test_of_a_step_that_was_skipped_no_gradient_is_compared():
    assert differences(found_grads=perturb(grads(), "w", (0, 0), nan), skipped=True) == (0, 0, 0)


def test_the_textbook_takes_over_the_first_replicas_weights():
    verifier, other = OneProcess(2.0, 3.0, grads(), params()), perturb(params(), "w", (0, 0), 0.25)
    verifier.compare(None, StepResult((2.0,), 3.0, RATE), [grads()] * 2, [other, params()])
    assert (verifier.textbook.params["w"] == other["w"]).all()


@pytest.mark.parametrize("size", [0.5, 1e6])
def test_a_weights_rounding_grows_with_the_weight(size):
    """A step without a rate moves the largest weight by its rounding alone."""
    verifier = OneProcess(1.0, 1.0, None, {"w": np.array([-size, size / 2])})
    assert verifier.step_size(StepResult((1.0,), 1.0, 0.0)) == pytest.approx(16 * 2.0**-52 * size, rel=1e-12)


def test_buffers_of_unequal_sizes_are_gathered_with_zeros_behind(ranks):
    assert ranks.run(3, gather_unequal) == [[[1, 0, 0], [2, 2, 0], [3, 3, 3]]] * 3


def gather_unequal(group):
    flat = np.full(group.rank + 1, group.rank + 1.0)
    return Verifier.of_all_ranks(SimpleNamespace(world=group), flat, "test").tolist()   # type: ignore[arg-type]
