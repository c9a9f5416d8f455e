"""Lab 5: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of, plant

LAB = "lab5_pipeline_schedules"

MISTAKES = {
    "the last stage takes what is left": (
        "distribute", "return best[p][len(costs)][1]", "each = len(costs) // p\n    return [each] * (p - 1) + "
        "[len(costs) - each * (p - 1)]", {"check_distribute"}, "can be reached"),
    "one forward more ahead": (
        "one_f_one_b", "actions = forward[:most]", "most += 1\n        actions = forward[:most]",
        {"check_one_f_one_b"}, "should be a backward"),
    "only the next rank looked at": (
        "smallest_in_flight", "range(r + 1, p):", "range(r + 1, min(r + 2, p)):",
        {"check_smallest_in_flight"}, "on all ranks behind it"),
    "the division rounded up as it is (hidden)": (
        "smallest_in_flight", " - 1e-9", "", {"check_smallest_in_flight"}, "are enough on rank 0"),
    "a short last group": (
        "interleaved", "range(first, first + p) for", "range(first, min(first + p, m)) for",
        {"check_interleaved_time"}, "microbatches 6 and 7"),
    "GPipe, interleaved": (                        # valid, but dear in memory
        "interleaved", "most = 2 * (p - 1 - rank) + (v - 1) * p + 1", "most = m * v + p * v",
        {"check_interleaved"}, "in flight"),
    "backwards from the first stage on": (
        "interleaved", "in reversed(stages)", "in stages", {"check_interleaved", "check_interleaved_time"},
        "in a cycle"),
    "weights' gradients not summed": (
        "play", "dws[stage] += dw", "dws[stage] = dw", {"check_play", "check_play_interleaved"}, "weight of stage"),
    "a rank's neighbour is one stage on": (        # which is so as long as a rank has one stage
        "play", "elsewhere = 0 <= to < stages and to % group.size != rank", "elsewhere = 0 <= to < group.size",
        {"check_play_interleaved"}, "rank"),
}

NAIVE = """
    come = {("F", 0, i): x for i, x in enumerate(xs)} | {("B", stages - 1, i): dy for i, dy in enumerate(dys)}
    caches, dws = {}, {stage: np.zeros_like(w) for stage, w in weights.items()}
    for kind, stage, i in schedule[group.rank]:
        if (kind, stage, i) not in come:
            come[kind, stage, i] = group.receive((stage - 1 if kind == "F" else stage + 1) % group.size)
        if kind == "F":
            y, caches[stage, i] = stage_forward(weights[stage], come[kind, stage, i])
        else:
            y, dw = stage_backward(weights[stage], caches.pop((stage, i)), come[kind, stage, i])
            dws[stage] += dw
        to = stage + 1 if kind == "F" else stage - 1
        if 0 <= to < stages:
            group.send(y, to % group.size)
    return {"ys": {}, "dxs": {}, "dws": dws}
"""


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_receive_compute_send_hangs_and_the_cycle_is_reported():
    """The player that suggests itself."""
    body = "    arrived = {"
    found = marks_of(LAB, **replace_end(body, NAIVE))
    assert lost_checks(found) == {"check_play", "check_play_interleaved"}
    assert "rank 0 waits to send to rank 1" in found["check_play"].said
    assert "rank 1 waits to send to rank 0" in found["check_play"].said
    assert "They wait in a cycle: 0 -> 1 -> 0" in found["check_play"].said


def replace_end(start, body):
    """Return the answer `play` with this body in place of its own from the line on that begins with `start`."""
    source = plant(LAB, "play", start, start)["play"]
    return {"play": source[:source.index(start)] + body}


KINDS = {"distribute": ("check_distribute", "[1, 'a']", "whole numbers"),
         "fastest": ("check_fastest", "3.0", "two things"),
         "one_f_one_b": ("check_one_f_one_b", "[[1], [2]]", "no action"),
         "play": ("check_play", "{'ys': []}", "no dict"),
         "interleaved": ("check_interleaved", "None", "list of 2 lists")}


def test_a_result_of_the_wrong_kind_is_reported():
    found = marks_of(LAB, **{answer: f"def {answer}(*args):\n    return {value}\n"
                             for answer, (_, value, _) in KINDS.items()})
    for check, _, words in KINDS.values():
        assert check in lost_checks(found) and words in found[check].said
