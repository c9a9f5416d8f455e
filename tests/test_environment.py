"""The files that are made from pyproject.toml, or repeat a line of it, agree with it."""
import re
import tomllib

import pytest

from tests.launching import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENTS = "environment.yml", "environment-cuda.yml", ".binder/postBuild"
PURPOSES = {"run": ["mpich"], "notebook": ["notebook"], "course": ["course"], "test": ["prepare", "test"],
            "docs": ["docs"]}    # with extras
LOCKS = {purpose: (ROOT / "requirements" / f"{purpose}.lock").read_text() for purpose in PURPOSES}


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@pytest.mark.parametrize("path", ENVIRONMENTS)
def test_environments_of_conda_name_extras(path):
    """pip only warns of an extra that does not exist."""
    extras = re.findall(r"--editable \"?\.\[([\w,]+)\]", (ROOT / path).read_text())
    assert extras and set(",".join(extras).split(",")) <= PROJECT["optional-dependencies"].keys()


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

