"""Variants of labs: a variant's own solution has all points, and those of the public lab and of others have few."""
import pytest
from hypothesis import given, settings, strategies as st

from course.grading.answers import about, answers_of
from course.grading.lab_source import notebook_of
from course.grading.model_answers import questions_of
from course.grading.release import without_secrets
from course.grading.variants import PUBLIC, has_variants, replace_all, source_of
from course.tests.submissions import LAB_NAMES, SOURCES, lost_checks, marks_of, solution
from course.tests.test_course import code_of
from tests.deep import one_fast_of

VARIED = [lab for lab in LAB_NAMES if has_variants(lab)]
SEEDS = ("apple", "berry", "cherry")
SEEDED = [(lab, seed) for lab in VARIED for seed in SEEDS]
TRIES = [(lab, seed, other) for lab, seed in SEEDED for other in (PUBLIC, SEEDS[SEEDS.index(seed) - 1])]
HALF = 30


# ---- what is drawn ----


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(VARIED), st.text(min_size=1, max_size=8))
def test_a_variant_has_other_tasks_in_the_same_cells(lab, seed):
    """A text that a lab no longer contains is an error. The open questions stay, since they have sealed answers."""
    public, varied = solution(lab), notebook_of(SOURCES[lab], seed)
    assert [about(cell) for cell in varied.cells] == [about(cell) for cell in public.cells]
    for name, source in answers_of(varied).items():
        compile(source, name, "exec")
    assert questions_of(lab, source_of(SOURCES[lab], seed)) == questions_of(lab, SOURCES[lab].read_text())
    students, released = without_secrets(varied), without_secrets(public)
    assert code_of(students) != code_of(released), "students see another task"
    changed = {name for name, source in answers_of(varied).items() if source != answers_of(public)[name]}
    assert len(changed) >= 2, "and solutions are others"


@pytest.mark.parametrize("lab", VARIED)
def test_a_seed_draws_one_variant_and_few_of_a_few_hundred_seeds_draw_the_same(lab):
    assert source_of(SOURCES[lab], "0") == source_of(SOURCES[lab], "0") != source_of(SOURCES[lab])
    assert len({source_of(SOURCES[lab], str(i)) for i in range(300)}) > 270


def test_texts_are_replaced_at_the_same_time_the_longest_first():
    assert replace_all("a b ab", {"a": "b", "b": "a", "ab": "c"}) == "b a c"
    with pytest.raises(ValueError, match="does not contain 'd'"):
        replace_all("a b ab", {"a": "b", "d": "e"})


# ---- points ----


@pytest.mark.parametrize("lab, seed", one_fast_of(12, SEEDED))
def test_a_variants_solution_has_all_points_and_its_release_none(lab, seed):
    assert lost_checks(marks_of(lab, variant=seed)) == set()
    released = marks_of(lab, variant=seed, **answers_of(without_secrets(solution(lab, seed))))
    assert not any(mark.points for mark in released.values())


@pytest.mark.parametrize("lab, seed, other", one_fast_of(18, TRIES))
def test_last_years_solution_gets_less_than_half(lab, seed, other):
    found = marks_of(lab, variant=seed, **answers_of(solution(lab, other)))
    assert sum(mark.points for mark in found.values()) < HALF
