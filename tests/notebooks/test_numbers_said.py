"""Numbers that walkthroughs show, worked out in another way. (That they are shown again is another test.)"""
import re
from math import comb, erfc, sqrt

import nbformat
import numpy as np
import pytest

from reference.exact.array import as_exact, random_array
from reference.exact.degree import P
from tools.notebooks import FOLDER, text_of


def output_text(name: str) -> str:
    """Return the text of all outputs of the stored notebook's cells."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    return "\n".join(text_of(output) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def test_a_sum_before_gelu_is_of_x_a_and_after_b_it_is_of_y():
    """X is [6, 4], A [4, 16], B [16, 4]: 6 x 16 numbers against 6 x 4."""
    assert "numbers to add up over the ranks: 96 here, 24 if it were after B" in output_text("01_splitting_matrices")


@pytest.mark.parametrize("rate, least", [("1.5e-04", 2**-4), ("1.0e-05", 2**-8)])
def test_the_updates_that_bfloat16_loses_are_those_of_weights_whose_neighbours_are_far(rate, least):
    """Weights are normal with deviation 0.02. From 2^e on, bfloat16's numbers are 2^(e-7) apart, and less than half of
    that is lost. So these are the weights from `least` on, the smallest 2^e with 2^(e-8) larger than the rate.
    """
    assert least * 2**-8 > float(rate) > least * 2**-9
    share, large = re.search(rf"learning rate {rate}: ([\d.]+)% of the updates are lost, ([\d.]+)% of the weights",
                             output_text("10_precision")).groups()
    expected = erfc(least / 0.02 / sqrt(2))
    spread = 4 * sqrt(expected * (1 - expected) / 50_000)     # of 50,000 weights that are drawn
    assert float(share) / 100 == pytest.approx(expected, abs=spread)
    assert float(large) / 100 == pytest.approx(expected, abs=spread)


def test_different_cubics_agree_less_often_than_somebody_wins_five_jackpots():
    assert f"1 / {comb(49, 6):_}" in (FOLDER / "13_what_is_a_proof.py").read_text()
    assert comb(49, 6)**-6 < 3 / (2**127 - 1) < comb(49, 6)**-5


@pytest.mark.parametrize("factor, floats_see, exact_numbers_see", [
    (1, False, False), (1 + 2**-50, False, True), (4, True, True), (P + 1, True, False)])
def test_a_factor_of_a_bias_is_seen_by_floats_or_by_exact_numbers(factor, floats_see, exact_numbers_see):
    """P + 1 is 1 modulo P: the answer to the last exercise about proofs."""
    def differences(x, bias):
        return x + factor * bias, x + bias

    found, expected = differences(*np.random.default_rng(1).normal(size=(2, 9)))
    assert (abs(found - expected).max() / abs(expected).max() > 1e-11) == floats_see
    found, expected = differences(random_array((9,), "x"), random_array((9,), "bias"))
    assert (found != expected).all() == (found != expected).any() == exact_numbers_see


def test_sine_and_cosine_of_exact_numbers_know_no_law():
    """The answer to an exercise about proofs. The law holds for floats."""
    x = random_array((9,), "x")
    assert not (np.sin(x)**2 + np.cos(x)**2 == as_exact(np.ones(9))).any()
