"""Variants of labs: a variant's own solution has all points, and those of the public lab and of others have few."""
import nbformat
import pytest
from hypothesis import given, settings, strategies as st

from course.grading.answers import about, answers_of
from course.grading.draws import SEED_FILE
from course.grading.lab_source import labs, notebook_of
from course.grading.model_answers import questions_of
from course.grading.release import make_course, open_gradebook, without_secrets
from course.grading.stored import FOLDER
from course.grading.variants import FILE, PUBLIC, has_variants, replace_all, source_of
from course.tests.submissions import LAB1, LAB2, LAB_NAMES, SOURCES, lost_checks, marks_of, solution
from course.tests.test_course import code_of, contents, path_of, unzip
from reference.errors import UserError
from tests.deep import one_fast_of

VARIED = [lab for lab in LAB_NAMES if has_variants(lab)]
SEEDS = ("apple", "berry", "cherry")
SEEDED = [(lab, seed) for lab in VARIED for seed in SEEDS]
TRIES = [(lab, seed, other) for lab, seed in SEEDED for other in (PUBLIC, SEEDS[SEEDS.index(seed) - 1])]
HALF = 30

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")     # nbgrader's own


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


# ---- a course ----


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants") / "course"
    make_course(folder, labs()[:2], SEEDS[0])
    return folder


def test_everything_in_a_course_is_of_its_variant(course):
    bundle = unzip((course / "students" / "shardlab.zip").read_bytes())
    for lab in (LAB1, LAB2):
        varied, made = solution(lab, SEEDS[0]), nbformat.read(path_of(course, lab, "source"), 4)
        grader = unzip((course / "gradescope" / f"{lab}.zip").read_bytes())[f"{lab}.ipynb"]
        assert code_of(made) == code_of(nbformat.reads(grader.decode(), 4)) == code_of(varied)
        students = nbformat.reads(bundle[f"shardlab/notebooks/labs/{lab}.ipynb"].decode(), 4)
        assert code_of(students) == code_of(without_secrets(varied))
    results = bundle[f"shardlab/course/labs/expected/{LAB2}.bin"]
    assert results == (course / "expected" / f"{LAB2}.bin").read_bytes() != (FOLDER / f"{LAB2}.bin").read_bytes()
    practice = unzip((course / "classroom50" / LAB2 / "grader.zip").read_bytes())
    assert practice[f"course/labs/expected/{LAB2}.bin"] == results
    assert (course / FILE).read_text().strip() == SEEDS[0]
    assert not any(name.startswith("shardlab/course/variants") or FILE in name for name in bundle)


def test_a_course_keeps_its_variant_and_refuses_another_once_there_are_submissions(course):
    before = contents(course)
    make_course(course, labs()[:1])
    assert contents(course) == before, "without --variant, it is made the same"
    make_course(course, labs()[:1], SEEDS[1])
    assert (course / FILE).read_text().strip() == SEEDS[1] and contents(course) != before
    make_course(course, labs()[:1], SEEDS[0])
    assert contents(course) == before and SEED_FILE in before
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.update_or_create_student("bob")
        gradebook.add_submission(LAB1, "bob")
    with pytest.raises(UserError, match="1 submissions to labs of the variant 'apple'.*'berry'"):
        make_course(course, labs()[:1], SEEDS[1])
    with pytest.raises(UserError, match="the public variant"):
        make_course(course, labs()[:1], PUBLIC)
    make_course(course, labs()[:1], SEEDS[0])
    assert contents(course) == before
