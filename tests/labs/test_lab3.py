"""Lab 3: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of, plant

LAB = "lab3_latents_and_tokens"

BACKWARD = {"check_attention_backward", "check_attention_cost"}

MISTAKES = {
    "splits the latent, too": (
        "shard", '(("Q", 1),', '(("C", 1), ("Q", 1),', {"check_shard"}, "needs all of the others"),
    "only where heads are even (hidden)": (
        "shard", "np.array_split(whole", "np.split(whole", {"check_shard"}, "equal division"),
    "takes what is sharded by heads for partial (hidden)": (
        "is_partial", '("C", "R", "x")', '("C", "R", "x", "K", "V")', {"check_is_partial"}, "one rank's heads only"),
    "forgets the rope key (hidden)": (
        "is_partial", '("C", "R", "x")', '("C", "x")', {"check_is_partial"}, "'R' is partial"),
    "the rope key is not turned": (
        "inside", 'rope(x @ shard["R"])[', '(x @ shard["R"])[', {"check_inside", "check_inside_backward"},
        "rope turns the last r columns"),
    "the rope key's gradient is not turned back": (
        "inside", "rope(dk[..., -r:].sum(axis=1), -1)", "rope(dk[..., -r:].sum(axis=1))",
        {"check_inside_backward"}, "gradient of rank 0 of 2 of 'R'"),
    "the last head's gradient of the rope key": (
        "inside", "dk[..., -r:].sum(axis=1)", "dk[:, -1:, :, -r:].sum(axis=1)",
        {"check_inside_backward"}, "all heads share the rope key"),
    "the latent's gradient from the keys alone": (
        "inside", ' + np.einsum("basd,cad->bsc", dv, shard["V"])', "", {"check_inside_backward"},
        "into keys and values"),
    "own heads' gradient of the latent alone": (
        "attention", 'group.all_reduce(np.hstack([grads["C"], grads["R"]]))', 'np.hstack([grads["C"], grads["R"]])',
        BACKWARD, "some are partial"),
    "adds up what is complete": (
        "attention", "    return group.all_reduce(dx), grads",
        '    grads["K"] = group.all_reduce(grads["K"])\n    return group.all_reduce(dx), grads', BACKWARD,
        "complete already"),
    "a rank without heads stays away (hidden)": (
        "attention", "    both = group", '    if not shard["O"].size:\n        return dy * 0, grads\n    both = group',
        BACKWARD, "needs all ranks"),
    "a token that occurs twice counts once": (
        "embed", "np.add.at(drows, tokens[here] - mine[:1], dx[here] * np.sqrt(dx.shape[-1]))",
        "drows[tokens[here] - mine[:1]] += dx[here] * np.sqrt(dx.shape[-1])", {"check_embedding_backward"}, "twice"),
    "pad learns": ("embed", " & (tokens != pad)", "", {"check_embedding_backward"}, "pad has none"),
    "scaled before the sum, too": (
        "embed", "x[here] = rows", "x[here] = np.sqrt(rows.shape[1]) * rows", {"check_embedding"}, "expected"),
    "tokens as if they divided (hidden)": (
        "logits", "np.array_split(np.arange(V), group.size)[group.rank] == pad",
        "np.arange(len(rows)) + group.rank * (V // group.size) == pad", {"check_logits_backward"},
        "which of its rows is pad"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_adding_up_the_gradients_twice_loses_the_points_for_the_cost_alone():
    """Each time half of their values."""
    found = marks_of(LAB, **plant(LAB, "attention", 'group.all_reduce(np.hstack([grads["C"], grads["R"]]))',
                                  'sum(group.all_reduce(np.hstack([grads["C"], grads["R"]]) / 2) for _ in range(2))'))
    assert lost_checks(found) == {"check_attention_cost"}
    assert "for the backward" in found["check_attention_cost"].said
