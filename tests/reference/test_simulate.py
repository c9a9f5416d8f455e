"""The cost of schedules: the closed forms of the papers, and their published figures."""
import pytest
from hypothesis import given, strategies as st

from reference.costs.bubbles import bubble_fraction, bubbles
from reference.schedules.actions import Action, from_csv
from reference.schedules.generators import (dualpipe_v, gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_h2,
                                            zero_bubble_v)
from reference.schedules.simulate import Times, activations_in_flight, simulate

RANKS, MORE, TIME = st.integers(1, 8), st.integers(0, 8), st.floats(0.1, 10)


@given(RANKS, st.integers(1, 12), TIME, TIME, TIME)
def test_the_bubble_of_gpipe_and_1f1b(p, m, f, i, w):
    """(p - 1) / m, whatever forward and backward take (Narayanan et al. 2021, section 2.2.1)."""
    assert bubble_fraction(p, m) == (p - 1) / m
    for schedule in (gpipe(p, m), one_f_one_b(p, m)):
        assert simulate(schedule, Times(f, i, w)).bubble_fraction == pytest.approx(bubble_fraction(p, m))


@given(RANKS, st.integers(1, 4), st.integers(1, 4), TIME, TIME, TIME)
def test_the_bubble_of_the_interleaved_schedule(p, groups, v, f, i, w):
    """(p - 1) / (v m): v times less (section 2.2.2)."""
    m = p * groups
    assert bubble_fraction(p, m, v) == (p - 1) / (v * m)
    assert simulate(interleaved(p, m, v), Times(f, i, w)).bubble_fraction == pytest.approx(bubble_fraction(p, m, v))


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
    assert activations_in_flight(from_csv("0F0,0F1,0F2,0I1,0W1,0F3")) == [1]


def test_the_work_is_the_busiest_ranks():
    """With three unequal stages and four microbatches the second rank computes for 4 (5 + 1 + 2) = 32, longest of
    all; the last one for 4 (1 + 1 + 1).
    """
    timeline = simulate(one_f_one_b(3, 4), Times([2.0, 5.0, 1.0], [2.0, 1.0, 1.0], [1.0, 2.0, 1.0]))
    assert timeline.work == 32
    assert timeline.bubble_fraction == (timeline.makespan - 32) / 32
    assert timeline.bubble_rate == (timeline.cost - 32) / timeline.cost


GENERATORS = [gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2, zero_bubble_v, dualpipe_v]


@given(st.sampled_from(GENERATORS), RANKS, st.integers(1, 8), st.data())
def test_a_timeline_is_possible(schedule, p, m, data):
    """Nobody starts before what it needs has arrived, does two things at once, or idles without a reason."""
    schedule = schedule(p, m)
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
