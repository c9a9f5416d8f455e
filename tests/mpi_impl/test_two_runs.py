"""The page of two runs marks the tensor that compare names and the message that a bug drops; a browser shows it."""
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks.bug_matrix import pairs
from mpi_impl.comm.ledger import Entry
from reference.errors import UserError
from shardlab.compare import two_runs
from shardlab.compare.__main__ import main
from shardlab.compare.recording import STEPS
from shardlab.compare.steps import Call, RankStep
from tests import zoo
from tests.browser import DESK, PHONE, complaints_of, open_browser
from tests.deep import one_fast_of
from tests.mpi_impl.test_compare import topology_of
from tests.recorded_runs import case, record, written
from tests.training_theorems import Plan
from tests.zoo.first_wrong import FOUND

# By bug, what A and B send before the first wrong tensor: operation, group and reason. None: both send the same.
SUM = "all_reduce", "tensor"
MESSAGES: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    "f without its all-reduce": ((*SUM, "logits input"), None),
    "attention's input gradient not summed": ((*SUM, "attention input"), None),
    "an all-gather without its reduce-scatter": (("reduce_scatter", "tensor", "logits input"), None),
    "the tied table's gradients not summed": (("all_reduce", "embedding", "tied embedding"), None),
    "g all-reduces backward too": (None, (*SUM, "mlp output")),
    "the norms' gradients not summed": ((*SUM, "replicated gradients"), (*SUM, "replicated gradients")),
    "replicated gradients summed over the world": ((*SUM, "replicated gradients"),
                                                   ("all_reduce", "world", "replicated gradients")),
    "the MLP's output bias added t times": (None, None),
    "the targets of the microbatch before": (None, None),
}


@pytest.mark.parametrize("name", one_fast_of(4, MESSAGES))
def test_the_marked_place_and_the_message_are_the_bugs(ranks, name):
    """The mark is on the tensor that compare names, where the two runs differ, and nowhere earlier."""
    n, of, plan, *others = topology_of(name)
    a = record(ranks, n, of, plan, *others)
    two = pairs.two_runs_of(a, record(ranks, n, of, plan, *others, bug=zoo.BY_NAME[name].bug))
    key, place = two.found.differences[0].key, two.first_places[0]
    if name in FOUND:
        assert f"{key.iteration} {key.phase}: {key.name}" == FOUND[name]
    right, wrong = ({(part.rank, part.first): run.load(part) for part in run.parts[key]} for run in (a, two.runs["B"]))
    apart = {two.times["B", rank, key.phase, key.name, first] for rank, first in right
             if not np.allclose(right[rank, first], wrong[rank, first], 1e-9, 1e-12)}
    assert place.at == min(apart)
    assert place.rank in {rank for holder in two.found.differences[0].holders for rank in holder.ranks}
    told = two.message and tuple(call and (call.entry.operation, call.entry.group, str(call.entry.reason))
                                 for call in (two.message.a, two.message.b))
    assert (told or (None, None)) == MESSAGES[name], two_runs.explain_message(two)


@given(st.lists(st.integers(0, 8), max_size=30), st.data())
def test_calls_that_are_dropped_are_those_that_differ(reasons, draws):
    """Whichever of its calls a run lacks, as often as it lacks them, and whichever has another size."""
    calls = [Call(i * 1e-6, f"0F{reason // 3}", "blocks.0",
                  Entry("all_reduce", "tensor", 2, "forward", f"sum {reason % 3}", "float64"), 8)
             for i, reason in enumerate(reasons)]
    kinds = [draws.draw(st.sampled_from(["kept", "dropped", "changed"])) for _ in calls]
    kept = [call for call, kind in zip(calls, kinds) if kind != "dropped"]
    found = list(two_runs.different_calls(1, [RankStep([], calls, [])], [RankStep([], kept, [])]))
    dropped = Counter(call.purpose for call, kind in zip(calls, kinds) if kind == "dropped")
    assert Counter(one.a.purpose for one in found) == dropped and {one.b for one in found} <= {None}
    changed = [call._replace(elements=4) if kind == "changed" else call for call, kind in zip(calls, kinds)]
    found = list(two_runs.different_calls(1, [RankStep([], calls, [])], [RankStep([], changed, [])]))
    assert {(one.a, one.b) for one in found} == {pair for pair in zip(calls, changed) if pair[0] != pair[1]}


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 9), st.integers(0, 1))), st.integers(0, 9))
def test_the_message_is_the_last_that_differs_before_the_tensor_and_on_its_rank(calls, at):
    two = object.__new__(two_runs.TwoRuns)
    two.first, two.iteration, two.first_places = "a tensor", 2, [two_runs.Place(at, rank=1)]
    two.calls = [two_runs.DifferentCall(*call, None, None) for call in calls]
    before = [call[:2] for call in calls if call[2] == 1 and call[:2] <= (2, at)]
    assert (two.message and two.message[:2]) == max(before, default=None)


def test_the_same_run_twice_is_one_page(ranks):
    """Nothing differs, and not a byte of the page depends on time."""
    of, plan = case(2, model=pairs.SMALL), Plan(2)
    pages = []
    for _ in range(2):
        two = pairs.two_runs_of(*(record(ranks, 4, of, plan) for _ in "ab"))
        assert not two.calls and two.message is None and not list(two_runs.marks(two, "B"))
        assert "agree" in two_runs.explain_tensor(two) and "Both send the same" in two_runs.explain_message(two)
        pages.append(two_runs.page(two, "", {"A": "", "B": ""}))
    assert pages[0] == pages[1]


# ---- the program ----------------------------------------------------------------------------------------------------


def compare_with_report(monkeypatch, tmp_path, a, b) -> str:
    """Run the program, which must refuse, and return its sentence."""
    monkeypatch.setattr("sys.argv", ["compare", str(a), str(b), "--report", str(tmp_path / "page.html")])
    with pytest.raises(UserError) as refused:
        main()
    assert not (tmp_path / "page.html").exists()
    return str(refused.value)


def test_runs_without_counterparts_are_refused_before_they_start(ranks, monkeypatch, tmp_path):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a run has been started"))
    for name, of, b in (("t", case(2), 1), ("d", case(), 1), ("m", case(), 2)):
        ranks.run(2, written, replace(of, b=b), Plan(), str(tmp_path / name), 1, "float64")
    assert "tensor model parallel size is 2 in A and 1 in B" in compare_with_report(
        monkeypatch, tmp_path, tmp_path / "t", tmp_path / "d")
    assert "number of microbatches is 2 in A and 1 in B" in compare_with_report(
        monkeypatch, tmp_path, tmp_path / "d", tmp_path / "m")
    (tmp_path / "t" / STEPS).unlink()
    assert "Record the run again" in compare_with_report(monkeypatch, tmp_path, tmp_path / "t", tmp_path / "t")


def test_two_recordings_on_disk_become_a_page(ranks, monkeypatch, tmp_path):
    for name in "ab":
        ranks.run(2, written, case(2), Plan(), str(tmp_path / name), 1, "float64")
    monkeypatch.setattr("sys.argv", ["compare", *(str(tmp_path / name) for name in "ab"), "--report",
                                     str(tmp_path / "page.html")])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "A and B agree: no tensor differs" in (tmp_path / "page.html").read_text()


# ---- the page, in a browser, from disk ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def file(ranks, tmp_path_factory):
    """Write the page of f without its all-reduce."""
    name, of, plan = pairs.PAIRS["dropped_all_reduce"]
    found = tmp_path_factory.mktemp("pairs") / "page.html"
    found.write_text(pairs.page_of(ranks, zoo.BY_NAME[name], of, plan))
    return found


@pytest.fixture(params=[(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
def page(request, browser, file):
    """Open the page; it must not complain, load anything, or be wider than its window."""
    size, scheme = request.param
    page = browser.new_page(viewport=size, color_scheme=scheme)
    complaints, requests = complaints_of(page), []
    page.on("request", lambda asked: requests.append(asked.url))
    page.goto(file.as_uri())
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    page.close()
    assert complaints == [] and set(requests) <= {file.as_uri(), "data:,"}


def test_the_page_shows_the_tensor_and_the_message(page):
    data = json.loads(page.locator("#data").text_content())
    assert "the gradient of final_layernorm.output, in the phase" in page.locator("#first-text").text_content()
    assert "all-reduce of 256 bytes" in page.locator("#message-text").text_content()
    assert page.locator("#wrong").text_content() == "return dx"
    for run in (0, 1):
        assert page.locator(f"#view-{run} .mark-first.lit").count() == 2      # on ranks 2 and 3
        assert "the first tensor that differs" in page.locator(f"#status-{run}").text_content()
    assert page.locator("#view-0 .mark-sent").count() == page.locator("#view-1 .mark-missing").count() == sum(
        times for _, times, _ in data["calls"])
    assert page.locator("#differences tbody tr").count() == len(data["differences"])


def test_both_runs_step_together_by_keyboard(page):
    """To the start, and from there to the first difference: it lights up in both runs at the same time."""
    page.locator("#next").focus()
    page.keyboard.press("Home")
    assert page.locator(".lit[class^='mark']:not(.legend *)").count() == 0
    heads = page.locator(".playhead")
    for _ in range(400):
        lit = [page.locator(f"#view-{run} .mark-first.lit").count() for run in (0, 1)]
        assert lit[0] == lit[1] and heads.nth(0).get_attribute("x1") == heads.nth(1).get_attribute("x1")
        if lit[0]:
            break
        page.keyboard.press("ArrowRight")
    assert lit == [2, 2]
    page.keyboard.press("End")
    page.keyboard.press("Shift+Tab")
    page.locator("#go").focus()
    page.keyboard.press("Enter")
    assert "the first tensor that differs" in page.locator("#status-1").text_content()
    actions = page.locator("#view-1 .action")
    actions.first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("rank 1: ")
    page.keyboard.press("Enter")
    assert "on rank 1" in page.locator("#details-1").inner_text()
