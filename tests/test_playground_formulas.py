"""Two pages of the playground: a rank's memory and traffic by formulas, and the MLP of two ranks in numbers."""
from collections.abc import Mapping
from random import Random
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
from hypothesis import given, strategies as st

from docs.playground import mlp, ranks
from reference.errors import UserError
from tests.browser import DESK, PHONE, complaints_of, open_browser
from tests.mpi_impl.test_pretrain import LLAMAS
from tools import playground

RANDOM = Random(46)


def settings_from(choose) -> dict[str, str]:
    """Choose settings that go together."""
    model = choose(list(ranks.PRESETS.values()))
    t, d, c, b = (choose(sizes) for sizes in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2)))
    numbers = {"t": t, "p": choose((1, 2, 3, 8)), "d": d, "c": c, "e": choose((1, d * c)) if model["E"] != "0" else 1,
               "zero": choose(range(4)), "b": b, "B": b * d * choose((1, 3, 20)), "w": choose((2, 4, 8))}
    e_fits = int(model["E"]) % numbers["e"] == 0
    numbers |= {"e": numbers["e"] if e_fits else 1}
    return model | {name: str(value) for name, value in numbers.items()} | {
        "sequence": choose(("no", "yes") if t > 1 else ("no",)), "recompute": choose(("none", "selective", "full"))}


# ---- memory and traffic ---------------------------------------------------------------------------------------------


def as_number(text: str) -> float:
    """Compute a formula with its numbers put in."""
    for printed, python in {"·": "*", "−": "-", ",": "", "²": "**2"}.items():
        text = text.replace(printed, python)
    return eval(text)


@given(st.data())
def test_each_formula_with_its_numbers_is_what_the_planner_computes(data):
    state = settings_from(lambda choices: data.draw(st.sampled_from(choices)))
    plan, found = ranks.plan_of(state), ranks.costs(state)
    values = {part["name"]: part["value"] for part in found["memory"] + found["traffic"]}
    assert values.items() >= (plan.memory._asdict() | plan.messages._asdict() | plan.exchanges._asdict()).items()
    for part in found["memory"] + found["traffic"] + found["size"]:
        assert as_number(part["numbers"]) == pytest.approx(part["value"], rel=1e-6, abs=8), part["name"]


def test_the_models_have_as_many_parameters_as_published():
    found = {name: ranks.parameters(ranks.model_of(state)) for name, state in ranks.PRESETS.items()}
    assert round(found.pop("GPT-3 175B") / 1e9) == 175
    assert found == {name: LLAMAS[name.lower().replace(" ", "-").replace("llama-", "llama")] for name in found}


WRONG = [{"t": "5"}, {"t": "0"}, {"t": "1"}, {"p": "97"}, {"d": "7"}, {"c": "3"}, {"e": "2"}, {"h": "12289"}, {"g": "7"},
         {"E": "1"}, {"B": "1537"}, {"L": ""}, {"s": "2.5"}, {"V": "99999999999"}]


# ---- the MLP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", mlp.first_answers())
def test_numbers_are_those_of_an_mlp_and_each_missing_operator_makes_each_rank_wrong(draw):
    """Without g the output is wrong and nothing else; without f the input's gradient is. Weights' gradients are right."""
    x, dy, A, B, *_ = map(np.array, draw["whole"].values())
    z = x @ A
    right = {"y": np.maximum(z, 0) @ B, "dx": (dy @ B.T * (z > 0)) @ A.T, "dA": x.T @ (dy @ B.T * (z > 0)),
             "dB": np.maximum(z, 0).T @ dy}
    assert all((right[name] == draw["whole"][name]).all() for name in right)
    for switches, both in draw["columns"].items():
        assert all((right["dx"] == rank["dx"]).all() == (switches[0] == "1") for rank in both)
        assert all((right["y"] == rank["y"]).all() == (switches[1] == "1") for rank in both)
        assert (np.hstack([rank["dA"] for rank in both]) == right["dA"]).all()
        assert (np.vstack([rank["dB"] for rank in both]) == right["dB"]).all()
    assert (right["y"] == draw["rows"]["y_after"]).all() and (right["y"] != draw["rows"]["y_before"]).any()


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "playground"
    playground.build(folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser, folder):
    """Open the page of formulas from disk, and wait for Python."""
    if not (folder / "runtime").exists():
        pytest.skip("Pyodide is not here, and npm cannot fetch it")
    page = browser.new_page(viewport=PHONE)
    complaints = complaints_of(page)
    page.goto((folder / "ranks.html").as_uri())
    page.wait_for_selector("#loading", state="detached", timeout=300_000)
    yield page
    assert not complaints


def shown(page) -> Mapping[str, float]:
    """Return the bytes that the page shows, by name, but for the total."""
    return dict(page.locator(".costs li:not([data-name=total])").evaluate_all(
        "all => all.map(({dataset}) => [dataset.name, Number(dataset.value)])"))


def expected(state) -> Mapping[str, float]:
    found = ranks.costs(state)
    return {part["name"]: part["value"] for part in found["memory"] + found["size"] + found["traffic"]}


def ask(page, state) -> None:
    page.evaluate("async state => { show(state); await ask(); }", state)


def test_the_page_shows_the_numbers_of_python(page):
    assert shown(page) == expected(ranks.START)
    for state in (settings_from(RANDOM.choice) for _ in range(12)):
        ask(page, state)
        assert shown(page) == pytest.approx(expected(state), rel=1e-12), state
        assert page.locator("#costs").is_visible() and not page.locator("#refusal").is_visible()
        for part in ranks.costs(state)["traffic"]:
            assert part["numbers"] in page.locator(f"#traffic li[data-name={part['name']}]").text_content()


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_settings_that_do_not_go_together_show_the_sentence(page, changes):
    with pytest.raises(UserError) as failure:
        ranks.costs(ranks.START | changes)
    ask(page, ranks.START | changes)
    assert page.locator("#refusal").text_content() == str(failure.value)
    assert page.locator("#refusal").is_visible() and not page.locator("#costs").is_visible()


def test_it_works_by_keyboard_and_the_address_holds_the_state(page):
    ask(page, ranks.START)
    page.locator("[name=model]").focus()
    page.keyboard.press("ArrowDown")
    page.locator("[name=zero]").focus()
    page.keyboard.press("3")
    page.get_by_label("p, pipeline").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("4")
    state = ranks.START | ranks.PRESETS["Llama-3 8B"] | {"zero": "3", "p": "4"}
    wait_for(page, state)
    assert page.evaluate("currentState()") == dict(parse_qsl(page.evaluate("location.hash.slice(1)"))) == state
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.evaluate("state => { location.hash = state; }", urlencode(ranks.START))
    wait_for(page, ranks.START)
    assert page.locator("[name=model]").input_value() == "GPT-3 175B"


def wait_for(page, state) -> None:
    """Wait until the page shows the numbers of these settings."""
    numbers = expected(state)
    page.wait_for_function("value => document.querySelector('[data-name=parameters]').dataset.value == value",
                           arg=numbers["parameters"])
    assert shown(page) == pytest.approx(numbers, rel=1e-12)


@pytest.mark.parametrize("name", ["ranks", "mlp"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_phones_and_desks(browser, folder, name, scheme):
    for size in PHONE, DESK:
        page = browser.new_page(viewport=size, color_scheme=scheme)
        complaints = complaints_of(page)
        page.goto((folder / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.locator("table.matrix, .costs li").count() > 10
        page.close()
        assert not complaints


MATRICES = """all => all.map(table => [table.caption.textContent, [...table.rows].map(row => [...row.cells].map(
    cell => Number(cell.firstChild.textContent.replace("−", "-")))), table.querySelectorAll(".wrong .mark").length])"""


def test_the_mlp_shows_the_textbooks_numbers_and_marks_the_wrong_ones(browser, folder):
    page = browser.new_page(viewport=PHONE)
    page.goto((folder / "mlp.html").as_uri())
    for number, draw in enumerate(mlp.first_answers()):
        page.locator("[name=draw]").select_option(str(number))
        for f, g in ((1, 1), (1, 0), (0, 0), (0, 1)):
            for name, on in (("f", f), ("g", g)):
                button = page.get_by_role("button", name=f"{name} is")
                if button.get_attribute("aria-pressed") != str(bool(on)).lower():
                    button.focus()
                    page.keyboard.press("Space")
            found, both = page.locator("table.matrix").evaluate_all(MATRICES), draw["columns"][f"{f}{g}"]
            for name, on, end in (("y", g, "g"), ("dx", f, "f")):
                says = f"{name}, after {end}: all-reduce" if on else f"{name}, without {end}"
                wrong = [np.sum(np.array(rank[name]) != draw["whole"][name]) for rank in both]
                assert [table[1:] for table in found if table[0] == says] == [
                    [rank[name], n] for rank, n in zip(both, wrong, strict=True)]
                verdict = (f"✓ {name} is correct on both ranks." if on else
                           f"✗ {name} is wrong: {wrong[0]} of 16 numbers on rank 0, {wrong[1]} on rank 1.")
                assert verdict in page.locator("#verdict").text_content()
            assert [table[1] for table in found if table[0] in ("dA", "dB")] == [
                rank[name] for rank in both for name in ("dB", "dA")]
        for split, wrong in (("before", True), ("after", False)):
            page.locator("[name=split]").select_option(split)
            ys = [table for table in page.locator("table.matrix").evaluate_all(MATRICES) if table[0].startswith("y,")]
            assert [y[1] for y in ys] == 2 * [draw["rows"][f"y_{split}"]] and all(bool(y[2]) == wrong for y in ys)
            assert ("✗" in page.locator("#verdict").text_content()) == wrong
            assert page.get_by_role("button", name="f is").is_disabled()
        page.locator("[name=split]").select_option("columns")
    page.close()
