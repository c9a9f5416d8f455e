"""The page of a run in a real browser, opened from disk: played, stepped, scrubbed, clicked, by mouse and by keyboard.

It needs playwright (from PyPI) and the system's Chromium, as `apt-get install chromium` brings it.
"""
import json
import re

import pytest

from shardlab.demos import train
from tests.browser import open_browser


@pytest.fixture(scope="module")
def browser():
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(ranks, tmp_path_factory):
    """Write the page of a demo on eight ranks, t = p = d = 2."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    ranks.run(8, train.show, ["--train-iters", "3", "--report", str(file)], timeout=120)
    return file


@pytest.fixture
def page(browser, report):
    """Open the page, and fail the test if it complains, or asks for anything but itself."""
    problems, requests = [], []
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(report.as_uri())
    yield page
    page.close()
    assert problems == [] and set(requests) <= {report.as_uri(), "data:,"}


def data_of(page) -> dict:
    return json.loads(page.locator("#data").text_content())


def time_of(page) -> float:
    """Return the player's time, in ms."""
    return float(re.match(r"([\d.]+) ms of", page.locator("#time").text_content())[1])


def test_the_page_shows_the_runs_numbers(page):
    """The last loss, all ranks, every line of the ledger, and each line of the summary."""
    data = data_of(page)
    assert page.locator("h1").text_content() == "A tiny GPT on 8 ranks" and "A tiny GPT on 8 ranks" in page.title()
    assert page.locator("#summary .big").all_text_contents() == [
        f"{data['losses']['training'][-1][1]:.4f}", "= as predicted", "= as predicted"]
    assert page.locator("#grid .rank b").all_text_contents() == [f"rank {r}" for r in (0, 1, 4, 5, 2, 3, 6, 7)]
    cells = [row.split("\t") for row in page.locator("#ledger tbody").inner_text().split("\n")]
    assert [(row[2], row[4], row[6]) for row in cells] == [
        (one["reason"], f"{one['calls']:,}", f"{one['ring_bytes']:,.0f}") for one in data["ledger"]]
    assert {row[8] for row in cells} == {"="}
    assert page.locator("#text").text_content() == data["text"]


def test_it_steps_from_event_to_event(page):
    """All events, in order; at the ends of actions and at arrivals. On the way each message is seen under way."""
    data = data_of(page)["player"]
    times = {0, data["end"], *(at for one in data["ranks"] for a in one["actions"] for at in a[1:]),
             *(at for one in data["messages"] for at in one[3:5])}
    seen, listed = [0.0], set()
    for _ in range(len(times) - 1):
        page.click("#next")
        seen.append(time_of(page))
        listed.update(page.locator("#messages li").all_text_contents())
    assert seen == pytest.approx([at / 1e3 for at in sorted(times)], abs=0.0051)
    for source, to, name, sent, arrived, _ in data["messages"]:
        words = rf"(activation|gradient) {name}, .*: rank {source} → rank {to}, "
        assert arrived <= sent or any(re.match(words + "under way", line) for line in listed)
    page.click("#back")
    assert time_of(page) < data["end"] / 1e3
    assert "ms: " in page.locator("#status").text_content()


def test_an_action_is_explained_by_a_click_and_by_the_keyboard(page):
    """Its shapes, its samples, and files. Arrow keys go from action to action and from rank to rank."""
    actions = page.locator(".action")
    actions.first.click()
    details = page.locator("#details")
    assert "forward of stage 0, microbatch 0, on rank 0" in details.inner_text()
    assert "tokens [1, 6]" in details.inner_text() and "mpi_impl/layers/attention.py" in details.inner_text()
    actions.first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("rank 1: ")
    page.keyboard.press("Enter")
    assert label.split(", ")[1] in details.inner_text() and "on rank 1" in details.inner_text()
    assert page.locator(".action[tabindex='0']").count() == 1        # one stop for the Tab key
    before = page.locator("#play").text_content()
    page.keyboard.press(" ")
    assert page.locator("#play").text_content() != before            # it plays
    page.keyboard.press("Home")
    page.locator("#slider").focus()
    page.keyboard.press("End")
    assert time_of(page) == pytest.approx(data_of(page)["player"]["end"] / 1e3, abs=0.01)
    page.keyboard.press("ArrowLeft")
    assert time_of(page) < data_of(page)["player"]["end"] / 1e3


def test_every_control_has_a_name(page):
    """Screen readers can tell each button, list and region."""
    unnamed = page.evaluate("""[...document.querySelectorAll("button, select, input, [role=button], [role=region]")]
        .filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.length ||
                         one.getAttribute("aria-labelledby"))).length""")
    assert unnamed == 0
