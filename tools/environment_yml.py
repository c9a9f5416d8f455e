"""Write environment.yml, for those who use conda, from pyproject.toml: `python tools/environment_yml.py`."""
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

TEMPLATE = """\
# For conda: `conda env create -f environment.yml`, then `conda activate shardlab` and `pip install --no-deps -e .`
# Made from pyproject.toml by `python tools/environment_yml.py`: change it there.
name: shardlab
channels:
  - conda-forge
dependencies:
{dependencies}
  # On a machine with an NVIDIA GPU:
  # - cupy
"""


def environment_yml() -> str:
    """What environment.yml must say: Python, MPICH, and all that the programs, tests and notebooks need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = project["dependencies"] + extras["mpich"] + extras["notebook"] + extras["test"]
    lines = [f"python{project['requires-python']}", *packages, "pip"]
    return TEMPLATE.format(dependencies="\n".join(f"  - {line}" for line in lines))


if __name__ == "__main__":
    (ROOT / "environment.yml").write_text(environment_yml())
