"""Write the environments for conda from pyproject.toml: `python tools/environment_yml.py`."""
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


class CondaPackage(NamedTuple):
    """A package of conda-forge."""

    name: str       # conda compares names letter by letter, `-` and `_` included
    newest: str     # version that was seen


# By the name on PyPI. Looked up on 2026-11-23 in copies of the recipes in conda-forge's repositories
# (conda-forge/NAME-feedstock) and of the lists of files on anaconda.org, whichever had the higher version. A copy can
# be older than what it copies, so conda-forge may have newer versions than these.
CONDA_FORGE = {
    "numpy": CondaPackage("numpy", "2.4.3"),
    "mpi4py": CondaPackage("mpi4py", "4.1.1"),
    "tokenizers": CondaPackage("tokenizers", "0.23.1"),
    "matplotlib": CondaPackage("matplotlib", "3.10.7"),
    "safetensors": CondaPackage("safetensors", "0.8.0"),
    "ml-dtypes": CondaPackage("ml_dtypes", "0.5.4"),
    "datasketch": CondaPackage("datasketch", "1.10.0"),
    "argcomplete": CondaPackage("argcomplete", "3.6.3"),
    "msgspec": CondaPackage("msgspec", "0.21.1"),
    "xxhash": CondaPackage("python-xxhash", "3.6.0"),
    "mpich": CondaPackage("mpich", "5.0.0"),
    "jupyter": CondaPackage("jupyter", "1.1.0"),
    "jupytext": CondaPackage("jupytext", "1.16.0"),
    "nbgrader": CondaPackage("nbgrader", "0.9.6"),
    "pytest": CondaPackage("pytest", "9.0.0"),
    "pytest-xdist": CondaPackage("pytest-xdist", "1.34.0"),
    "hypothesis": CondaPackage("hypothesis", "6.140.1"),
    "ruff": CondaPackage("ruff", "0.14.8"),
    "isort": CondaPackage("isort", "5.3.2"),
    "mypy": CondaPackage("mypy", "2.3.0"),
    "import-linter": CondaPackage("import-linter", "2.11"),
    "playwright": CondaPackage("playwright-python", "1.61.0"),
    # One package for CUDA 12 and 13: conda chooses by the driver.
    "cupy-cuda12x": CondaPackage("cupy", "14.1.0"),
    "nvidia-nccl-cu12": CondaPackage("nccl", "2.27.7.1"),
    "nvidia-cudnn-cu12": CondaPackage("cudnn", "9.23.1.3"),
    "nvidia-cudnn-frontend": CondaPackage("python-cudnn-frontend", "1.22.1"),
}

TEMPLATE = """\
# {purpose}
# Made from pyproject.toml by `python tools/environment_yml.py`: change it there.
name: {name}
channels:
  - conda-forge
dependencies:
{dependencies}
"""
PURPOSE = """\
For conda{where}: `conda env create -f {file}`,
# then `conda activate {name}` and `pip install --no-deps -e .`"""


def environments(project: dict) -> dict[str, str]:
    """Return the text of each file, by its path. `project` is the table of that name in pyproject.toml."""
    python, extras = f"python{project['requires-python']}", project["optional-dependencies"]
    notebooks = [*project["dependencies"], *extras["mpich"], *extras["notebook"]]
    everything = [*notebooks, *extras["prepare"], *extras["test"]]
    on_gpus = [*everything, *extras["cuda12"], *extras["cudnn12"]]
    here = PURPOSE.format(where="", file="environment.yml", name="shardlab")
    there = PURPOSE.format(where=" and NVIDIA GPUs", file="environment-cuda.yml", name="shardlab-cuda")
    return {"environment.yml": environment("shardlab", here, python, everything),
            "environment-cuda.yml": environment("shardlab-cuda", there, python, on_gpus),
            ".binder/environment.yml": environment("shardlab", "For Binder, which then runs postBuild.", python,
                                                   notebooks)}


def environment(name: str, purpose: str, python: str, requirements: Sequence[str]) -> str:
    """Return an environment with these requirements: from conda-forge, or by pip what conda-forge lacks."""
    from_conda, by_pip = [python], []
    for wanted in map(Requirement, requirements):
        package = conda_package(wanted)
        if wanted.specifier.contains(package.newest):
            from_conda.append(f"{package.name}{wanted.specifier}")
        else:
            by_pip.append(f"{wanted.name}{wanted.specifier}")
    lines = [f"  - {one}" for one in [*from_conda, "pip"]]
    if by_pip:
        lines += ["  - pip:     # newer versions than conda-forge was seen to have"]
        lines += [f"      - {one}" for one in by_pip]
    return TEMPLATE.format(purpose=purpose, name=name, dependencies="\n".join(lines))


def conda_package(wanted: Requirement) -> CondaPackage:
    """Return conda-forge's package for a requirement. Ends the program with a sentence if there is no line for it."""
    if wanted.name not in CONDA_FORGE:
        sys.exit(f"error: pyproject.toml requires {wanted.name}, but CONDA_FORGE in tools/environment_yml.py has no "
                 "line for it: look up how conda-forge calls it (the names can differ) and its newest version there, "
                 "and add the line.")
    return CONDA_FORGE[wanted.name]


def write_environments() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path, text in environments(project).items():
        (ROOT / path).write_text(text)


if __name__ == "__main__":
    write_environments()
