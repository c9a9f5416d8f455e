"""Schedules: complete, in order, ending, printable; and wrong ones are told apart, with the reason."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.errors import UserError
from reference.schedules import (SCHEDULES, Action, Receive, Schedule, Send, forward_only, from_csv, gpipe, interleaved,
                                 lower, main, one_f_one_b, parse_action, table, to_csv)
from reference.validate import ScheduleError, validate

SIZES = st.integers(1, 6)


@st.composite
def schedules(draw, names=tuple(SCHEDULES)):
    """Any generator, at any size that it takes; m < p too."""
    name, p, m = draw(st.sampled_from(names)), draw(SIZES), draw(SIZES)
    if name == "interleaved":
        return interleaved(p, p * draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return forward_only(p, m, draw(st.integers(1, 3))) if name == "forward-only" else SCHEDULES[name](p, m)


@given(schedules())
def test_generators_make_schedules_that_end(schedule):
    """Every action once, in an order that every rank can follow, with nonblocking sends."""
    validate(schedule)


@given(schedules())
def test_a_schedule_prints_and_parses_back(schedule):
    assert from_csv(to_csv(schedule)) == schedule
    for row, actions in zip(str(schedule).splitlines(), schedule.ranks, strict=True):
        assert tuple(map(parse_action, row.split(":")[1].split())) == actions


def test_known_tables():
    """The two figures that every text on pipelines draws."""
    assert str(one_f_one_b(3, 4)) == (
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3")
    assert str(gpipe(2, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1"
    assert str(interleaved(2, 2, 2)) == (
        "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n"
        "rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "-1F0", "0F0 1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UserError, match="is not an action"):
        parse_action(text)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="takes microbatches in groups of p = 4, but m = 6 is no multiple of 4"):
        interleaved(4, 6, 2)
    with pytest.raises(UserError, match="microbatches m is 0, but must be at least 1"):
        gpipe(2, 0)


@given(schedules())
def test_every_send_has_its_receive(schedule):
    """Lowering adds nothing but pairs, and only between ranks."""
    lowered = lower(schedule)
    sends = [(r, s.to, s.action) for r, steps in enumerate(lowered) for s in steps if isinstance(s, Send)]
    receives = [(s.source, r, s.action) for r, steps in enumerate(lowered) for s in steps if isinstance(s, Receive)]
    assert sorted(sends) == sorted(receives) and len(set(sends)) == len(sends)
    assert all(a != b for a, b, _ in sends)
    assert [[s for s in steps if isinstance(s, Action)] for steps in lowered] == [list(a) for a in schedule.ranks]


# ---- wrong schedules ----------------------------------------------------------------------------------------------


@given(schedules(), st.data())
def test_a_missing_action_is_named(schedule, data):
    """Take any action away: the sentence names its stage and microbatch. Forwards alone may be a smaller schedule."""
    r = data.draw(st.integers(0, schedule.p - 1))
    i = data.draw(st.integers(0, len(schedule.ranks[r]) - 1))
    gone = schedule.ranks[r][i]
    wrong = replaced(schedule, r, schedule.ranks[r][:i] + schedule.ranks[r][i + 1:])
    if wrong.stages < schedule.stages or wrong.microbatches < schedule.microbatches:
        return                                     # nothing is missing: the table has become smaller
    if {action.kind for actions in wrong.ranks for action in actions} == {"F"}:
        return                                     # what is left is a pass without backward
    with pytest.raises(ScheduleError, match=rf"Stage {gone.stage} does .* for microbatch {gone.microbatch}, but"):
        validate(wrong)


@given(schedules(), st.data())
def test_a_doubled_action_is_marked(schedule, data):
    r = data.draw(st.integers(0, schedule.p - 1))
    i = data.draw(st.integers(0, len(schedule.ranks[r]) - 1))
    action = schedule.ranks[r][i]
    with pytest.raises(ScheduleError) as error:
        validate(replaced(schedule, r, (*schedule.ranks[r], action)))
    assert f"{action} is done twice." in str(error.value) and str(error.value).count(f">{action}<") == 2


def replaced(schedule, r, actions):
    return Schedule(tuple(tuple(actions) if rank == r else row for rank, row in enumerate(schedule.ranks)))


def wrong(text):
    return from_csv(text.replace(" ", ",").replace("/", "\n"))


@pytest.mark.parametrize("schedule, sentence", [
    ("0B0 0F0", "0B0 comes before 0F0, which it needs."),
    ("0F0 0W0 0I0", "0W0 comes before 0I0, which it needs."),
    ("0F0 0B0 0W0", "Stage 0 does F and B and W for microbatch 0, but should do F and B, or F, I and W."),
    ("0F0 0F1 0B0", "Stage 0 does F for microbatch 1"),
    ("0F0 1F0 1B0/0B0", "Stage 0 is on rank 0 and on rank 1"),
    ("1F0 0F0 1B0 0B0", "1F0 comes before 0F0, which it needs."),
    ("0F0 1F0 0I0 1I0 1W0 0W0", "0I0 comes before 1I0, which it needs."),
])
def test_why_a_schedule_is_wrong(schedule, sentence):
    with pytest.raises(ScheduleError) as error:
        validate(wrong(schedule))
    assert sentence in str(error.value) and ">" in str(error.value)


def test_microbatches_may_come_in_another_order():
    """That alone is no mistake."""
    validate(wrong("0F0 0F1 0B0 0B1/1F1 1B1 1F0 1B0"))


def test_a_circle_across_ranks_is_told_in_full():
    """Each rank insists on a backward that only the other's next forward makes possible."""
    with pytest.raises(ScheduleError) as error:
        validate(wrong("0F0 0B0 0F1 0B1/1F1 1B1 1F0 1B0"))
    assert "rank 0 waits for 1B0 of rank 1; rank 1 waits for 0F1 of rank 0." in str(error.value)
    assert ">0B0<" in str(error.value) and ">1F1<" in str(error.value)


def test_blocking_sends_hang_where_nonblocking_ones_do_not():
    """1F1B: a rank sends its activation on while its neighbour sends a gradient back, and neither receives."""
    validate(one_f_one_b(2, 3))
    with pytest.raises(ScheduleError) as error:
        validate(one_f_one_b(2, 3), blocking=True)
    assert ("with blocking sends: rank 0 waits to send 0F1 to rank 1; rank 1 waits to send 1B0 to rank 0."
            in str(error.value))
    assert str(error.value).endswith(table(one_f_one_b(2, 3), [(0, 1), (1, 1)]))


@given(SIZES, SIZES)
def test_gpipe_needs_no_nonblocking_sends(p, m):
    """All messages of a phase go the same way, so somebody at the end always receives."""
    validate(gpipe(p, m), blocking=True)


# ---- on the command line ------------------------------------------------------------------------------------------


def test_the_command_prints_table_bubble_and_memory(capsys):
    main("--schedule interleaved -p 4 -v 2 -m 8".split())
    printed = capsys.readouterr().out
    assert printed.startswith(str(interleaved(4, 8, 2)))
    assert "idle / ideal time 0.1875" in printed and "on each rank: 11 9 7 5." in printed


def test_the_command_prints_csv_that_parses_back(capsys):
    main("--schedule zb-h1 -p 3 -m 4 --csv".split())
    assert from_csv(capsys.readouterr().out) == SCHEDULES["zb-h1"](3, 4)


@pytest.mark.parametrize("options, sentence", [
    ("--schedule interleaved -p 4 -v 2 -m 6", "m = 6 is no multiple of 4"),
    ("--schedule interleaved", "needs -v"),
    ("--schedule 1f1b -v 2", "1f1b has one stage on each rank"),
])
def test_the_command_refuses_in_a_sentence(capsys, options, sentence):
    with pytest.raises(SystemExit) as ended:
        main(options.split())
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
