"""The files that are made from pyproject.toml, or repeat a line of it, agree with it."""
import copy
import re
import tomllib

import pytest
import yaml
from packaging.version import Version

from tests.launching import ROOT
from tools.environment_yml import CONDA_FORGE, environments

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENTS = environments(PROJECT)
LOCK = (ROOT / "requirements.lock").read_text()


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@pytest.mark.parametrize("path", ENVIRONMENTS)
def test_environments_for_conda_are_up_to_date(path):
    assert (ROOT / path).read_text() == ENVIRONMENTS[path], "Run `python tools/environment_yml.py`."
    assert not (ROOT / path).is_symlink(), "Not every way to copy a repository keeps links."


def conda_and_pip(text: str) -> tuple[list[str], list[str]]:
    """Return a conda environment's dependencies: those of its channel, and those of pip."""
    dependencies = yaml.safe_load(text)["dependencies"]
    by_pip = [one["pip"] for one in dependencies if isinstance(one, dict)]
    return [one for one in dependencies if isinstance(one, str)], sum(by_pip, [])


@pytest.mark.parametrize("path", ENVIRONMENTS)
def test_conda_is_asked_for_what_conda_forge_has_and_pip_for_the_rest(path):
    """Each package of the channel has a name there and a version that was seen there; no requirement is left out."""
    from_conda, by_pip = conda_and_pip(ENVIRONMENTS[path])
    newest = dict(CONDA_FORGE.values())
    for one in from_conda:
        if name(one) not in ("python", "pip"):
            assert name(one) in newest, f"conda-forge has no {name(one)}"
            assert Version(newest[name(one)]) >= Version(one.partition(">=")[2] or "0")
    assert "pip" in from_conda or not by_pip, "conda needs pip itself for a list of pip's"
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["mpich"]:
        of_conda = requirement.replace(name(requirement), CONDA_FORGE[name(requirement)].name)
        assert (of_conda in from_conda) + (requirement in by_pip) == 1


def test_the_environment_for_gpus_has_what_the_extras_for_cuda_have():
    from_conda, by_pip = conda_and_pip(ENVIRONMENTS["environment-cuda.yml"])
    for cuda in "12", "13":
        extras = PROJECT["optional-dependencies"][f"cuda{cuda}"] + PROJECT["optional-dependencies"][f"cudnn{cuda}"]
        for requirement in extras:
            of_both = CONDA_FORGE[name(requirement).replace("cuda13x", "cuda12x").replace("cu13", "cu12")].name
            assert of_both in map(name, from_conda) or name(requirement) in map(name, by_pip)


@pytest.mark.parametrize("requirement, where", [
    ("ml-dtypes>=0.5", "  - ml_dtypes>=0.5\n"), ("msgspec", "  - msgspec\n"), ("msgspec>=99", "      - msgspec>=99\n")])
def test_a_new_dependency_comes_from_conda_forge_under_its_name_there_or_by_pip(requirement, where):
    text = environments(requiring(requirement))["environment.yml"]
    assert where in text and text.count(name(where.strip(" -"))) == 1


def test_a_dependency_that_was_not_looked_up_on_conda_forge_is_a_sentence():
    with pytest.raises(SystemExit, match="requires unheard-of, but CONDA_FORGE .* add the line"):
        environments(requiring("unheard-of>=1"))


def requiring(requirement: str) -> dict:
    project = copy.deepcopy(PROJECT)
    project["dependencies"] = [requirement]
    return project


@pytest.mark.parametrize("requirement", [
    *PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mpich"], *PROJECT["optional-dependencies"]["test"],
    *PROJECT["optional-dependencies"]["notebook"],
])
def test_the_lock_pins_every_dependency(requirement):
    assert re.search(rf"^{name(requirement)}==", LOCK, re.MULTILINE), "Run `./run.sh lock`."


def test_every_pin_has_a_hash_and_none_an_address():
    pins = re.split(r"\n(?=\S)", LOCK)
    assert all("--hash=sha256:" in pin for pin in pins)
    for address in ("://", "--index", "--find-links", ".whl", "file:", " @ "):
        assert address not in LOCK, "Run `./run.sh lock`, which leaves addresses out."


def test_run_sh_asks_for_the_python_of_pyproject():
    minimum = re.search(r'^minimum_python="(.+)"$', (ROOT / "run.sh").read_text(), re.MULTILINE)
    assert minimum and PROJECT["requires-python"] == f">={minimum[1]}"
