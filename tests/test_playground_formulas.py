"""Two pages of the playground: a rank's memory and traffic by formulas, and the MLP of two ranks in numbers."""
import re
from urllib.parse import parse_qsl, urlencode

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from docs.playground import mlp, ranks
from reference.errors import UserError
from tests.browser import DESK, PHONE, complaints_of
from tests.mpi_impl.test_pretrain import LLAMAS
from tests.test_playground import browser, folder  # noqa: F401  fixtures


@st.composite
def states(draw):
    """Draw settings that go together."""
    model, t, d, b = (draw(st.sampled_from(some)) for some in (list(ranks.PRESETS), (1, 2, 8), (2, 4), (1, 2)))
    choices = {"p": (1, 2, 3, 8), "c": (1, 2, 4), "e": (1, 2) if "x" in model else (1,), "zero": range(4),
               "w": (2, 4, 8), "sequence": ("no", "yes") if t > 1 else ("no",),
               "recompute": ("none", "selective", "full"), "B": (b * d, 60 * b * d)}
    chosen = {name: draw(st.sampled_from(some)) for name, some in choices.items()} | {"t": t, "d": d, "b": b}
    return ranks.PRESETS[model] | {name: str(value) for name, value in chosen.items()}


def expected(state) -> dict[str, float]:
    found = ranks.costs(state)
    return {part["name"]: part["value"] for part in found["memory"] + found["traffic"]}


def as_number(text: str) -> float:
    """Compute a formula with its numbers put in."""
    return eval(text.translate(str.maketrans({"·": "*", "−": "-", ",": ""})))


@given(states())
def test_each_formula_with_its_numbers_is_what_the_planner_computes(state):
    plan, found = ranks.plan_of(state), ranks.costs(state)
    costs = plan.memory._asdict() | plan.messages._asdict() | plan.exchanges._asdict()
    assert expected(state).items() >= costs.items()
    for part in found["memory"] + found["traffic"]:
        assert as_number(part["numbers"]) == pytest.approx(part["value"], rel=1e-6), part["name"]


def test_the_models_have_as_many_parameters_as_published():
    for name, state in ranks.PRESETS.items():
        published = LLAMAS.get(re.sub(r"^llama-|\W", lambda found: found[0][:-1] or "-", name.lower()), 174_615_846_912)
        assert ranks.parameters(ranks.model_of(state)) == published, name


@pytest.mark.parametrize("draw", mlp.first_answers())
def test_an_operator_that_is_missing_makes_every_rank_wrong(draw):
    """Without g the output is wrong, without f the input's gradient; those of weights need no message."""
    x, dy, A, B = (np.array(draw["whole"][name]) for name in ("x", "dy", "A", "B"))
    dz = dy @ B.T * (x @ A > 0)
    right = {"y": np.maximum(x @ A, 0) @ B, "dx": dz @ A.T, "dA": x.T @ dz, "dB": np.maximum(x @ A, 0).T @ dy}
    assert all((right[name] == draw["whole"][name]).all() for name in right)
    for switches, both in draw["columns"].items():
        for name, is_on in zip(("dx", "y"), switches):
            assert all((right[name] == rank[name]).all() == (is_on == "1") for rank in both)
        assert (np.hstack([rank["dA"] for rank in both]) == right["dA"]).all()
        assert (np.vstack([rank["dB"] for rank in both]) == right["dB"]).all()
    assert all((right["y"] != rank["y"]).any() for rank in draw["rows"])


@given(st.sampled_from(list(ranks.START)), st.sampled_from(["x", "", "9" * 400, "9" * 5000]))
def test_whatever_a_link_holds_gets_a_short_sentence(name, value):
    with pytest.raises(UserError, match="(?s)^.{9,500}$"):
        ranks.costs(ranks.START | {name: value})


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(browser, folder):  # noqa: F811
    """Open the page of formulas from disk, and wait for Python."""
    page = browser.new_page(viewport=PHONE)
    complaints = complaints_of(page)
    page.goto((folder / "ranks.html").as_uri())
    page.wait_for_selector("#loading", state="detached", timeout=300_000)
    yield page
    assert not complaints


def ask(page, state) -> None:
    page.evaluate("async state => { show(state); await ask(); }", state)


def check(page, state) -> None:
    """Check that the page shows Python's numbers and formulas."""
    shown = page.locator(".costs li:not([data-name=total])").evaluate_all(
        "all => Object.fromEntries(all.map(({dataset}) => [dataset.name, Number(dataset.value)]))")
    assert shown == pytest.approx(expected(state), rel=1e-12) and page.locator("#costs").is_visible()
    formulas = page.locator(".formula").all_text_contents()
    found = ranks.costs(state)
    assert formulas == [f"{part['text']} = {part['numbers']}" for part in found["memory"] + found["traffic"]
                        if part["text"] != "0"]


@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(states())
def test_the_page_shows_the_numbers_of_python(page, state):
    ask(page, state)
    check(page, state)


WRONG = [{"t": "5"}, {"t": "0"}, {"t": "1"}, {"p": "97"}, {"c": "3"}, {"e": "2"}, {"B": "1537"}, {"L": ""},
         {"kind": "x"}]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_settings_that_do_not_go_together_show_the_sentence(page, changes):
    ask(page, ranks.START | changes)
    with pytest.raises(UserError) as failure:
        ranks.costs(ranks.START | changes)
    assert page.locator("#refusal:visible").text_content() == str(failure.value)
    assert not page.locator("#costs").is_visible()


def test_it_works_by_keyboard_and_the_address_holds_the_state(page):
    ask(page, ranks.START)
    for name, key in (("model", "ArrowDown"), ("zero", "3"), ("p", "Control+A"), ("p", "4")):
        page.locator(f"[name={name}]").press(key)
    state = ranks.START | ranks.PRESETS["Llama-3 8B"] | {"zero": "3", "p": "4"}
    for wanted in state, ranks.START:
        page.wait_for_function("value => document.querySelector('[data-name=parameters]').dataset.value == value",
                               arg=expected(wanted)["parameters"])
        check(page, wanted)
        assert page.evaluate("currentState()") == dict(parse_qsl(page.evaluate("location.hash.slice(1)"))) == wanted
        page.evaluate("state => { location.hash = state; }", urlencode(ranks.START))


@pytest.mark.parametrize("name", ["ranks", "mlp"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_phones_and_desks(browser, folder, name, scheme):  # noqa: F811
    for size in PHONE, DESK:
        page = browser.new_page(viewport=size, color_scheme=scheme)
        complaints = complaints_of(page)
        page.goto((folder / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        assert page.locator("table.matrix, .costs li").count() > 10 and not complaints
        page.close()


MATRICES = """all => all.map(table => [table.caption.textContent, [...table.rows].map(row => [...row.cells].map(
    cell => Number(cell.firstChild.textContent.replace("−", "-")))), table.querySelectorAll(".wrong .mark").length])"""


def test_the_mlp_shows_the_textbooks_numbers_and_marks_the_wrong_ones(browser, folder):  # noqa: F811
    page = browser.new_page(viewport=PHONE)
    page.goto((folder / "mlp.html").as_uri())
    switched = "11"
    for number, draw in enumerate(mlp.first_answers()):
        page.locator("[name=draw]").select_option(index=number)
        for switches in "11", "10", "00", "01", "11":
            for name, before, now in zip("fg", switched, switches):
                if before != now:
                    page.locator(f"[name={name}]").press("Space")
            switched, said = switches, page.locator("#verdict").text_content()
            found, both = page.locator("table.matrix").evaluate_all(MATRICES), draw["columns"][switches]
            assert [rows for name, rows, _ in found if name in ("dA", "dB")] == [
                rank[name] for rank in both for name in ("dB", "dA")]
            for name, is_on in zip(("dx", "y"), switches):
                wrong = [int(np.sum(np.array(rank[name]) != draw["whole"][name])) for rank in both]
                assert [table[1:] for table in found if table[0].startswith(f"{name}, ") and "partial" not in table[0]
                        ] == [[rank[name], n] for rank, n in zip(both, wrong)]
                assert (f"✓ {name} is correct on both ranks." if is_on == "1" else
                        f"✗ {name} is wrong: {wrong[0]} of 16 numbers on rank 0, {wrong[1]} on rank 1.") in said
        page.locator("[name=split]").select_option("rows")
        *_, (_, rows, wrong) = page.locator("table.matrix:visible").evaluate_all(MATRICES)
        assert rows == draw["rows"][1]["y"] and wrong == np.sum(np.array(rows) != draw["whole"]["y"])
        assert "✗ y is wrong" in page.locator("#verdict").text_content() and not page.locator("[name=f]").is_visible()
        page.locator("[name=split]").select_option("columns")
    page.close()
