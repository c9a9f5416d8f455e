"""The files that are made from pyproject.toml, or repeat a line of it, agree with it."""
import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest

from mpi_impl.runtime.mpis import KNOWN
from tests.launching import ROOT, write_script

PROJECT, COURSE = (tomllib.loads((ROOT / path).read_text())["project"]
                   for path in ("pyproject.toml", "course/pyproject.toml"))
EXTRAS = PROJECT["optional-dependencies"] | COURSE["optional-dependencies"] | {"course": COURSE["dependencies"]}
ENVIRONMENTS = "environment.yml", "environment-cuda.yml", ".binder/postBuild"
PURPOSES = {"run": ["mpich"], "notebook": ["notebook"], "course": ["course"], "test": ["prepare", "test"],
            "docs": ["docs", "quizzes"]}    # with extras
MPIS = "openmpi", "intel"       # those that --mpi puts in place of the one of run.lock
NAMES = [*PURPOSES, *(f"mpi/{mpi}" for mpi in MPIS)]
LOCKS = {name: (ROOT / "requirements" / f"{name}.lock").read_text() for name in NAMES}


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@pytest.mark.parametrize("path", ENVIRONMENTS)
def test_environments_of_conda_name_extras(path):
    """pip only warns of an extra that does not exist."""
    extras = re.findall(r"--editable \"?\.\[([\w,]+)\]", (ROOT / path).read_text())
    assert extras and set(",".join(extras).split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_course_has_the_version_of_the_project_and_only_its_folder_has_the_course():
    assert COURSE["version"] == PROJECT["version"] and COURSE["name"] == f"{PROJECT['name']}-course"
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert not [pattern for pattern in packages if fnmatch("course", pattern)]


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_lock_pins_what_its_purpose_adds_to_those_before_it(purpose):
    """And nothing that one before it pins already: an environment is as small as it can be."""
    wanted = {name(requirement) for extra in PURPOSES[purpose] for requirement in EXTRAS[extra]} - {PROJECT["name"]}
    wanted |= set(map(name, PROJECT["dependencies"])) if purpose == "run" else set()
    before = [*PURPOSES][:[*PURPOSES].index(purpose)]
    there = set().union(*map(pinned, before))
    assert wanted - there <= pinned(purpose) and wanted, "Run `./run.sh lock`."
    assert not pinned(purpose) & there
    assert LOCKS[purpose].startswith(f"-r {before[-1]}.lock\n") if before else "-r" not in LOCKS[purpose]


@pytest.mark.parametrize("mpi", MPIS)
def test_another_mpi_is_pinned_and_nothing_else(mpi):
    """Under the name of its extra, which installs the package that the launcher recommends."""
    wheels = {name(requirement) for requirement in PROJECT["optional-dependencies"][mpi]}
    assert pinned(f"mpi/{mpi}") == wheels <= {known.wheel for known in KNOWN}, "Run `./run.sh lock`."


# In place of pip, a Python that keeps what it should install.
KEEP = """case "$*" in *pip*) for word; do lock=$word; done; cd "${lock%/*}"; cat run.lock "$lock" >"$KEPT";; esac"""


@pytest.mark.parametrize("purpose", ["run", "test"])
@pytest.mark.parametrize("mpi", ["mpich", *MPIS, "system"])
def test_an_environment_of_another_mpi_has_the_pins_of_the_first_but_for_its_mpi(tmp_path, mpi, purpose):
    """And is not made in the place of the first."""
    write_script(tmp_path / "bin" / "python", KEEP)
    line = 'source ./run.sh help >/dev/null; choose_mpi "$1"; echo "${venv##*/}"; venv=$2; install_for "$3"'
    done = subprocess.run(["bash", "-c", line, "-", mpi, tmp_path, purpose], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "KEPT": str(tmp_path / "kept")})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == (".venv" if mpi == "mpich" else f".venv-{mpi}")
    own = pinned(f"mpi/{mpi}") if mpi in MPIS else {"mpich"} if mpi == "mpich" else set()
    assert pins((tmp_path / "kept").read_text()) == (pinned("run") - {"mpich"}) | own | pinned(purpose) - {"mpich"}


def test_an_mpi_that_does_not_exist_is_a_sentence():
    done = subprocess.run(["./run.sh", "test", "--mpi", "lam"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --mpi is 'lam', but must be mpich, openmpi, intel or system.\n"


def pinned(lock: str) -> set[str]:
    return pins(LOCKS[lock])


def pins(text: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))


@pytest.mark.parametrize("purpose", LOCKS)
def test_every_pin_has_a_hash_and_none_an_address(purpose):
    pins = re.split(r"\n(?=\S)", LOCKS[purpose])
    assert all("--hash=sha256:" in pin for pin in pins if not pin.startswith("-r "))
    for address in ("://", "--index", "--find-links", ".whl", "file:", " @ "):
        assert address not in LOCKS[purpose], "Run `./run.sh lock`, which leaves addresses out."

