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
PURPOSES = {"run": ["mpich"], "notebook": ["notebook"], "test": ["prepare", "test"], "docs": ["docs"]}    # with extras
LOCKS = {purpose: (ROOT / "requirements" / f"{purpose}.lock").read_text() for purpose in PURPOSES}


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


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_lock_pins_what_its_purpose_adds_to_those_before_it(purpose):
    """And nothing that one before it pins already: an environment is as small as it can be."""
    extras = PROJECT["optional-dependencies"]
    added = {extra: set(map(name, extras[extra])) for extra in sum(PURPOSES.values(), [])}
    wanted = set().union(*(added[extra] for extra in PURPOSES[purpose]))
    wanted |= set(map(name, PROJECT["dependencies"])) if purpose == "run" else set()
    before = [*PURPOSES][:[*PURPOSES].index(purpose)]
    assert wanted <= pinned(purpose), "Run `./run.sh lock`."
    assert not pinned(purpose) & set().union(*map(pinned, before))
    assert LOCKS[purpose].startswith(f"-r {before[-1]}.lock\n") if before else "-r" not in LOCKS[purpose]


def pinned(purpose: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", LOCKS[purpose], re.MULTILINE))


@pytest.mark.parametrize("purpose", PURPOSES)
def test_every_pin_has_a_hash_and_none_an_address(purpose):
    pins = re.split(r"\n(?=\S)", LOCKS[purpose])
    assert all("--hash=sha256:" in pin for pin in pins if not pin.startswith("-r "))
    for address in ("://", "--index", "--find-links", ".whl", "file:", " @ "):
        assert address not in LOCKS[purpose], "Run `./run.sh lock`, which leaves addresses out."


def test_run_sh_asks_for_the_python_of_pyproject():
    minimum = re.search(r'^minimum_python="(.+)"$', (ROOT / "run.sh").read_text(), re.MULTILINE)
    assert minimum and PROJECT["requires-python"] == f">={minimum[1]}"
