"""Lab 3: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of, plant

LAB = "lab3_heads_and_tokens"

BACKWARD = {"check_attention_backward", "check_attention_cost"}

MISTAKES = {
    "a key/value head once for each query head": (
        "heads", "sorted({i // (a // k) for i in queries})", "[i // (a // k) for i in queries]",
        {"check_heads", "check_shard", *BACKWARD}, "how many query heads read the same one"),
    "splits K and V as Q": (
        "shard", 'whole[key].take(keys if key in "KV" else queries, axis=1)',
        "np.array_split(whole[key], group.size, 1)[group.rank]", {"check_shard"}, "Q and O go by query heads"),
    "adds its own first (hidden)": (
        "sum_over", "total = arrived[ranks[0]]\n    for other in ranks[1:]:",
        "total = x\n    for other in set(ranks) - {group.rank}:", {"check_sum_over"}, "of the first rank"),
    "receives from the rank that it sends to (hidden)": (
        "sum_over", "ranks[(me - step) % len(ranks)]", "ranks[(me + step) % len(ranks)]", {"check_sum_over"},
        "in a cycle: 1 -> 2 -> 4 -> 1"),
    "counts a rank's heads as if they were all (hidden)": (
        "attention", "j = keys.index(head // (a // k))\n        summand", "j = i // (a // k)\n        summand",
        {"check_attention_forward", *BACKWARD}, "query head i of all"),
    "the last query head's gradient": (
        "attention", 'grads["K"][:, j] += dk', 'grads["K"][:, j] = dk', BACKWARD, "gradient of 'K' is not right"),
    "own query heads' gradient alone": (
        "attention", "sum_over(group, both, holders(a, k, group.size)[key])", "both", BACKWARD, "here and on other"),
    "a token that occurs twice counts once": (
        "embed", "np.add.at(drows, tokens[here] - mine[:1], dx[here] * np.sqrt(dx.shape[-1]))",
        "drows[tokens[here] - mine[:1]] += dx[here] * np.sqrt(dx.shape[-1])", {"check_embedding_backward"}, "twice"),
    "pad learns": ("embed", " & (tokens != pad)", "", {"check_embedding_backward"}, "pad has none"),
    "scaled before the sum, too": (
        "embed", "x[here] = rows", "x[here] = np.sqrt(rows.shape[1]) * rows", {"check_embedding"}, "expected"),
    "tokens as if they divided (hidden)": (
        "logits", "np.array_split(np.arange(V), group.size)[group.rank] == pad",
        "np.arange(len(rows)) + group.rank * (V // group.size) == pad", {"check_logits"}, "which of its rows is pad"),
}


@pytest.mark.parametrize("mistake", one_fast_of(8, MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_telling_everybody_loses_the_points_for_the_cost_alone():
    """Every rank adds up the gradients of all key/value heads, its own and those of which it has none."""
    found = marks_of(LAB, **plant(LAB, "attention", """
    for j, key in enumerate(keys):
        both = np.stack([grads["K"][:, j], grads["V"][:, j]])
        grads["K"][:, j], grads["V"][:, j] = sum_over(group, both, holders(a, k, group.size)[key])
""", """
    for name in "KV":
        every = np.zeros((dy.shape[2], k, grads[name].shape[2]))
        every[:, keys] = grads[name]
        grads[name] = group.all_reduce(every)[:, keys]
"""))
    assert lost_checks(found) == {"check_attention_cost"}
    assert "concern only those" in found["check_attention_cost"].said
