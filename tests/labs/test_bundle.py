"""The students' bundle: nothing of the instructor's is in it, and it works alone."""
import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from jupyter_core.paths import jupyter_path
from jupyter_server.services.config.manager import ConfigManager

from grading.bundle import ROOT, make_bundle, students_commands
from grading.lab_source import labs
from grading.release import without_secrets
from grading.stored import FOLDER
from tests.labs.submissions import solution
from tests.labs.test_release import REGIONS, lines

LABS = [source.stem for source in labs()]
PACKAGES = ("shardlab/reference/", "shardlab/mpi_impl/", "shardlab/grading/")


@pytest.fixture(scope="module")
def archive() -> zipfile.ZipFile:
    data = make_bundle({lab: nbformat.writes(without_secrets(solution(lab))) for lab in LABS})
    return zipfile.ZipFile(BytesIO(data))


@pytest.fixture(scope="module")
def files(archive) -> dict[str, str]:
    return {name: archive.read(name).decode() for name in archive.namelist() if not name.endswith(".bin")}


def cells_of(text: str) -> str:
    return "\n".join(cell.source for cell in nbformat.reads(text, 4).cells)


@pytest.mark.parametrize("lab", LABS)
def test_no_line_of_a_solution_or_of_a_hidden_test_is_in_it(files, lab):
    """But for those that a lab itself shows, and lines that the project's code has, too."""
    shown = lines("\n".join(REGIONS.sub("", cell.source) for each in LABS for cell in solution(each).cells))
    hidden = lines("\n".join(region[1] for cell in solution(lab).cells for region in REGIONS.findall(cell.source)))
    public = lines("\n".join(path.read_text() for package in ("reference", "mpi_impl")
                             for path in (ROOT / package).rglob("*.py")))
    own = {line for line in hidden - shown - public if len(line) > 12}
    assert len(own) > 10
    for name, text in files.items():
        found = own & lines(cells_of(text) if name.endswith(".ipynb") else text)
        assert not found, name


def test_no_hidden_test_and_no_page_of_the_instructors_is_in_it(files):
    kinds = {name.split("/")[1] for name in files}
    assert kinds == {"AGENTS.md", "LICENSE", "README.md", "docs", "grading", "mpi_impl", "notebooks", "reference",
                     "requirements", "run.sh"}, "no tests, and so no mistakes"
    for name, text in files.items():
        if not name.startswith(PACKAGES):
            assert "HIDDEN" not in text and "BEGIN SOLUTION" not in text, name
    instructors = {f"shardlab/grading/{name}.py" for name in ("release", "grade", "submission", "nbgrader_checks",
                                                              "gradescope", "canvas", "model_answers", "bundle")}
    assert not instructors & set(files) and not any("answers.sealed" in name or "seed" in name for name in files)
    assert "bug_zoo" not in "".join(name for name in files if name.startswith("shardlab/docs"))


def test_all_that_its_packages_import_is_in_it(files):
    """The bundle leaves out some modules of `grading`; none that it keeps may import one of those."""
    for name, text in files.items():
        for module in re.findall(r"^\s*(?:from|import) ((?:grading|mpi_impl|reference)[\w.]*)", text, re.MULTILINE):
            path = f"shardlab/{module.replace('.', '/')}"
            assert f"{path}.py" in files or f"{path}/__init__.py" in files, f"{name} imports {module}"


def test_it_has_every_walkthrough_and_lab_once_without_a_twin(files):
    walkthroughs = {f"shardlab/notebooks/{path.name}" for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert {name for name in files if name.startswith("shardlab/notebooks/") and name.endswith((".py", ".ipynb"))} == \
        walkthroughs | {f"shardlab/notebooks/labs/{lab}.ipynb" for lab in LABS}
    assert not any("jupytext" in nbformat.reads(files[name], 4).metadata for name in walkthroughs)


def test_it_has_the_results_that_checks_compare_with(archive):
    assert {path.name for path in FOLDER.iterdir()} == {name.split("/")[-1] for name in archive.namelist()
                                                        if "/labs/expected/" in name}


def test_its_run_sh_has_the_students_commands_only(archive, tmp_path):
    script = students_commands((ROOT / "run.sh").read_text())
    (tmp_path / "run.sh").write_text(script)
    usage = subprocess.run(["bash", tmp_path / "run.sh", "help"], capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r"^  ([\w-]+) ", usage, re.MULTILINE) == ["demo", "notebook", "setup"]
    done = subprocess.run(["bash", tmp_path / "run.sh", "labs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no command 'labs'" in done.stderr
    assert "pytest" not in script and "grading" not in script
    assert archive.getinfo("shardlab/run.sh").external_attr >> 16 == 0o755


def test_jupyterlab_hides_what_students_do_not_need(files, monkeypatch):
    """JupyterLab's own reader finds the settings: hidden extensions exist, and news are not asked about."""
    folder = "shardlab/notebooks/.jupyter"
    assert f'JUPYTER_CONFIG_PATH="$root/{folder.removeprefix("shardlab/")}' in files["shardlab/run.sh"]
    assert f"{folder}/labconfig/page_config.json" in files
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(ROOT / "notebooks" / ".jupyter"))
    settings = ConfigManager(config_dir_name="labconfig")
    hidden = settings.get("page_config")["disabledExtensions"]
    assert hidden["@jupyter/nbgrader"] and hidden["jupyterlab-jupytext"]
    for extension in hidden:
        assert any((Path(place) / extension / "package.json").is_file() for place in jupyter_path("labextensions"))
    notices = settings.get("default_setting_overrides")["@jupyterlab/apputils-extension:notification"]
    assert notices == {"fetchNews": "false", "checkForUpdates": False}


ANSWERED = """
import os, sys
import nbformat
from nbclient import NotebookClient
path = sys.argv[1]
notebook = nbformat.read(path, 4)
for name, text in nbformat.read(sys.argv[2], 4).metadata["answers"].items():
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.startswith(f"%%answer {name}\\n"):
            cell.source = text
NotebookClient(notebook, kernel_name="python3", timeout=300).execute(cwd=os.path.dirname(path))
import reference
print(reference.__file__)
print("\\n".join(out.text for cell in notebook.cells for out in cell.get("outputs", []) if "text" in out))
"""


@pytest.mark.deep
@pytest.mark.parametrize("page", ["01_splitting_matrices", "labs/lab1_collectives"])
def test_it_alone_runs_a_walkthrough_and_a_labs_checks(archive, tmp_path, page):
    """In another folder, with nothing else of the project on Python's path. The lab's answers are the solution's."""
    archive.extractall(tmp_path)
    bundle, answers = tmp_path / "shardlab", nbformat.v4.new_notebook()
    answers.metadata["answers"] = {cell.metadata.nbgrader["grade_id"]: cell.source
                                   for cell in solution("lab1_collectives").cells
                                   if cell.cell_type == "code" and cell.metadata.get("nbgrader", {}).get("solution")}
    nbformat.write(answers, tmp_path / "answers.ipynb")
    (tmp_path / "run.py").write_text(ANSWERED)
    done = subprocess.run([sys.executable, tmp_path / "run.py", bundle / "notebooks" / f"{page}.ipynb",
                           tmp_path / "answers.ipynb"], cwd=bundle / "notebooks", capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(bundle)}, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(bundle)), "the packages are the bundle's"
    if "lab" in page:
        assert done.stdout.count("passed: ") == 9
