"""Lab 4: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of, plant

LAB = "lab4_smoothed_cross_entropy"

LOSS = {"check_loss", "check_extreme", "check_cost"}

MISTAKES = {
    "every rank subtracts its own maximum": (
        "log_sum_exp", 'group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")',
        "logits.max(axis=-1, initial=-np.inf)", {"check_log_sum_exp"}, "the same number"),
    "nothing is subtracted": (
        "log_sum_exp", 'group.all_reduce(logits.max(axis=-1, initial=-np.inf), "max")', "np.zeros(logits.shape[:2])",
        {"check_log_sum_exp"}, "got inf|got nan"),
    "a rank without tokens stays away (hidden)": (
        "predict", "    highest =", "    if not logits.size:\n        return np.zeros(logits.shape[:2])\n    highest =",
        {"check_predict"}, "which needs all ranks"),
    "the last of those with the largest logit (hidden)": (
        "predict", "return -group.all_reduce(-lowest, \"max\")",
        "return group.all_reduce(np.where(lowest == none, -1, lowest), \"max\")", {"check_predict"}, "is the lowest"),
    "the mean over the rank's tokens": (
        "loss_forward", "eps / V, 0.0", "eps / max(len(ids), 1), 0.0", {"check_backward", *LOSS}, "not the rank's"),
    "zero times minus infinity (hidden)": (
        "loss_forward", "(wanted * np.where(ids < V, logits, 0))", "(wanted * logits)", {"check_extreme"}, "got nan"),
    "ignored tokens have a loss": (
        "loss_forward", "np.where(counts, lse - picked + zeta * lse * lse, 0.0)", "lse - picked + zeta * lse * lse",
        LOSS, "-100 is no token"),
    "no gradient of the z-loss": (
        "loss_forward", " * (1 + 2 * zeta * lse)[..., None]", "", {"check_backward"}, "in every term"),
    "the mean of the ranks' means": (
        "mean_loss", "group.all_reduce(np.array([loss[counts].sum(), counts.sum()]))",
        "group.all_reduce(np.array([loss[counts].mean(), 1]))", {"check_mean"}, "on all ranks together"),
    "no token counts anywhere (hidden)": (
        "mean_loss", "total / max(number, 1), counts / max(number, 1)", "total / number, counts / number",
        {"check_mean"}, "And if there are none"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


def test_five_numbers_for_each_token_lose_the_points_for_the_cost_alone():
    found = marks_of(LAB, **plant(
        LAB, "loss_forward", "picked = group.all_reduce((wanted * np.where(ids < V, logits, 0)).sum(axis=-1))",
        "picked = group.all_reduce(np.stack([(wanted * np.where(ids < V, logits, 0)).sum(-1)] * 3)).mean(0)"))
    assert lost_checks(found) == {"check_cost"}
    assert "are enough" in found["check_cost"].said


def test_keeping_the_logits_loses_the_points_for_the_cost_alone():
    found = marks_of(LAB, **plant(LAB, "loss_forward", ", 0.0), slope\n", ", 0.0), (slope, logits)\n"),
                     **plant(LAB, "loss_backward", "* cache", "* cache[0]"))
    assert lost_checks(found) == {"check_cost"}
    assert "for the backward" in found["check_cost"].said


def test_gathering_the_logits_loses_the_points_for_the_loss():
    """They would be right: a check that only compares could not tell."""
    found = marks_of(LAB, **plant(LAB, "loss_forward", "lse, ids = log_sum_exp(group, logits),", """
    every = group.all_gather(logits, axis=-1)
    top = every.max(-1)
    lse, ids = top + np.log(np.exp(every - top[..., None]).sum(-1)),"""))
    assert lost_checks(found) == {"check_backward", *LOSS}
    assert "group.all_gather may not be used here. This task allows: all_reduce" in found["check_loss"].said
