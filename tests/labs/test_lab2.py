"""Lab 2: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of

LAB = "lab2_parallel_block"

FORWARD = {"check_block_forward", "check_block_cost"}
BACKWARD = {"check_block_backward", "check_block_cost"}
SEQUENCE_BACKWARD = {"check_sequence_backward", "check_sequence_cost"}

MISTAKES = {
    "splits Q, K, V and U as one matrix": (
        "shard", "np.hstack([*(mine(one, 1, d) for one in (Q, K, V)), mine(U, 1)])", 'mine(whole["W_in"], 1)',
        {"check_shard"}, "four matrices side by side"),
    "splits Q, K and V by columns, not by heads (hidden)": (
        "shard", "mine(one, 1, d)", "mine(one, 1)", {"check_shard"}, "by heads"),
    "joins shard by shard": (
        "join", "np.hstack([np.hstack(parts) for parts in zip(*columns)])",
        'np.hstack([one["W_in"] for one in shards])', {"check_join"}, "all of Q stands left"),
    "f's backward adds nothing up": (
        "f_and_g", "return group.all_reduce(dx)", "return dx", {"check_f"}, "only a part"),
    "g's backward adds up": (
        "f_and_g", "return dy", "return group.all_reduce(dy)", {"check_g"}, "may not be used here"),
    "the slope of ReLU, not of its square": (
        "inside", "2 * relu * dact", "(relu > 0) * dact", {"check_inside_backward"},
        "line by line"),
    "every rank adds x and the bias": (
        "block", 'x + g(group, partial) + shard["bias"]', 'g(group, x + partial + shard["bias"])', FORWARD,
        "in the sum once"),
    "the norm's backward before the sum": (
        "block", 'norm_backward(f_backward(group, dn), shard["gain"], unit)\n    return dy + dx',
        'norm_backward(dn, shard["gain"], unit)\n    return dy + f_backward(group, dx)', BACKWARD,
        "the gradient of 'gain' is not right"),
    "no gradient past the region": ("block", "return dy + dx", "return dx", BACKWARD, "gone past the region"),
    "a rank without heads and columns stays away (hidden)": (
        "block", "    partial, kept",
        '    if not shard["W_out"].size:\n        return x + shard["bias"], (n, unit, [])\n    partial, kept',
        {"check_block_forward", "check_block_backward"}, "needs all ranks"),
    "two all-reduces backward": (
        "block", "f_backward(group, dn)", "f_backward(group, dn / 4) + f_backward(group, 3 * dn / 4)",
        {"check_block_cost"}, "for the backward"),
    "the norm's gradients of own positions": (
        "sequence", "dgain, dshift = group.all_reduce(np.stack([dgain, dshift]))", "pass", SEQUENCE_BACKWARD,
        "over all positions"),
    "the bias's gradient of own positions": (
        "sequence", "dpartial.sum(axis=(0, 1))", "dy.sum(axis=(0, 1))", SEQUENCE_BACKWARD, "over all positions"),
    "does not gather N again in the backward (hidden)": (
        "sent", "elements = 5 * b", "elements = 4 * b", {"check_sent"}, "how many regions"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_keeping_all_of_n_loses_the_points_for_the_cost_alone():
    found = marks_of(LAB, sequence="""
import numpy as np

def sequence_forward(group, x, shard, d):
    n, unit = norm_forward(x, shard["gain"], shard["shift"])
    n = group.all_gather(n, axis=1)
    partial, kept = inside(n, shard, d)
    return x + group.reduce_scatter(partial, axis=1) + shard["bias"], (n, unit, kept)

def sequence_backward(group, dy, shard, cache):
    n, unit, kept = cache
    dpartial = group.all_gather(dy, axis=1)
    dn, grads = inside_backward(dpartial, n, shard, kept)
    dx, dgain, dshift = norm_backward(group.reduce_scatter(dn, axis=1), shard["gain"], unit)
    dgain, dshift = group.all_reduce(np.stack([dgain, dshift]))
    return dy + dx, {**grads, "gain": dgain, "shift": dshift, "bias": dpartial.sum(axis=(0, 1))}
""")
    assert lost_checks(found) == {"check_sequence_cost"}
    assert "for the backward" in found["check_sequence_cost"].said
