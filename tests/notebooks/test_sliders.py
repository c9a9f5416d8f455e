"""The sliders: their tables are what Python computes, and in a browser they show it, with nothing else loaded."""
import json
import re

import nbformat
import pytest
from hypothesis import assume, given, strategies as st

from mpi_impl.notebook.pictures.pipelines import play
from mpi_impl.notebook.plan import plan
from mpi_impl.notebook.sliders import explore, explore_schedules, plans, schedules
from reference.errors import UserError
from reference.schedules.generators import make, takes_v
from reference.schedules.simulate import activations_in_flight
from tests.browser import complaints_of, open_browser
from tools.notebooks import FOLDER

ONE_OF = {name: st.sampled_from(values) for name, values in schedules.CONTROLS.items()}


@pytest.fixture(scope="module")
def pages():
    return {"plan": explore(**PLAN), "schedule": explore_schedules(**SCHEDULE)}


PLAN = {"model": "39.1B", "t": 2, "p": 8, "d": 4, "v": 1, "m": 16, "zero_stage": 0, "sequence_parallel": False}
SCHEDULE = {"schedule": "zb-v", "p": 4, "m": 6, "v": 2}
LENGTH = {"F": 1, "I": 1, "W": 1, "B": 2}


@given(**ONE_OF)
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


@pytest.mark.parametrize("name, draw", [("08_pipelines", "schedule"), ("12_choosing_t_p_d_b", "plan")])
def test_a_stored_notebook_holds_them_after_a_picture(name, draw):
    """With nothing to load; and where no script may run, a picture and a sentence remain."""
    outputs = [cell.outputs for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
               if cell.cell_type == "code"]
    place, = (i for i, shown in enumerate(outputs) if any("text/html" in one.get("data", {}) for one in shown))
    assert any("image/png" in one.get("data", {}) for one in outputs[place - 1])
    html = outputs[place][0].data["text/html"]
    assert outputs[place][0].data["text/plain"] == "Sliders, where JavaScript may run."
    assert "Sliders, where JavaScript may run: " in html and not re.search(r"https?:|src=|import", html)
    assert json.loads(html[html.index('shardlabSliders({"') + 16:html.rindex(");")])["draw"] == draw


@pytest.mark.parametrize("make_page, wrong, sentence", [
    (explore, {"b": 2}, "no slider b. There are model, t,"),
    (explore_schedules, {"p": 3}, "The slider p has no 3. It has 2, 4, 8.")])
def test_a_start_that_there_is_not(make_page, wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        make_page(**wrong)


# ---- in a browser ----


@pytest.fixture(scope="module")
def shown(pages, tmp_path_factory):
    """Show both pages in a browser, from a file, and return them; nothing may go wrong."""
    file = tmp_path_factory.mktemp("sliders") / "page.html"
    file.write_text("<!doctype html><meta charset=utf-8>" + "".join(page._repr_html_() for page in pages.values()))
    with open_browser() as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
        page.goto(file.as_uri())
        yield dict(zip(pages, (page.locator(".shardlab-sliders").nth(i) for i in range(2))))
        assert not complaints


def move(box, name, value, controls):
    slider, place = box.locator(f"[name={name}]"), str(controls[name].index(value))
    if slider.get_attribute("type") == "range":
        slider.fill(place)
    else:
        slider.select_option(place)


@pytest.mark.deep
def test_the_browser_shows_the_plan_at_which_the_sliders_stand(shown):
    box, status = shown["plan"], shown["plan"].locator("p")
    for moved in {}, {"t": 4}, {"zero_stage": 1}, {"sequence_parallel": True}, {"v": 2}, {"model": "7.5B"}:
        for name, value in (PLAN | moved).items():
            move(box, name, value, plans.CONTROLS)
        right = plan(**PLAN | moved)
        held, sent = sum(right.memory) / 1e9, sum(right.messages) / 1e9
        told = [float(number) for number in re.findall(r"[\d.]+(?= GB| %)", status.inner_text())]
        assert told == pytest.approx([held, sent, 100 * right.timeline.bubble_fraction], abs=0.2)
        assert box.locator("svg rect").count() > 8
    move(box, "p", 64, plans.CONTROLS)
    assert "every stage needs one: choose a smaller p or v" in status.inner_text() and box.locator("svg").count() == 0


@pytest.mark.deep
def test_the_browser_draws_a_box_with_its_number_for_each_action(shown):
    box, status = shown["schedule"], shown["schedule"].locator("p")
    for moved in {}, {"m": 3}, {"schedule": "1f1b"}, {"schedule": "interleaved", "m": 8}:
        chosen = SCHEDULE | moved
        for name in "schedule", "m":
            move(box, name, chosen[name], schedules.CONTROLS)
        made = make(chosen["schedule"], 4, chosen["m"], 2 if takes_v(chosen["schedule"]) else None)
        actions = sum(map(len, made.ranks))
        kinds = len({action.kind for rank in made.ranks for action in rank})
        assert box.locator("svg rect").count() == actions + 4 + kinds
        assert box.locator("svg text").count() == actions + 4 + kinds
        assert f"makespan {play(made).makespan:g}," in status.inner_text()
    move(box, "m", 7, schedules.CONTROLS)
    assert "no multiple of 4" in status.inner_text()
