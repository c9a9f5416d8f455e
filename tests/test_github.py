"""The files of this repository that GitHub reads: workflows, forms for issues, the citation, a container."""
import json
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.launching import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def test_actionlint_finds_nothing_in_the_workflows():
    if not shutil.which("actionlint"):
        pytest.skip("actionlint is not installed")
    run = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_every_program_of_the_repository_that_a_workflow_runs_exists():
    steps = [step.get("run", "") for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()
             for step in job["steps"]]
    front_door = (ROOT / "run.sh").read_text()
    commands = [step.split()[1] for step in steps if step.startswith("./run.sh")]
    assert set(commands) == {"setup", "test", "test-all", "docs"}
    assert all(f"\n    {command}) " in front_door for command in commands)


def test_workflows_test_every_python_that_is_supported():
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["locked"]["strategy"]["matrix"]
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(11, 15)]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_the_machine_has_and_its_fields_have_names(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    assert "shardlab doctor" in path.read_text()
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names)) and all(field["attributes"]["label"] for field in form["body"])


def test_the_citation_agrees_with_pyproject():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] and citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_the_container_is_set_up_by_a_command_that_exists():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["postCreateCommand"] == "./run.sh setup test"
    assert ".venv/bin/python" in container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
