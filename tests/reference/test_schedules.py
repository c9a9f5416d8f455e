"""Schedules: complete, in order, ending, printable; wrong ones are told apart, with the reason; and their cost is the
papers': the closed forms and the published figures.
"""
import re

import pytest
from hypothesis import given, strategies as st

from reference.costs.bubbles import bubble_fraction, bubbles
from reference.schedules.__main__ import main
from reference.schedules.actions import Action, Schedule, from_csv, parse_action, table, to_csv
from reference.schedules.generators import (SCHEDULES, dualpipe_v, evaluation_schedule, gpipe, interleaved, make,
                                            one_f_one_b, zero_bubble_h1, zero_bubble_h2, zero_bubble_v)
from reference.schedules.simulate import Times, activations_in_flight, simulate
from reference.schedules.validate import ScheduleError, validate

SIZES = st.integers(1, 6)


@st.composite
def schedules(draw, names=SCHEDULES, most=6):
    """Draw schedules of any generator, for at most so many ranks, at any size that it takes, m < p included."""
    name, p, m = draw(st.sampled_from(sorted(names))), draw(st.integers(1, most)), draw(SIZES)
    if name == "interleaved":
        return interleaved(p, p * draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    return make(name, p, m, draw(st.integers(1, 3)) if name == "forward-only" else None)


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


def test_known_tables_of_the_v():
    """Rank 0 has the embedding and the loss: it goes back as soon as its first forward has come up to stage 2p - 1.
    Rank r holds r and 2p - 1 - r.
    """
    assert str(zero_bubble_v(2, 3)) == (
        "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2\n"
        "rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2")
    assert str(dualpipe_v(2, 4)) == (
        "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3\n"
        "rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3")
    assert zero_bubble_v(3, 2).placement() == dualpipe_v(3, 2).placement() == ((0, 5), (1, 4), (2, 3))


@st.composite
def placements(draw, most=5):
    """Draw any stages on any ranks, some ranks, but not the last, with none."""
    homes = draw(st.lists(st.integers(0, most - 1), min_size=1, max_size=12))
    return tuple(tuple(stage for stage, home in enumerate(homes) if home == r) for r in range(max(homes) + 1))


@given(placements(), st.integers(1, 12))
def test_an_evaluation_schedule_ends_on_any_placement(placement, m):
    """It is complete, ends, has the given placement, and takes microbatches in groups of p, as `interleaved` does."""
    schedule = evaluation_schedule(placement, m)
    validate(schedule)
    assert schedule == evaluation_schedule([held[::-1] for held in placement], m), "the order of the list counts"
    assert schedule.placement() == placement and schedule.microbatches == m
    for actions in schedule.ranks:
        keys = [(action.microbatch // schedule.p, action.stage, action.microbatch) for action in actions]
        assert keys == sorted(keys)


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


def replaced(schedule, r, actions):
    return Schedule(tuple(tuple(actions) if rank == r else row for rank, row in enumerate(schedule.ranks)))


def test_cells_that_are_wrong_are_marked():
    """Microbatches in another order on each rank are not wrong."""
    validate(from_csv("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0"))
    with pytest.raises(ScheduleError, match=">0B0< >0F0<"):
        validate(from_csv("0B0,0F0"))


@pytest.mark.parametrize("schedule, back", [(one_f_one_b, "1B0"), (zero_bubble_v, "2F0")])
def test_blocking_sends_hang_where_nonblocking_ones_do_not(schedule, back):
    """A rank sends its result on while its neighbour sends one back, in a V up as well as down, and neither receives.
    With one microbatch they do not meet.
    """
    validate(schedule(4, 1), blocking=True)
    with pytest.raises(ScheduleError) as error:
        validate(schedule(2, 3), blocking=True)
    assert f"rank 0 waits to send 0F1 to rank 1; rank 1 waits to send {back} to rank 0." in str(error.value)
    assert str(error.value).endswith(table(schedule(2, 3), [(0, 1), (1, 1)]))


@given(schedules())
def test_with_blocking_sends_a_schedule_ends_or_says_which_ranks_wait(schedule):
    """Each rank of the circle is stuck in a transfer with the next; their cells are marked."""
    try:
        validate(schedule, blocking=True)
    except ScheduleError as error:
        sentence, *rows = str(error).splitlines()
        circle = re.findall(r"rank (\d+) waits (?:to send|for) \S+ (?:to|of) rank (\d+)", sentence)
        assert len(circle) > 1 and [b for _, b in circle] == [a for a, _ in circle[1:] + circle[:1]]
        assert {f"rank {a}" for a, _ in circle} == {row.split(":")[0] for row in rows if ">" in row}


# ---- simulated ------------------------------------------------------------------------------------------------------

RANKS, MORE, TIME = st.integers(1, 8), st.integers(0, 8), st.floats(0.1, 10)


@given(RANKS, st.integers(1, 4), st.integers(1, 4), TIME, TIME, TIME)
def test_the_bubble_of_gpipe_1f1b_and_interleaved(p, groups, v, f, i, w):
    """(p - 1) / m, whatever forward and backward take; 1/v of it interleaved (Narayanan et al. 2021, section 2.2)."""
    m = p * groups
    assert bubble_fraction(p, m, v) == (p - 1) / (v * m)
    for schedule, chunks in ((gpipe(p, m), 1), (one_f_one_b(p, m), 1), (interleaved(p, m, v), v)):
        found = simulate(schedule, Times(f, i, w)).bubble_fraction
        assert found == pytest.approx(bubble_fraction(p, m, chunks))


@given(RANKS, MORE, TIME, TIME, st.floats(0.1, 1))
def test_the_bubbles_of_zero_bubble_schedules(p, more, f, i, share):
    """Qi et al. 2023, table 2: (p - 1)(F + I - W) for H1 and (p - 1)(F + I - 2W) for H2, for any W up to F and I."""
    m, w = 2 * p + more, share * min(f, i)
    for schedule, bubble in zip((one_f_one_b, zero_bubble_h1, zero_bubble_h2), bubbles(p, f, i, w)):
        timeline = simulate(schedule(p, m), Times(f, i, w))
        assert timeline.cost - timeline.work == pytest.approx(bubble, abs=1e-9 * m)


@given(RANKS, MORE, TIME)
def test_the_bubble_of_zero_bubble_v(p, more, time):
    """It is 0 from m = 2p - 1 on, as the paper says; below, an action for each missing microbatch. The slant is p - 1.

    Times are of a stage, half of a rank's.
    """
    times = Times(time, time, time)
    timeline = simulate(zero_bubble_v(p, p + more), times)
    assert timeline.cost - timeline.work == pytest.approx(max(0, p - 1 - more) * time, abs=1e-9 * time * p)
    timeline = simulate(zero_bubble_v(p, 2 * p - 1 + more), times)
    assert timeline.makespan - timeline.work == pytest.approx((p - 1) * time, abs=1e-9 * time * p)


@given(RANKS, MORE, TIME)
def test_the_bubble_of_dualpipe_v(p, more, time):
    """(p - 1) actions of a stage, so half of ZB-H1's, for a stage is half as long; no slant is left over.

    DeepSeek's table says (p - 1)(F&B + B - 3W), where F&B is the time of the two that overlap: with F&B = F + B, as
    here, that would be twice as much as the schedule takes.
    """
    timeline = simulate(dualpipe_v(p, p + more), Times(time, time, time))
    for idle in (timeline.cost - timeline.work, timeline.makespan - timeline.work):
        assert idle == pytest.approx((p - 1) * time, abs=1e-9 * time * p)


@pytest.mark.parametrize("schedule, rate", [(one_f_one_b, 0.2431), (zero_bubble_h1, 0.1585), (zero_bubble_h2, 0.1083)])
def test_published_bubble_rates(schedule, rate):
    """Qi et al. 2023: p = 8, m = 24, measured times of F, I, W and of sending."""
    timeline = simulate(schedule(8, 24), Times(18.522, 18.086, 9.337, 0.601))
    assert round(timeline.bubble_rate, 4) == rate


@given(RANKS, st.integers(1, 20))
def test_activations_in_flight_of_a_v(p, m):
    """Counted in stages, half a rank's layers: ZB-V holds 2p, 1F1B's p whole ranks', everywhere; DualPipe-V 2p + 1."""
    zb, dual = activations_in_flight(zero_bubble_v(p, m)), activations_in_flight(dualpipe_v(p, m))
    assert max(zb) == min(2 * m, 2 * p) and max(dual) == min(2 * m, 2 * p + 1)
    if m >= 2 * p:
        assert set(zb) == {2 * p} and set(dual) == {2 * p + 1}


def test_a_forward_without_a_backward_keeps_nothing():
    """In an evaluation between training steps, only forwards with a backward count."""
    assert activations_in_flight(from_csv("0F0,0F1,0F2,0B1")) == [1]
    assert activations_in_flight(from_csv("0F0,0F1,0I1,0W1,0F3")) == [1]


def test_the_work_is_the_busiest_ranks():
    """With three unequal stages and four microbatches the second rank computes for 4 (5 + 1 + 2) = 32, longest of
    all; the last one for 4 (1 + 1 + 1).
    """
    timeline = simulate(one_f_one_b(3, 4), Times([2.0, 5.0, 1.0], [2.0, 1.0, 1.0], [1.0, 2.0, 1.0]))
    assert timeline.work == 32
    assert timeline.bubble_fraction == (timeline.makespan - 32) / 32
    assert timeline.bubble_rate == (timeline.cost - 32) / timeline.cost


@given(schedules(set(SCHEDULES) - {"forward-only"}), st.data())
def test_a_timeline_is_possible(schedule, data):
    """Nobody starts before what it needs has arrived, does two things at once, or idles without a reason."""
    per_stage = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)
    times = Times(data.draw(per_stage), data.draw(per_stage), data.draw(per_stage), data.draw(st.floats(0, 5)))
    timeline = simulate(schedule, times)
    end = {span.action: span.end for spans in timeline.ranks for span in spans}
    rank_of = schedule.rank_of()
    for r, spans in enumerate(timeline.ranks):
        assert [span.action for span in spans] == list(schedule.ranks[r])
        free = 0.0
        for (stage, kind, i), start, stop in spans:
            assert stop - start == pytest.approx(times.of(Action(stage, kind, i)))
            neighbour, kinds = {"F": (stage - 1, "F"), "W": (-1, "")}.get(kind, (stage + 1, "BI"))
            sent = [Action(neighbour, kind, i) for kind in kinds if Action(neighbour, kind, i) in end]
            arrival = [end[a] + (times.communication if rank_of[neighbour] != r else 0) for a in sent]
            assert start == pytest.approx(max([free, *arrival]))
            free = stop


def test_a_schedule_that_never_ends_raises_an_error():
    with pytest.raises(ValueError, match="never ends"):
        simulate(from_csv("1F0,0F0,0B0,1B0"), Times())


# ---- on the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, bubble, memory", [
    ("interleaved -v 2", "ideal time 0.1875", "in flight on each rank: 11 9 7 5."),
    ("dualpipe-v", "ideal time 0.0625, idle / longest span 0.05882.", "each rank: 9 9 9 9.")])
def test_the_command_prints_table_bubble_and_memory(capsys, options, bubble, memory):
    """F = I = W = 1 is a rank's time: a rank of two stages takes half for each."""
    main(f"--schedule {options} -p 4 -m 8".split())
    printed = capsys.readouterr().out
    assert printed.startswith(str(make(options.split()[0], 4, 8, 2 if "-v 2" in options else None)))
    assert bubble in printed and memory in printed


def test_the_command_prints_csv_that_parses_back(capsys):
    main("--schedule zb-h1 -p 3 -m 4 --csv".split())
    assert from_csv(capsys.readouterr().out) == SCHEDULES["zb-h1"](3, 4)
