"""A course is made of the labs, always the same. The release shows no secret, and nothing of the students' is lost."""
import os
import re
import sys
import zipfile
from io import BytesIO

import nbformat
import pytest

from grading import checks, release
from grading.answers import answers_of
from grading.draws import SEED_FILE, read_seed
from grading.lab_source import labs, notebook_of
from grading.release import ROOT, course_seed, main, make_course, open_gradebook, without_secrets
from reference.errors import UserError
from tests.deep import one_fast_of
from tests.labs.submissions import marks_of

LABS = [path.stem for path in labs()]
REGIONS = re.compile(r"### BEGIN (SOLUTION|HIDDEN TESTS)\n(.*?)### END \1", re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")     # nbgrader's own


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("courses") / "course"
    make_course(folder)
    return folder


def read_notebook(course, lab, step="release"):
    return nbformat.read(course / step / lab / f"{lab}.ipynb", as_version=4)


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "gradebook.db"}


def unzip(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()} - {""}


@pytest.mark.parametrize("lab", LABS)
def test_no_line_of_a_solution_or_of_a_hidden_test_is_in_the_release(course, lab):
    """But for those that stand outside of the hidden regions, too."""
    source, released = read_notebook(course, lab, "source"), read_notebook(course, lab)
    shown = lines("\n".join(REGIONS.sub("", cell.source) for cell in source.cells))
    secret = lines("\n".join(region[1] for cell in source.cells for region in REGIONS.findall(cell.source))) - shown
    assert len(secret) > 10
    text = (course / "release" / lab / f"{lab}.ipynb").read_text()
    assert not secret & lines("\n".join(cell.source for cell in released.cells))
    assert "SOLUTION" not in text and "HIDDEN" not in text
    assert not any(cell.get("outputs") for cell in released.cells)
    shown_on_the_site = without_secrets(notebook_of(ROOT / "notebooks" / "labs" / f"{lab}.py"))
    assert [cell.source for cell in shown_on_the_site.cells] == [cell.source for cell in released.cells]


def test_the_seed_is_this_courses_own_and_in_nothing_that_students_get(course, tmp_path):
    seed = read_seed(course / SEED_FILE)
    holders = {name for name, data in contents(course).items()
               if seed.encode() in (b"".join(unzip(data).values()) if name.endswith(".zip") else data)}
    assert holders == {SEED_FILE, *(f"gradescope/{lab}.zip" for lab in LABS)}
    assert seed.encode() not in (course / "gradebook.db").read_bytes()
    assert len(seed) == 32 and seed != course_seed(tmp_path / SEED_FILE) == course_seed(tmp_path / SEED_FILE)


@pytest.mark.parametrize("lab", LABS)
def test_no_check_draws_from_a_seed_that_is_written_in_the_lab(course, lab):
    """Answers may, which are the students' own."""
    for cell in read_notebook(course, lab, "source").cells:
        if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("locked"):
            assert "default_rng" not in cell.source and "np.random" not in cell.source


@pytest.mark.parametrize("lab", LABS)
def test_the_release_is_the_lab_with_answers_to_write(course, lab):
    source, released = read_notebook(course, lab, "source"), read_notebook(course, lab)
    assert len(source.cells) == len(released.cells)
    assert any("%load_ext grading" in cell.source for cell in released.cells)
    assert set(answers_of(source)) == set(answers_of(released))
    assert all("raise NotImplementedError()" in answer for answer in answers_of(released).values())
    assert released.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("lab", one_fast_of(4, LABS[1:] + LABS[:1]))
def test_who_hands_in_the_release_as_it_is_has_no_points(course, lab, monkeypatch):
    """On limited ranks, as grading does it."""
    monkeypatch.setattr(checks, "LIMIT", 5.0)
    found = marks_of(lab, **answers_of(read_notebook(course, lab)))
    assert found and {name: mark.points for name, mark in found.items() if mark.points} == {}


def test_made_again_it_is_made_the_same(course, capsys, monkeypatch):
    before, lab = contents(course), LABS[0]
    assert {f"source/{lab}/{lab}.ipynb", f"release/{lab}/{lab}.ipynb", f"gradescope/{lab}.zip", SEED_FILE} < set(before)
    config = course / "nbgrader_config.py"
    config.write_text(config.read_text() + "\nc.IncludeHeaderFooter.header = ''     # the instructor's\n")
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.add_student("alice")
    make_course(course, labs()[:1])
    assert contents(course) == before | {"nbgrader_config.py": config.read_bytes()}
    with open_gradebook(course / "gradebook.db") as gradebook:
        assert gradebook.find_student("alice") and {one.name for one in gradebook.assignments} == set(LABS)
    said = capsys.readouterr().out
    assert re.match(rf"{lab}: source, release and Gradescope's autograder; \d+ checks with 60 points, "
                    r"2 texts with 10\n", said)


def test_a_notebook_that_was_changed_by_hand_is_kept(course):
    lab = LABS[-1]
    path = course / "source" / lab / f"{lab}.ipynb"
    as_it_was, notebook = path.read_text(), read_notebook(course, lab, "source")
    notebook.metadata["language_info"] = {"name": "python", "version": "3"}      # as Jupyter does when it saves
    notebook.cells[1].source += "\n# a remark"
    nbformat.write(notebook, path)
    before = contents(course)
    with pytest.raises(UserError, match=rf"{lab}.ipynb has been changed by hand.*Make the change in "
                                        rf"notebooks/labs/{lab}.py"):
        make_course(course)
    assert contents(course) == before, "nothing is made if anything cannot be"
    path.write_text("{")
    with pytest.raises(UserError, match="changed by hand"):
        make_course(course)
    path.write_text(as_it_was)


def test_submissions_forbid_other_cells_but_not_other_contents(course, tmp_path):
    """The gradebook of a course that runs stays as it is."""
    lab = LABS[0]
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.update_or_create_student("bob")
        gradebook.add_submission(lab, "bob")
    text = labs()[0].read_text()
    check = re.search(r'# %% check="(\w+)"', text)[1]
    changed = tmp_path / f"{lab}.py"
    changed.write_text(text.replace(f'check="{check}"', 'check="another"'))
    before = contents(course)
    with pytest.raises(UserError, match=f"{lab} has 1 submissions.*another, {check}"):
        make_course(course, [changed])
    assert contents(course) == before
    changed.write_text(text.replace("Collectives", "COLLECTIVES"))
    make_course(course, [changed])
    with open_gradebook(course / "gradebook.db") as gradebook:
        assert len(gradebook.find_submission(lab, "bob").notebooks) == 1
    assert notebook_of(changed).cells[0].source == read_notebook(course, lab).cells[0].source


def test_a_folder_that_is_no_course_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["labs", str(tmp_path)])
    with pytest.raises(UserError, match="is not a course: it holds thesis.tex"):
        main()
    monkeypatch.setattr(sys, "argv", ["labs", str(tmp_path / "thesis.tex")])
    with pytest.raises(UserError, match="is a file, where a folder is needed"):
        main()
    monkeypatch.setattr(sys, "argv", ["labs", "/proc/course"])
    with pytest.raises(UserError, match="/proc/course cannot be written"):
        main()
    monkeypatch.setattr(sys, "argv", ["labs", "--force"])
    with pytest.raises(UserError, match="./run.sh labs has no option --force"):
        main()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_nobody_else_can_read_a_course(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["labs", str(tmp_path / "course")])
    monkeypatch.setattr(release, "make_course", lambda folder: release.write(folder / "source" / "x.ipynb", b"{}"))
    mask = os.umask(0o022)
    try:
        main()
    finally:
        os.umask(mask)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 3 and not any(path.stat().st_mode & 0o077 for path in made)


def test_run_sh_has_the_commands():
    text = (ROOT / "run.sh").read_text()
    assert '-m grading.release "$@"' in text and "-m jupyterlab" in text
