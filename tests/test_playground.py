"""The playground: what its pages show is what the textbook says, in a real browser, from disk and served."""
import contextlib
import io

import pytest
from hypothesis import given, strategies as st

from docs.playground import pipelines
from reference.errors import UserError
from reference.schedules.__main__ import main as print_schedule
from reference.schedules.actions import Schedule, from_csv
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.validate import ScheduleError, validate
from tests.browser import DESK, PHONE, complaints_of, open_browser, serve
from tools import playground


def state_of(name: str, p: int, m: int, v: int = 2) -> dict:
    return pipelines.DEFAULTS | {"schedule": name, "p": str(p), "m": str(m), "v": str(v)}


def print_of(state: dict, *options: str) -> str:
    """Return what `python -m reference.schedules` prints for a state."""
    v = ["-v", state["v"]] if takes_v(state["schedule"]) else []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_schedule(["--schedule", state["schedule"], "-p", state["p"], "-m", state["m"], *v, *options])
    return printed.getvalue()


@st.composite
def states(draw):
    """Draw a state whose schedule exists."""
    name, p, m = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return state_of(name, p, m * p if name == "interleaved" else m, draw(st.integers(1, 3)))


@given(states())
def test_an_answer_has_the_numbers_that_the_program_prints(state):
    answer, printed = pipelines.play(state), print_of(state)
    assert answer["csv"] == print_of(state, "--csv")
    assert f"idle / ideal time {answer['bubble']}, idle / longest span {answer['rate']}." in printed
    assert f"in flight on each rank: {' '.join(str(rank['peak']) for rank in answer['ranks'])}." in printed
    for rank in answer["ranks"]:
        assert rank["busy"] == f"{int(state['m']) * (1 if state['schedule'] == 'forward-only' else 3):.4g}"
        assert rank["memory"] == pytest.approx(rank["peak"] / len(rank["stages"].split()))
        assert rank["peak"] == max(held for *_, held in rank["actions"])


@given(states(), st.data())
def test_a_move_is_refused_by_the_validators_sentence_or_gives_a_valid_order(state, data):
    ranks = from_csv(pipelines.play(state)["csv"]).ranks
    rank = data.draw(st.integers(0, len(ranks) - 1))
    place, to = (data.draw(st.integers(0, len(ranks[rank]) - 1)) for _ in range(2))
    actions = list(ranks[rank])
    actions.insert(to, actions.pop(place))
    moved = Schedule(tuple(tuple(actions) if r == rank else ranks[r] for r in range(len(ranks))))
    answer = pipelines.move(state, rank, place, to)
    try:
        validate(moved)
    except ScheduleError as error:
        assert f"{answer['refusal']}\n{answer['table']}" == str(error)
        assert answer["marked"] and all(f">{name}<" in answer["table"] for name in answer["marked"])
    else:
        assert from_csv(answer["order"]) == moved
        assert pipelines.play(state | answer)["csv"] == answer["order"]


@pytest.mark.parametrize("wrong", [{"schedule": "x" * 5000}, {"p": "9" * 400}], ids=["schedule", "p"])
def test_long_input_gets_a_short_sentence(wrong):
    with pytest.raises(UserError, match="(?s)^.{9,500}$"):
        pipelines.play(pipelines.DEFAULTS | wrong)


def test_an_archive_with_other_contents_is_refused_and_fetched_anew_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(playground, "ARCHIVE", tmp_path / "archive.tgz")
    playground.ARCHIVE.write_bytes(b"something else")
    with pytest.raises(UserError, match="is not what it was"):
        playground.fetch()
    assert not playground.ARCHIVE.exists()


def test_sources_are_the_textbooks_and_need_no_numpy():
    files = playground.sources("pipelines")
    assert {"pipelines.py", "reference/schedules/validate.py", "reference/errors.py"} < set(files)
    assert all((playground.ROOT / path).read_text() == text for path, text in files.items() if "/" in path)
    assert not any("import numpy" in text for text in files.values())


# ---- in a browser ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request):
    """Build the pages. Deep tests may fetch Pyodide; others are skipped where nobody has."""
    if not playground.ARCHIVE.exists():
        if not request.config.getoption("deep"):
            pytest.skip("Pyodide is not there: ./run.sh docs fetches it")
        playground.fetch()
    folder = tmp_path_factory.mktemp("site") / "playground"
    playground.build(folder)
    return folder


@pytest.fixture(scope="module")
def page(browser, folder):
    """Open the page from disk, and wait for Python."""
    with opened(browser, folder.as_uri()) as page:
        yield page


@contextlib.contextmanager
def opened(browser, address: str, fragment: str = "", viewport=DESK):
    page = browser.new_page(viewport=viewport)
    page.set_default_timeout(120_000)
    complaints = complaints_of(page)
    page.goto(f"{address}/pipelines.html{fragment}")
    page.wait_for_selector("#loading", state="hidden")
    yield page
    page.close()
    assert not complaints


def fill(page, state: dict) -> None:
    page.select_option("[name=schedule]", state["schedule"])
    for name in ("p", "m", "v"):
        if page.locator(f"[name={name}]").is_enabled():
            page.fill(f"[name={name}]", state[name])


def wait_for_order(page, csv: str) -> None:
    """Wait until the page shows a schedule. Fails if it shows another one instead."""
    page.wait_for_function("""csv => document.getElementById("csv").value === csv
        && document.getElementById("picture").getAttribute("aria-busy") === "false" """, arg=csv)


def check(page, state: dict) -> None:
    """Check that the page shows what `python -m reference.schedules` prints."""
    wait_for_order(page, print_of(state, "--csv"))
    printed, summary = print_of(state), page.locator("#summary").text_content()
    assert summary.split("Its bubble: ")[1] in printed
    peaks = page.locator("#ranks tbody tr").evaluate_all("rows => rows.map(row => row.children[4].textContent)")
    assert f"in flight on each rank: {' '.join(peaks)}." in printed
    drawn = page.locator("[role=listbox]").evaluate_all("""ranks => ranks.map(rank =>
        [...rank.querySelectorAll("[role=option]")].map(one => one.ariaLabel.split(":")[0]))""")
    assert "".join(",".join(rank) + "\n" for rank in drawn) == print_of(state, "--csv")


def test_a_page_without_python_shows_what_the_build_computed_and_says_why(browser, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(playground, "ARCHIVE", tmp_path / "none.tgz")
    monkeypatch.setenv("PATH", str(tmp_path))
    playground.build(tmp_path / "pages")
    assert "npm" in capsys.readouterr().err
    for size in PHONE, DESK:
        page = browser.new_page(viewport=size)
        complaints = complaints_of(page)
        page.goto(f"{(tmp_path / 'pages').as_uri()}/pipelines.html")
        page.wait_for_function("document.getElementById('loading').textContent.includes('Install Node.js')")
        for name in SCHEDULES:
            page.select_option("[name=schedule]", name)
            check(page, pipelines.DEFAULTS | {"schedule": name})
        page.fill("[name=m]", "4")
        page.wait_for_selector("#picture[aria-busy=true]")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        page.close()
        assert not complaints


def test_the_page_computes_with_python_and_shows_the_textbooks_error(page):
    check(page, pipelines.DEFAULTS)
    fill(page, state := state_of("interleaved", 3, 6))
    check(page, state)
    page.fill("[name=m]", "7")
    with pytest.raises(UserError) as error:
        make("interleaved", 3, 7, 2)
    wait_for_refusal(page, str(error.value))
    fill(page, state := state_of("1f1b", 3, 4))
    check(page, state)
    page.fill("[name=link]", "0.5")
    takes = pipelines.play(state | {"link": "0.5"})["takes"]
    page.wait_for_function(f"document.getElementById('summary').textContent.startsWith('A step takes {takes}.')")


def wait_for_refusal(page, sentence: str) -> None:
    page.wait_for_function("words => document.querySelector('#refusal p')?.textContent === words", arg=sentence)


def focused(page) -> str:
    return page.evaluate("document.activeElement.ariaLabel || ''")


def test_the_keyboard_alone_moves_an_action_and_undoes_it(page):
    state = state_of("1f1b", 4, 8)
    page.goto(f"{page.url.split('#')[0]}#p=4")
    check(page, state)
    page.focus("[name=size]")
    while not focused(page).startswith("0F0:"):
        page.keyboard.press("Tab")
    for key in "ArrowDown", "End", "Home":
        page.keyboard.press(key)
    assert focused(page).startswith("1F0: stage 1, forward of microbatch 0; place 1 of rank 1; from 1 to 2;")
    order = pipelines.move(state, 1, 0, 1)["order"]
    page.keyboard.press("Shift+ArrowRight")
    wait_for_order(page, order)
    page.wait_for_function("moved.textContent.startsWith('1F0 is at place 2 of rank 1 now.')")
    assert focused(page).startswith("1F0: stage 1, forward of microbatch 0; place 2 of rank 1;")
    link = page.url
    page.keyboard.press("Shift+ArrowRight")
    wait_for_order(page, order := pipelines.move(state | {"order": order}, 1, 1, 2)["order"])
    page.keyboard.press("Shift+ArrowRight")     # 1B0 would come before it
    wait_for_refusal(page, "1B0 comes before 1F0, which it needs.")
    assert page.locator(".marked").evaluate_all("all => all.map(one => one.ariaLabel.split(':')[0])") == ["1F0", "1B0"]
    page.click("#undo")
    page.click("#undo")
    check(page, state)
    page.goto(link)
    wait_for_order(page, pipelines.move(state, 1, 0, 1)["order"])
    page.click("#reset")
    check(page, state)


def drag(page, name: str, to: str) -> None:
    """Drag an action by the pointer, to the place before another one."""
    ends = [page.locator(f"[aria-label^='{one}:']").bounding_box() for one in (name, to)]
    for end, (part, act) in zip(ends, ((0.5, page.mouse.down), (0.3, page.mouse.up))):
        page.mouse.move(end["x"] + part * end["width"], end["y"] + 10, steps=4)
        act()


def test_a_drag_is_refused_by_the_validators_sentence_or_changes_the_timeline(page):
    state = state_of("1f1b", 4, 8)
    page.goto(f"{page.url.split('#')[0]}#p=4")
    check(page, state)
    for name, to, rank, place, there in (("1F3", "1F0", 1, 4, 0), ("3B0", "3F0", 3, 1, 0), ("0F1", "0F3", 0, 1, 2),
                                         ("0F4", "0B0", 0, 5, 4)):
        answer = pipelines.move(state, rank, place, there)
        drag(page, name, to)
        if "refusal" in answer:
            wait_for_refusal(page, answer["refusal"])
        else:
            state |= answer
            wait_for_order(page, answer["order"])
    with page.expect_download() as download:
        page.click("#download")
    assert download.value.path().read_text() == state["order"]


def test_a_schedule_of_ones_own_is_shown_or_refused(page):
    own = print_of(state_of("zb-h1", 2, 3), "--csv")
    page.fill("#csv", own)
    page.click("#use")
    page.wait_for_function("order => location.hash.includes(`order=${order}`)",
                           arg=own.strip().replace(",", "_").replace("\n", "."))
    wait_for_order(page, own)
    page.fill("#csv", own.replace("1I0", "1W0"))
    page.click("#use")
    with pytest.raises(ScheduleError) as error:
        validate(from_csv(own.replace("1I0", "1W0")))
    wait_for_refusal(page, str(error.value))


def test_what_a_reader_types_while_python_computes_stays(page):
    page.goto(f"{page.url.split('#')[0]}#p=4")
    check(page, state_of("1f1b", 4, 8))
    page.evaluate("""() => { const {call} = python; python.call = async (...asked) => {
        python.call = call; await new Promise(done => setTimeout(done, 500)); return call(...asked); }; }""")
    page.fill("[name=W]", "0.25")
    page.fill("#csv", "0F0")
    takes = pipelines.play(state_of("1f1b", 4, 8) | {"W": "0.25"})["takes"]
    page.wait_for_function(f"document.getElementById('summary').textContent.startsWith('A step takes {takes}.')")
    assert page.input_value("#csv") == "0F0"


@pytest.mark.deep
@pytest.mark.parametrize("served", [True, False], ids=["served", "from_disk"])
def test_every_schedule_at_every_size_and_a_link_restored(browser, folder, served):
    with serve(folder) as address:
        with opened(browser, address if served else folder.as_uri()) as page:
            for name in SCHEDULES:
                for p, m, v in (1, 1, 1), (2, 3, 1), (3, 6, 2), (4, 4, 3), (5, 15, 2), (8, 16, 2):
                    if name != "interleaved" or m % p == 0:
                        fill(page, state := state_of(name, p, m, v))
                        check(page, state)
            page.fill("[name=W]", "0.5")
            fragment = page.evaluate("location.hash")
        with opened(browser, address if served else folder.as_uri(), fragment, PHONE) as page:
            wait_for_order(page, print_of(state, "--csv"))
            takes = pipelines.play(state | {"W": "0.5"})["takes"]
            assert page.locator("#summary").text_content().startswith(f"A step takes {takes}.")
            assert page.input_value("[name=W]") == "0.5"
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
