"""A base install, `pip install ".[mpich]"`, in an environment that has more: what it would lack cannot be imported."""
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launching import MPI, ROOT, environment

BLOCKER = """\
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: a base install lacks it", name=name)

sys.meta_path.insert(0, Blocker())
"""


def base_environment(folder: Path, *extras: str) -> dict[str, str]:
    """Return the environment variables of a base install with these extras, for Python and the ranks that it starts.

    Python imports sitecustomize, which is written into the folder, before anything else.
    """
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=lacking(*extras)))
    return environment({"PYTHONPATH": str(folder)})


def lacking(*extras: str) -> set[str]:
    """Return the modules that are installed here, but not by the base dependencies, the package of MPI and the extras.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = {canonicalize_name(project["name"])}      # if pip has installed the project itself
    chosen = [project["optional-dependencies"][extra] for extra in extras]
    for requirement in sum(chosen, project["dependencies"] + [MPI.wheel]):
        add_required(Requirement(requirement), there)
    return {module for module, names in packages_distributions().items()
            if not there & set(map(canonicalize_name, names))}


def add_required(requirement: Requirement, there: set[str]) -> None:
    """Add a package and all that it requires."""
    name = canonicalize_name(requirement.name)
    if name in there or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        return
    there.add(name)
    with suppress(PackageNotFoundError):        # MPI may be the system's
        for text in distribution(name).requires or ():
            add_required(Requirement(text), there)
