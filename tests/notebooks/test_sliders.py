"""The sliders: their tables are what Python computes, and in a browser they show it, with nothing else loaded."""
import re

import pytest
from hypothesis import assume, given, strategies as st

from reference.errors import UserError
from reference.schedules.generators import make, takes_v
from reference.schedules.simulate import activations_in_flight
from shardlab.notebook.pictures.pipelines import play
from shardlab.notebook.plan import plan
from shardlab.notebook.sliders import explore, explore_schedules, plans, schedules
from tests.browser import complaints_of, open_browser


def one_of(controls):
    return given(**{name: st.sampled_from(values) for name, values in controls.items()})



LENGTH = {"F": 1, "I": 1, "W": 1, "B": 2}


@one_of(schedules.CONTROLS)
def test_a_timeline_is_that_of_the_simulator(schedule, p, m, v):
    """Decoded as the script does it: every action of every rank, its start and its end; and what a rank holds."""
    v = v if takes_v(schedule) else None
    try:
        made = make(schedule, p, m, v)
    except UserError:
        assume(False)
    rows, most = schedules.encode(made).split("|")
    unit, placement = p / made.stages, made.placement()
    for row, spans, stages in zip(rows.split("/"), play(made).ranks, placement, strict=True):
        now, found = 0, []
        for idle, kind, stage, microbatch in re.findall(r"(\d*)([FBIW])(\d)(\w)", row):
            now += int(idle or 0)
            found.append((stages[int(stage)], kind, int(microbatch, 36), now, now + LENGTH[kind]))
            now += LENGTH[kind]
        assert found == [(*action, round(start / unit, 9), round(end / unit, 9)) for action, start, end in spans]
    assert most == ",".join(map(str, activations_in_flight(made)))


@one_of(plans.CONTROLS)
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


@pytest.fixture(scope="module")
def pages():
    return explore()._repr_html_(), explore_schedules()._repr_html_()


@pytest.mark.deep
def test_pages_load_nothing(pages):
    assert not re.search(r"https?:|src=|import", "".join(pages))


@pytest.mark.parametrize("wrong", [{"b": 2}, {"p": 3}])
def test_a_slider_or_value_that_there_is_not(wrong):
    with pytest.raises(UserError, match="The slider p has no 3|no slider b"):
        explore_schedules(**wrong)


# ---- in a browser ----


@pytest.fixture(scope="module")
def boxes(pages, tmp_path_factory):
    """Show both pages in a browser, from a file, and return their boxes; nothing may go wrong."""
    file = tmp_path_factory.mktemp("sliders") / "page.html"
    file.write_text("<!doctype html><meta charset=utf-8>" + "".join(pages))
    with open_browser() as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
        page.goto(file.as_uri())
        yield [page.locator(".shardlab-sliders").nth(i) for i in range(2)]
        assert not complaints


def move(box, controls, **values) -> str:
    """Move sliders, and return the sentence that is shown then."""
    for name, value in values.items():
        slider, place = box.locator(f"[name={name}]"), str(controls[name].index(value))
        if slider.get_attribute("type") == "range":
            slider.fill(place)
        else:
            slider.select_option(place)
    return box.locator("p").inner_text()


@pytest.mark.deep
def test_the_browser_shows_the_plan_at_which_the_sliders_stand(boxes):
    box, _ = boxes
    for moved in {}, {"p": 8, "zero_stage": 1}, {"p": 8, "v": 2, "sequence_parallel": True}, {"model": "7.5B"}:
        right = plan(**plans.START | moved)
        said = move(box, plans.CONTROLS, **plans.START | moved)
        assert [float(number) for number in re.findall(r"[\d.]+(?= GB| %)", said)] == pytest.approx(
            [sum(right.memory) / 1e9, sum(right.messages) / 1e9, 100 * right.timeline.bubble_fraction], abs=0.2)
        assert box.locator("svg rect").count() > 8
    assert "every stage needs one" in move(box, plans.CONTROLS, p=64) and box.locator("svg").count() == 0


@pytest.mark.deep
def test_the_browser_draws_a_box_with_its_number_for_each_action(boxes):
    _, box = boxes
    for name, m in ("1f1b", 8), ("zb-v", 6), ("zb-v", 3), ("interleaved", 8):
        said = move(box, schedules.CONTROLS, schedule=name, m=m)
        made = make(name, 4, m, 2 if takes_v(name) else None)
        kinds = len({action.kind for rank in made.ranks for action in rank})
        for drawn in "rect", "text":
            assert box.locator(f"svg {drawn}").count() == sum(map(len, made.ranks)) + 4 + kinds
        assert f"makespan {play(made).makespan:g}," in said
    assert "multiple of 4" in move(box, schedules.CONTROLS, m=7)
