"""A course is made of the labs, always the same. What students get shows no secret, and nothing of theirs is lost."""
import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import nbformat
import pytest

from course.grading import release
from course.grading.answers import about, answers_of
from course.grading.bundle import make_bundle, name_of
from course.grading.draws import SEED_FILE, read_seed
from course.grading.lab_source import labs, notebook_of
from course.grading.release import (ROOT, course_seed, main, make_course, open_gradebook, public_autograder,
                                    without_secrets)
from course.grading.stored import FOLDER
from course.grading.variants import FILE as VARIANT_FILE, PUBLIC
from course.tests.submissions import LAB1, LAB2, LAB_NAMES, released, solution
from reference.errors import UserError

MADE, VARIANT, OTHER = labs()[:2], "apple", "berry"
REGIONS = re.compile(r"### BEGIN (SOLUTION|HIDDEN TESTS)\n(.*?)### END \1", re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")     # nbgrader's own


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("courses") / "course"
    make_course(folder, MADE, VARIANT)
    return folder


@pytest.fixture(scope="module")
def bundle() -> dict[str, bytes]:
    """Return the files of the students' bundle."""
    return unzip(make_bundle({lab: released(lab) for lab in LAB_NAMES}, {}))


def path_of(course, lab, step="release") -> Path:
    return course / step / lab / f"{lab}.ipynb"


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "gradebook.db"}


def unzip(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# ---- what students get ----


def lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines()}


def code_of(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells)


def secret_lines(lab: str) -> set[str]:
    """Return the lines of a lab's solutions and hidden tests, but for those that stand elsewhere in public, too."""
    public = "\n".join([*(REGIONS.sub("", code_of(solution(each))) for each in LAB_NAMES),
                        *(path.read_text() for package in ("reference", "mpi_impl", "shardlab")
                          for path in (ROOT / package).rglob("*.py"))])
    hidden = "\n".join(region[1] for region in REGIONS.findall(code_of(solution(lab))))
    return {line for line in lines(hidden) - lines(public) if len(line) > 12}


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_no_line_of_a_solution_or_of_a_hidden_test_is_shown(bundle, lab):
    """Neither on the site, nor in the release, which is the same, nor anywhere in the bundle or a public autograder."""
    secret, shown = secret_lines(lab), {"site": code_of(without_secrets(solution(lab)))}
    assert len(secret) > 10 and not re.search("SOLUTION|HIDDEN", shown["site"])
    public = public_autograder(lab, released(lab), {})["grader.zip"]
    assert len(public) < 10 << 20, "Classroom 50 reads no more"
    for name, data in (unzip(public) | bundle).items():
        if not name.endswith((".bin", ".png")):
            shown[name] = code_of(nbformat.reads(data.decode(), 4)) if name.endswith(".ipynb") else data.decode()
    assert {name for name, text in shown.items() if secret & lines(text)} == set()


def test_the_seed_is_this_courses_own_and_in_nothing_that_students_get(course, tmp_path):
    seed = read_seed(course / SEED_FILE)
    holders = {name for name, data in contents(course).items()
               if seed.encode() in (b"".join(unzip(data).values()) if name.endswith(".zip") else data)}
    assert holders == {SEED_FILE, *(f"gradescope/{lab}.zip" for lab in (LAB1, LAB2))}
    assert seed.encode() not in (course / "gradebook.db").read_bytes()
    assert len(seed) == 32 and seed != course_seed(tmp_path / SEED_FILE) == course_seed(tmp_path / SEED_FILE)


@pytest.mark.parametrize("lab", [LAB1, LAB2])
def test_everything_in_a_course_is_of_its_variant_and_students_get_no_solution(course, lab):
    varied, files = solution(lab, VARIANT), contents(course)
    made, students = (nbformat.read(path_of(course, lab, step), 4) for step in ("source", "release"))
    grader, public, given = (unzip(files[name]) for name in (
        f"gradescope/{lab}.zip", f"classroom50/{lab}/grader.zip", "students/shardlab.zip"))
    assert code_of(made) == code_of(nbformat.reads(grader[f"{lab}.ipynb"].decode(), 4)) == code_of(varied)
    assert code_of(students) == code_of(without_secrets(varied)) != code_of(without_secrets(solution(lab)))
    assert code_of(nbformat.reads(given[f"shardlab/notebooks/labs/{lab}.ipynb"].decode(), 4)) == code_of(students)
    assert not any(cell.get("outputs") for cell in students.cells)
    assert public[f"{lab}.ipynb"].decode() == path_of(course, lab).read_text(), "students can read it"
    if lab == LAB2:
        results = files[f"expected/{lab}.bin"]
        assert results == public[f"course/labs/expected/{lab}.bin"] == given[f"shardlab/course/labs/expected/{lab}.bin"]
        assert results != (FOLDER / f"{lab}.bin").read_bytes()
    assert (course / VARIANT_FILE).read_text().strip() == VARIANT
    assert not any(name.startswith("shardlab/course/variants") or VARIANT_FILE in name for name in given)


@pytest.mark.parametrize("lab", LAB_NAMES)
def test_a_lab_is_a_notebook_that_nbgrader_takes_and_without_its_secrets_has_answers_to_write(lab):
    source, students = solution(lab), without_secrets(solution(lab))
    nbformat.validate(source)
    names = [about(cell)["grade_id"] for cell in source.cells if about(cell)]
    assert len(set(names)) == len(names) and len(source.cells) == len(students.cells)
    assert "%load_ext course.grading" in code_of(students) and set(answers_of(source)) == set(answers_of(students))
    assert all("raise NotImplementedError()" in answer for answer in answers_of(students).values())
    for cell in (cell for cell in source.cells if cell.cell_type == "code"):
        assert ("### BEGIN SOLUTION" in cell.source) == bool(about(cell).get("solution"))
        assert ("### BEGIN HIDDEN TESTS" not in cell.source) or about(cell).get("grade")
        assert not about(cell).get("solution") or cell.source.startswith(f"%%answer {about(cell)['grade_id']}\n")
        assert not (about(cell).get("locked") and re.search("default_rng|np.random", cell.source)), "a known seed"


def test_nothing_of_the_instructors_is_in_the_bundle_and_all_that_students_need(bundle):
    assert {name.split("/")[1] for name in bundle} == {
        "AGENTS.md", "LICENSE", "README.md", "benchmarks", "course", "docs", "mpi_impl", "notebooks", "reference",
        "requirements", "run.sh", "shardlab"}, "no tests, and so no mistakes"
    assert all(name.endswith(".svg") for name in bundle if "/benchmarks/" in name), "pictures of docs/"
    instructors = {f"shardlab/course/grading/{name}.py" for name in (
        "release", "grade", "submission", "nbgrader_checks", "gradescope", "canvas", "model_answers", "bundle")}
    assert not instructors & set(bundle)
    assert not re.search(r"answers\.sealed|seed|instructors|docs/\S*bug_zoo", " ".join(bundle))
    walkthroughs = {path.name for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {name.split("/")[-1] for name in bundle if re.match("shardlab/(notebooks|course/labs)/", name)} == {
        *walkthroughs, *(f"{lab}.ipynb" for lab in LAB_NAMES), *(path.name for path in FOLDER.iterdir()),
        "page_config.json", "default_setting_overrides.json"}
    assert not any(b'"jupytext"' in bundle[f"shardlab/notebooks/{name}"] for name in walkthroughs), "a twin"


def test_the_bundle_has_every_file_of_the_packages(bundle):
    """Also the sources of the kernels, which a run compiles."""
    packages = "reference", "mpi_impl", "shardlab"
    files = {name_of(path) for package in packages for path in (ROOT / package).rglob("*.*")
             if "__pycache__" not in path.parts}
    assert {f"shardlab/{name}" for name in files} <= bundle.keys()


def test_all_that_labs_and_packages_import_is_in_the_bundle(bundle):
    """It leaves out some modules of `course`; nothing that it keeps may import one of those."""
    named = {}
    for name, data in bundle.items():
        for module in re.findall(rb'^[\s"]*(?:from|import) ((?:course|mpi_impl|reference)[\w.]*)', data, re.MULTILINE):
            named[module.decode()] = name
    assert "course.grading.hunts" in named, "of lab 7 alone"
    for module, name in named.items():
        path = f"shardlab/{module.replace('.', '/')}"
        assert f"{path}.py" in bundle or f"{path}/__init__.py" in bundle, f"{name} imports {module}"


def test_every_link_in_the_bundle_leads_to_a_file_or_folder_in_it(bundle):
    there = {str(folder) for name in bundle for folder in (Path(name), *Path(name).parents)}
    dead, count = [], 0
    for name, data in bundle.items():
        text = ""
        if name.endswith(".ipynb"):
            cells = nbformat.reads(data.decode(), 4).cells
            text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        elif name.endswith((".md", ".html")):
            text = data.decode()
        for link in re.findall(r"(?:\]\(|(?:href|src)=\"|^\[.*\]: )([^)\"\s]+)", text, re.MULTILINE):
            target = os.path.normpath(os.path.join(os.path.dirname(name), link.partition("#")[0]))
            count += 1
            if not re.match("https?://|#|data:", link) and target not in there:
                dead.append((name, link))
    assert count > 100 and not dead
    named = "docs/glossary.md", "docs/tour_of_the_trainer.md", "course/cheat_sheet.html"
    assert {f"shardlab/{name}" for name in named} < bundle.keys()


def test_students_install_no_tools_of_developers_and_instructors(bundle):
    locks = {name: data.decode() for name, data in bundle.items() if name.endswith(".lock")}
    pinned = set(re.findall(r"^([\w.-]+)==", "".join(locks.values()), re.MULTILINE))
    assert {Path(name).stem for name in locks} == {"run", "notebook", "openmpi", "intel"}
    assert {"numpy", "jupyterlab", "jupytext"} < pinned
    assert not pinned & {"mypy", "ruff", "nbgrader", "hypothesis", "pytest", "sqlalchemy"}


def test_the_bundles_run_sh_has_the_students_commands_only(bundle, tmp_path):
    (tmp_path / "run.sh").write_bytes(bundle["shardlab/run.sh"])
    usage, refused = (subprocess.run(["bash", tmp_path / "run.sh", command], capture_output=True, text=True, timeout=60)
                      for command in ("help", "labs"))
    assert re.findall(r"^  ([a-z][\w-]*) ", usage.stdout, re.MULTILINE) == ["demo", "notebook", "setup"]
    assert refused.returncode == 1 and "labs" in refused.stderr and b"grading" not in bundle["shardlab/run.sh"]


# ---- what an instructor has ----


def test_made_again_it_is_made_the_same(course, capsys):
    before = contents(course)
    assert {f"source/{LAB1}/{LAB1}.ipynb", f"gradescope/{LAB1}.zip", SEED_FILE} < set(before)
    config = course / "nbgrader_config.py"
    config.write_text(config.read_text() + "\nc.IncludeHeaderFooter.header = ''     # the instructor's\n")
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.add_student("alice")
    before |= {"nbgrader_config.py": config.read_bytes()}
    make_course(course, MADE[:1])
    assert contents(course) == before, "without --variant, it is of its own"
    make_course(course, MADE[:1], OTHER)
    assert (course / VARIANT_FILE).read_text().strip() == OTHER and contents(course) != before
    make_course(course, MADE[:1], VARIANT)
    assert contents(course) == before
    with open_gradebook(course / "gradebook.db") as gradebook:
        assert gradebook.find_student("alice") and {one.name for one in gradebook.assignments} == {LAB1, LAB2}
    assert re.search(r"\d+ checks with 60 points, 2 texts with 10\n", capsys.readouterr().out)


def test_a_notebook_that_was_changed_by_hand_is_kept(course):
    path = path_of(course, LAB2, "source")
    as_it_was, notebook = path.read_text(), nbformat.read(path, 4)
    notebook.metadata["language_info"] = {"name": "python", "version": "3"}      # as Jupyter does when it saves
    notebook.cells[1].source += "\n# a remark"
    for text in nbformat.writes(notebook), "{":
        path.write_text(text)
        before = contents(course)
        with pytest.raises(UserError, match=f"changed by hand.*course/labs/{LAB2}.py"):
            make_course(course, MADE)
        assert contents(course) == before, "nothing is made if anything cannot be"
    path.write_text(as_it_was)


def test_submissions_forbid_other_cells_but_not_other_contents(course, tmp_path):
    """The gradebook of a course that runs stays as it is."""
    with open_gradebook(course / "gradebook.db") as gradebook:
        gradebook.update_or_create_student("bob")
        gradebook.add_submission(LAB1, "bob")
    text, changed = labs()[0].read_text(), tmp_path / f"{LAB1}.py"
    changed.write_text(text.replace('check="check_pass_on"', 'check="another"'))
    before = contents(course)
    with pytest.raises(UserError, match="has 1 submissions.*another, check_pass_on"):
        make_course(course, [changed])
    assert contents(course) == before
    changed.write_text(text.replace("Collectives", "COLLECTIVES"))
    make_course(course, [changed])
    with open_gradebook(course / "gradebook.db") as gradebook:
        assert len(gradebook.find_submission(LAB1, "bob").notebooks) == 1
    assert notebook_of(changed).cells[0].source == nbformat.read(path_of(course, LAB1), 4).cells[0].source
    for asked, words in (OTHER, "1 submissions to labs of the variant 'apple'.*'berry'"), (PUBLIC, "public variant"):
        with pytest.raises(UserError, match=words):
            make_course(course, MADE[:1], asked)


def test_a_folder_that_is_not_a_course_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "thesis.tex").write_text("years of work")
    monkeypatch.setattr(sys, "argv", ["labs", str(tmp_path)])
    with pytest.raises(UserError, match="holds thesis.tex"):
        main()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_nobody_else_can_read_a_course(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["labs", str(tmp_path / "course")])
    monkeypatch.setattr(release, "make_course", lambda folder, variant: release.write(folder / "x" / "x.ipynb", b"{}"))
    mask = os.umask(0o022)
    try:
        main()
    finally:
        os.umask(mask)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 3 and not any(path.stat().st_mode & 0o077 for path in made)
