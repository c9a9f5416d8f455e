"""The leaderboard: what is ranked is proved, no score is below its bound, and what cannot be scored gets a sentence."""
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.errors import UserError
from reference.schedules.actions import Action, Schedule, needs, to_csv
from reference.schedules.generators import zero_bubble_v
from shardlab.score import bubble, memory, traffic
from shardlab.score.__main__ import ENTRIES, TASKS, board, main, on_board, scored
from shardlab.score.entry import Entry, read
from tests.launching import ROOT
from tests.planted import planted

V = to_csv(zero_bubble_v(4, 8))


def refusal(task: str, **content) -> str:
    """Return the sentence by which an entry is refused."""
    with pytest.raises(UserError) as error:
        TASKS[task].score(Entry(task, "me", **content))
    return str(error.value)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=[pytest.mark.deep] if path.stem.startswith("memory") else [])
    for path in sorted(ENTRIES.glob("*.toml"))])
def test_every_entry_has_the_score_that_it_states(path):
    assert read(str(path)).score == scored(str(path)).score >= TASKS[read(str(path)).task].LEAST


def test_the_page_has_the_board():
    page = (ROOT / "docs" / "leaderboard.md").read_text()
    assert board(on_board()).rstrip() in page
    assert len(on_board()) == len({read(str(path)).score for path in ENTRIES.glob("*.toml")})


# ---- bubble ---------------------------------------------------------------------------------------------------------


@st.composite
def schedules(draw):
    """Draw any placement, and any order in which actions can happen, with backwards whole or split."""
    rank_of = draw(st.lists(st.integers(0, 3), min_size=8, max_size=8).filter(lambda ranks: len({*ranks}) == 4))
    random, kinds = Random(draw(st.integers(0, 2**32))), draw(st.sampled_from(("FB", "FIW")))
    left = {Action(stage, kind, i) for stage in range(8) for kind in kinds for i in range(8)}
    ranks: list[list[Action]] = [[] for _ in range(4)]
    while left:
        ready = []
        for stage, kind, i in left:
            need = needs(Action(stage, kind, i), 8)
            before = [need and need._replace(kind="F" if kind == "F" else kinds[1]),
                      Action(stage, kinds[kinds.index(kind) - 1], i) if kind != "F" else None]
            if not left.intersection(before):
                ready.append(Action(stage, kind, i))
        action = random.choice(sorted(ready))
        left.remove(action)
        ranks[rank_of[action.stage]].append(action)
    return Schedule(tuple(map(tuple, ranks)))


@settings(max_examples=20)
@given(schedules())
def test_no_schedule_is_below_the_bound(schedule):
    bubble.validate(schedule)
    assert bubble.simulate(schedule, bubble.TIMES).makespan >= bubble.LEAST


@pytest.mark.parametrize("schedule, words", [
    ("\n".join(",".join(cell for cell in line.split(",") if "F" in cell) for line in V.splitlines()), "forwards only"),
    (V.replace(",7F0", "").replace("0F0", "7F0,0F0", 1), "The ranks deadlock")])
def test_what_is_not_a_schedule_of_the_task(schedule, words):
    assert words in refusal("bubble", schedule=schedule)


def test_too_many_activations(monkeypatch):
    monkeypatch.setattr(bubble, "LIMIT", 7)
    assert "Rank 0 holds 8 activations, but may hold 7" in refusal("bubble", schedule=V)


def test_a_pipeline_that_forgets_a_gradient_is_not_proved():
    with planted("reference.parallel.pipeline", "total = sum(copies[1:], copies[0])", "total = copies[0]"):
        assert "Not proved equal" in refusal("bubble", schedule=V)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(traffic, "SIZES", dict.fromkeys(traffic.SIZES, 2))


LAYOUTS = st.fixed_dictionaries({part: st.dictionaries(st.sampled_from("bshfgdVzn"), st.sampled_from("uvw"))
                                 for part in traffic.PARTS})


def test_any_layouts_of_the_parts_are_proved(small):
    """Each rank's piece of the loss and of all gradients: the score of small sizes is no matter."""
    @settings(max_examples=10, deadline=None)
    @given(LAYOUTS)
    def check(layouts):
        traffic.score(Entry("bytes", "me", layout=layouts))

    check()


def test_an_axis_that_changes_its_direction_is_gathered_first(small, monkeypatch):
    """Else its pieces would be in another order, which the proof sees."""
    monkeypatch.setattr(traffic, "SIZES", traffic.SIZES | dict(b=4, s=4, z=4))
    layout = {part: {"s": "v", "b": "u"} for part in traffic.PARTS} | {"mlp": {"s": "u", "b": "v"}}
    traffic.score(Entry("bytes", "me", layout=layout))
    with planted("shardlab.score.traffic", "kind in wanted.values()", "False"):
        assert "Not proved equal" in refusal("bytes", layout=layout)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_limits_and_mistakes_of_plans(monkeypatch):
    options = "--tensor-model-parallel-size 8 --micro-batch-size 16 --recompute-granularity full"
    monkeypatch.setattr(memory, "MODEL", [word.replace("gpt2-8.3b", "gpt2-355m") for word in memory.MODEL])
    monkeypatch.setattr(memory.DryRun, "match", lambda self: ([], "The ranks do not match."))
    assert refusal("memory", options=options) == "The ranks do not match."
    monkeypatch.setattr(memory, "SECONDS", 0.001)
    assert "s, but may take 0.001 s" in refusal("memory", options=options)
    world = memory.parse([*memory.MODEL, "--micro-batch-size", "1"]).world
    with pytest.raises(UserError, match="Not proved equal, on 2 ranks: error: "):
        memory.prove(["--sequence-parallel"], world.parallel)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_folder_is_ranked(tmp_path, capsys, monkeypatch):
    """Equal scores share a place, and each refused file gets a sentence."""
    def file(name, text):
        (tmp_path / f"{name}.toml").write_text(text)

    monkeypatch.setattr(bubble, "prove", lambda schedule: None)
    mine = f'task = "bubble"\nauthor = "me"\nschedule = """\n{V}"""\n'
    for name, text in dict(good=mine, false="score = 1\n" + mine, other=mine.replace("bubble", "bubbles"),
                           broken="task =", strange="grade = 1\n" + mine).items():
        file(name, text)
    with pytest.raises(UserError) as error:
        main([str(tmp_path), "--plot", str(tmp_path / "all.png")])
    places = [line.split() for line in capsys.readouterr().out.splitlines() if " 169 " in line]
    assert [place[0] for place in places] == ["2", "2"]
    for words in ("false.toml: The file says that its score is 1, but it is 169", "There is no task 'bubbles'",
                  "broken.toml is not TOML", "unknown field `grade`"):
        assert words in str(error.value)
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_tasks_are_printed_with_their_rules(capsys):
    main(["--tasks"])
    text = capsys.readouterr().out
    assert all(f"{name}: let " in text for name in TASKS) and "40,000 bytes" in text
    assert np.isclose(memory.LEAST, 18 * 8_317_040_640 / 64)
