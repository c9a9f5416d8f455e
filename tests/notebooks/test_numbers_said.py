"""Numbers that walkthroughs show, worked out in another way; and numbers that they only tell, which a cell asserts.

(That they are shown again is another test.)
"""
import re
from functools import cache
from math import comb, erfc, exp, sqrt

import jupytext
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tools.notebooks import SOURCES, read_stored, sources, text_of


def output_text(name: str) -> str:
    """Return the text of all outputs of the stored notebook's cells."""
    return "\n".join(text_of(output) for cell in read_stored(name).cells if cell.cell_type == "code"
                     for output in cell.outputs)


def test_a_sum_before_gelu_is_of_x_a_and_after_b_it_is_of_y():
    """X is [6, 4], A [4, 16], B [16, 4]: 6 x 16 numbers, which a cell asserts, against 6 x 4."""
    assert "measured: 24 numbers to add up after B" in output_text("01_splitting_matrices")


@pytest.mark.parametrize("rate, least", [("1.5e-04", 2**-4), ("1.0e-05", 2**-8)])
def test_the_updates_that_bfloat16_loses_are_those_of_weights_whose_neighbours_are_far(rate, least):
    """Weights are normal with deviation 0.02. From 2^e on, bfloat16's numbers are 2^(e-7) apart, and less than half of
    that is lost. So these are the weights from `least` on, the smallest 2^e with 2^(e-8) larger than the rate.
    """
    assert least * 2**-8 > float(rate) > least * 2**-9
    share, large = re.search(rf"learning rate {rate}: ([\d.]+)% of the updates are lost, ([\d.]+)% of the weights",
                             output_text("11_precision")).groups()
    expected = erfc(least / 0.02 / sqrt(2))
    spread = 4 * sqrt(expected * (1 - expected) / 50_000)     # of 50,000 weights that are drawn
    assert float(share) / 100 == pytest.approx(expected, abs=spread)
    assert float(large) / 100 == pytest.approx(expected, abs=spread)


def test_different_cubics_agree_less_often_than_somebody_wins_five_jackpots():
    assert f"1 / {comb(49, 6):_}" in (SOURCES / "14_what_is_a_proof.py").read_text()
    assert comb(49, 6)**-6 < 3 / (2**127 - 1) < comb(49, 6)**-5


def test_the_roofline_is_reached_or_missed_as_a_count_of_messages_bytes_and_flops_says():
    """A link of 10 us and 25 GB/s, between 64 ranks: the steps of a ring and a tree, played; and FLOPs, by layer."""
    text, alpha, beta, d = output_text("21_roofline"), 1e-5, 25e9, 64

    def ring(n):
        return sum(alpha + n / d / beta for phase in range(2) for step in range(1, d))

    def tree(n):
        levels, groups = 0, d
        while groups > 1:
            levels, groups = levels + 1, groups // 2
        return 2 * levels * (alpha + n / beta)

    assert "measured: 250,000 bytes" in text and 2 * alpha == pytest.approx(alpha + 250_000 / beta)
    assert f"measured: {ring(8) / tree(8):.1f} times as long" in text
    crossing, = re.search(r"they cross at ([\d.]+) MB", text).groups()
    assert ring((float(crossing) - 0.05) * 1e6) > tree((float(crossing) - 0.05) * 1e6)
    assert ring((float(crossing) + 0.05) * 1e6) < tree((float(crossing) + 0.05) * 1e6)

    m, k, n = 64, 12_288, 6144
    assert f"64 tokens {2 * m * k * n / 312e12 / (2 * (m * k + k * n + m * n) / 2039e9):.1%}" in text
    L, h, s, V = 128, 25_600, 2048, 51_200
    layers, logits = L * (24 * s * h**2 + 4 * s**2 * h), 2 * s * h * V
    mfu = 163 / 312 * 3 * (layers + logits) / (4 * layers + 3 * logits)
    assert f"measured: {100 * mfu:.1f} % MFU" in text


@cache
def goodput():
    """Return the function of the walkthrough."""
    names = {"np": np}
    cells = jupytext.read(SOURCES / "22_failure_and_restart.py").cells
    exec(next(cell.source for cell in cells if cell.source.startswith("def goodput")), names)
    return names["goodput"]


@given(st.floats(1, 100), st.floats(0.1, 0.5), st.floats(0.1, 0.5), st.floats(0, 0.5))
def test_counted_goodput_is_daly_s_closed_form(mtbf, interval, cost, restart):
    """At a constant rate of failures, a segment of T + C minutes is survived with probability q = e^-(T + C)/M, and a
    restart with e^-R/M; then q / (1 - q) segments are done on average (Daly 2006). Of 100,000 lives, within 3 %.
    """
    closed = interval * exp(-restart) / (exp(interval + cost) - 1)
    assert goodput()(interval * mtbf, cost * mtbf, mtbf, restart * mtbf) == pytest.approx(closed, rel=0.03)


# ---- numbers in prose ----

# Of papers and of other programs, so that no cell can assert them.
OF_OTHERS = {"08_sequence_parallelism": {"2.7"},                                 # Korthikanti et al. 2022, equation 8
             "12_training_in_3d": {"300", "25"},                                 # Narayanan et al. 2021, section 5
             "13_choosing_t_p_d_b": {"22", "39"},                                # Korthikanti et al. 2022, section 6
             "16_experts": {"6546", "5956"},                                     # of issues
             "22_failure_and_restart": {"90"}}                                   # Dubey et al. 2024, section 3.3.4
NO_CLAIMS = [r"```.*?```", r"`[^`]*`", r"\$\$.*?\$\$", r"\$[^$]*\$",          # code, formulas
             r"\[[^\]]*\]\([^)]*\)", r"et al\.\s+\d+",                        # links and papers
             r"\b(?:16|32) bits", r"About\s+\d+\s+minutes",                       # formats, times to read
             r"^#+ \d+\.", r"^\d+\. ", r"## Try it.*",                          # headings, lists, questions
             r"\b(?:walkthrough|lab|section|equation|figure|table|takeaway|rule|stage|rank|head|replica|position|layer)"
             r"s?\s+\d+(?:,? (?:and |to )?\d+)*"]                               # names of things
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def numbers(text: str) -> set[str]:
    return {number.rstrip(",").replace(",", "") for number in NUMBER.findall(text)}


@pytest.mark.parametrize("source", sources([]), ids=lambda path: path.stem)
def test_a_number_in_prose_stands_in_a_cell_or_in_its_output(source):
    """All that are larger than 10. What a cell does not take as given it asserts, or it shows it."""
    cells = jupytext.read(source).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code").replace("_", "")
    known = numbers(code) | numbers(output_text(source.stem)) | OF_OTHERS.get(source.stem, set())
    for cell in cells:
        if cell.cell_type == "markdown":
            prose = cell.source
            for pattern in NO_CLAIMS:
                prose = re.sub(pattern, " ", prose, flags=re.DOTALL | re.MULTILINE | re.IGNORECASE)
            claims = {number for number in numbers(prose) if "." in number or int(number) > 10}
            assert claims <= known, f"{claims - known} of:\n{cell.source}"
