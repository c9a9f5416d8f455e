"""The sliders of a plan: their tables are what Python computes, and a browser shows it, with nothing else loaded."""
import re

import pytest
from hypothesis import assume, given, strategies as st

from reference.errors import UserError
from shardlab.notebook.plan import plan
from shardlab.notebook.sliders import explore, plans
from tests.browser import complaints_of, open_browser


@given(**{name: st.sampled_from(values) for name, values in plans.CONTROLS.items()})
def test_the_tables_of_a_plan_add_up_to_it(model, t, p, d, v, m, zero_stage, sequence_parallel):
    """As the script adds them up; and where there is no plan, they hold a sentence in the sliders' letters."""
    assume(p * v * m <= 512)        # longer pipelines take long to simulate
    costs = plans.rank_costs(model, t, p, v, sequence_parallel)
    pipe = plans.pipeline_costs(p, v, m)
    try:
        right = plan(model, t, p, d, v, m, zero_stage, sequence_parallel)
    except UserError as error:
        assert str(error) in (costs, pipe) and "--" not in str(error)
        return
    states = plans.state_bytes(zero_stage, d)
    held = [[*(share * costs[i] for share in states), costs[i + 1] * caches + costs[i + 2]]
            for i, caches in ((0, pipe[0]), (3, pipe[1]))]
    assert max(held, key=sum) == pytest.approx([size / 1e6 for size in right.memory], rel=0.01, abs=5)
    assert [costs[6] * m, costs[7] * m, costs[0] * plans.gradient_bytes(zero_stage, d, m)] == pytest.approx(
        [size / 1e6 for size in right.messages], rel=0.01, abs=m)
    assert pipe[2] == pytest.approx(right.timeline.bubble_fraction, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"b": 2}, {"p": 3}])
def test_a_slider_or_value_that_there_is_not(wrong):
    with pytest.raises(UserError, match="The slider p has no 3|no slider b"):
        explore(**wrong)


@pytest.mark.deep
def test_the_browser_shows_the_plan_at_which_the_sliders_stand(tmp_path):
    """From a file, with nothing loaded, and without a complaint."""
    html, file = explore()._repr_html_(), tmp_path / "page.html"
    assert not re.search(r"https?:|src=|import", html)
    file.write_text(f"<!doctype html><meta charset=utf-8>{html}")
    with open_browser() as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
        page.goto(file.as_uri())
        for moved in {}, {"p": 8, "zero_stage": 1}, {"p": 8, "v": 2, "sequence_parallel": True}, {"model": "7.5B"}:
            right = plan(**plans.START | moved)
            said = move(page, **plans.START | moved)
            assert [float(number) for number in re.findall(r"[\d.]+(?= GB| %)", said)] == pytest.approx(
                [sum(right.memory) / 1e9, sum(right.messages) / 1e9, 100 * right.timeline.bubble_fraction], abs=0.2)
            assert page.locator("svg rect").count() > 8
        assert "every stage needs one" in move(page, p=64) and page.locator("svg").count() == 0
    assert not complaints


def move(page, **values) -> str:
    """Move sliders, and return the sentence that is shown then."""
    for name, value in values.items():
        slider, place = page.locator(f"[name={name}]"), str(plans.CONTROLS[name].index(value))
        if slider.get_attribute("type") == "range":
            slider.fill(place)
        else:
            slider.select_option(place)
    return page.locator("p").inner_text()
