"""The cheat sheet: each formula is what its function of reference/ computes, and all of it prints on two pages."""
import re
from pathlib import Path
from random import Random

import pytest

from course.quizzes.exam import FUNCTIONS
from reference.config import ModelConfig
from tests.browser import open_browser

SHEET = Path(__file__).parents[1] / "cheat_sheet.html"
FORMULAS = re.findall(r'<b data-is="(.+?)">(.+?)</b>', SHEET.read_text())


def as_python(formula: str) -> str:
    """Return a formula as it is printed, with its products and powers written out."""
    for printed, python in {"<sup>": "**(", "</sup>": ")", "²": "**2", "·": "*", "−": "-", ",": ""}.items():
        formula = formula.replace(printed, python)
    return re.sub(r"(?<=[\w)])(?=[^\W\d]|\()", "*", formula)


@pytest.mark.parametrize("function, formula", FORMULAS)
@pytest.mark.parametrize("seed", range(3))
def test_a_formula_is_what_its_function_computes(function, formula, seed):
    random = Random(seed)
    values = {letter: random.randint(2, 9) for letter in "bsvLVNnΨwgKdBCTPXαβτFI"}
    values |= {"t": 4, "a": 8, "h": 8 * random.randint(1, 9), "p": 5, "m": random.randint(40, 60), "r": 2, "W": 1.5,
               "k": random.choice((4, 8))}
    values["c"] = ModelConfig(values["L"], values["h"], values["a"], values["V"], values["s"])
    assert eval(as_python(formula), values) == pytest.approx(eval(function, FUNCTIONS | values), rel=2e-3)


@pytest.mark.parametrize("size", ["A4", "Letter"])
def test_it_prints_on_two_pages(size):
    assert len(FORMULAS) > 50
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(SHEET.as_uri())
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(format=size, prefer_css_page_size=False))) == 2
