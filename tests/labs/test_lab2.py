"""Lab 2: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of

LAB = "lab2_gated_mlp"

MLP = {"check_mlp", "check_mlp_cost"}
SEQUENCE = {"check_sequence", "check_sequence_cost"}

MISTAKES = {
    "splits G and U as one matrix": (
        "shard", "np.hstack([G, U])", 'np.array_split(whole["GU"], group.size, 1)[group.rank]', {"check_shard"},
        "column j of both"),
    "only where columns are even (hidden)": (
        "shard", "np.array_split(one, group.size, axis)", "np.split(one, group.size, axis)", {"check_shard"},
        "equal division"),
    "joins shard by shard": (
        "join", "[gate for gate, _ in halves] + [up for _, up in halves]",
        "[np.concatenate(half, -1) for half in halves]", {"check_join"}, "all of G stands left"),
    "f's backward adds nothing up": (
        "f_and_g", "return group.all_reduce(dx)", "return dx", {"check_f_and_g", *MLP}, "only a part"),
    "g's backward adds up": (
        "f_and_g", "return dy", "return group.all_reduce(dy)", {"check_f_and_g", *MLP}, "may not be used here"),
    "e to the 10000 (hidden)": (
        "inside", "sigma = 0.5 + 0.5 * np.tanh(0.5 * z)", "sigma = np.exp(z) / (1 + np.exp(z))", {"check_inside"},
        "got nan"),
    "the slope of SiLU without its second half": (
        "inside", "(sigma + a * (1 - sigma))", "sigma", {"check_inside_backward", *MLP, *SEQUENCE}, "line by line"),
    "every rank adds the bias": (
        "mlp", 'g(group, partial) + shard["bias_D"]', 'g(group, partial + shard["bias_D"])', MLP, "in the sum once"),
    "a rank without columns stays away (hidden)": (
        "mlp", "    partial, kept",
        '    if not shard["D"].size:\n        return x * 0 + shard["bias_D"], (x, [])\n    partial, kept',
        {"check_mlp"}, "needs all ranks"),
    "two all-reduces backward": (
        "mlp", "f_backward(group, dx), {", "f_backward(group, dx / 4) + f_backward(group, 3 * dx / 4), {",
        {"check_mlp_cost"}, "backward, a rank has sent"),
    "the bias's gradient of own positions": (
        "sequence", "dpartial.sum(axis=(0, 1))", "dy.sum(axis=(0, 1))", SEQUENCE, "over all positions"),
}


@pytest.mark.parametrize("mistake", one_fast_of(8, MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_keeping_all_of_x_loses_the_points_for_the_cost_alone():
    found = marks_of(LAB, sequence="""
def sequence_forward(group, x, shard):
    x = group.all_gather(x, axis=1)
    partial, kept = inside(x, shard)
    return group.reduce_scatter(partial, axis=1) + shard["bias_D"], (x, kept)

def sequence_backward(group, dy, shard, cache):
    dy = group.all_gather(dy, axis=1)
    dx, grads = inside_backward(dy, cache[0], shard, cache[1])
    return group.reduce_scatter(dx, axis=1), {**grads, "bias_D": dy.sum((0, 1))}
""")
    assert lost_checks(found) == {"check_sequence_cost"}
    assert "for the backward" in found["check_sequence_cost"].said
