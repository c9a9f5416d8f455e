"""Numbers that walkthroughs show, worked out in another way. (That they are shown again is another test.)"""
import re
from math import erfc, sqrt

import nbformat
import pytest

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
                             output_text("08_precision")).groups()
    expected = erfc(least / 0.02 / sqrt(2))
    spread = 4 * sqrt(expected * (1 - expected) / 50_000)     # of 50,000 weights that are drawn
    assert float(share) / 100 == pytest.approx(expected, abs=spread)
    assert float(large) / 100 == pytest.approx(expected, abs=spread)
