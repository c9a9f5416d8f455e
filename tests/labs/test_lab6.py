"""Lab 6: each mistake loses the right points, with a message that explains it."""
import pytest

from tests.deep import one_fast_of
from tests.labs.submissions import assert_loses, lost_checks, marks_of

LAB = "lab6_zero"
STEPS = {"check_zero1", "check_zero1_cost", "check_zero2"}      # what the helper `update` is part of

MISTAKES = {
    "a shape's sizes added up": (
        "layout", "int(np.prod(shape))", "int(np.sum(shape))", {"check_layout"}, "from_flat"),
    "the last rank takes the rest (hidden)": (
        "layout", "[rank * (n // d) + min(rank, n % d) for rank in range(d + 1)]",
        "[rank * (n // d) for rank in range(d)] + [n]",
        {"check_bounds"}, "one more"),
    "a mean of means (hidden)": (
        "zero1_step", "group.reduce_scatter(gradient * samples), samples,", "group.reduce_scatter(gradient), 1,",
        {"check_zero1"}, "weight each gradient with its samples"),
    "the norm of the own part": (
        "zero1_step", "np.sqrt(group.all_reduce((mean * mean).sum()))", "np.sqrt((mean * mean).sum())", STEPS,
        "the same number on all ranks"),
    "scaled to the norm, even where it is small": (
        "zero1_step", "(min(1, clip / norm) if norm > 0 else 1)", "clip / max(norm, 1e-300)",
        {"check_zero1", "check_zero2"}, "norm"),
    "a whole gradient on every rank": (                 # right, but it sends more
        "zero1_step", "group.reduce_scatter(gradient * samples)",
        "np.array_split(group.all_reduce(gradient * samples), group.size)[group.rank]", {"check_zero1_cost"},
        "are enough"),
    "the bucket laid at the part's beginning": (
        "take_bucket", "first = start + mine.start - ends[group.rank]", "first = 0",
        {"check_take_bucket", "check_take_bucket_cost"}, "overlap"),
    "no samples, no part in the step (hidden)": (
        "zero1_step", "return update(group, params, momentum, group",
        "if not samples:\n        return params, momentum\n    return update(group, params, momentum, group",
        {"check_zero1"}, "which needs all ranks"),
    "all of the bucket to everyone": (                  # right, but it sends more
        "take_bucket", "group.exchange(bucket[piece(to)], to, (group.rank - k) % group.size)",
        "group.exchange(bucket, to, (group.rank - k) % group.size)[mine]", {"check_take_bucket_cost"}, "are enough"),
    "the sum taken for the mean": (
        "zero2_step", "return update(group, params, momentum, own, samples,",
        "return update(group, params, momentum, own, 1,", {"check_zero2"}, "not yet a mean"),
    "parts that are not padded (hidden)": (
        "plan", "pieces = [(file, max(first - file * length, 0), min(end - file * length, length)) for file in "
        "range(old_d)]", "old = bounds(n, old_d)\n    pieces = [(file, max(first - old[file], 0), "
        "min(end, old[file + 1]) - old[file]) for file in range(old_d)]", {"check_plan"}, "where does a file begin"),
}


@pytest.mark.parametrize("mistake", one_fast_of(len(MISTAKES), MISTAKES))
def test_a_mistake_loses_its_points(mistake):
    assert_loses(LAB, mistake, *MISTAKES[mistake])


KINDS = {"zero1_step": ("check_zero1", "3", "expected two arrays"),
         "take_bucket": ("check_take_bucket", "[1.0]", "shape"),
         "layout": ("check_layout", "'a'", "array of numbers"),
         "plan": ("check_plan", "[(9, 0.5, 'a')]", "is no piece")}


def test_a_result_of_the_wrong_kind_is_reported():
    names = {"layout": ("to_flat", "from_flat", "bounds")}
    found = marks_of(LAB, **{answer: "".join(f"def {name}(*args):\n    return {value}\n"
                                             for name in names.get(answer, (answer,)))
                             for answer, (_, value, _) in KINDS.items()})
    for check, _, words in KINDS.values():
        assert check in lost_checks(found) and words in found[check].said
