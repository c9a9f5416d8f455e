"""The base install: `pip install ".[mpich]"` is enough for everything but pictures, notebooks and tests."""
import subprocess
import sys

import pytest

from tests.base_install import base_environment, lacking
from tests.launching import ROOT

# Modules for notebooks, which need the extra `notebook`, and for programs that have PyTorch.
OF_OTHERS = {"shardlab.notebook", "shardlab.compare.their_runs.shardlab_recorder"}

IMPORT_ALL = """\
import importlib, pkgutil
import mpi_impl, reference, shardlab
failed = {}
for package in (mpi_impl, reference, shardlab):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            failed[module.name] = error.name
print(failed)
"""


@pytest.fixture
def python(tmp_path):
    """Return a function that runs Python as a base install would, in a folder of its own, and returns its output."""
    env = base_environment(tmp_path) | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def run(status: int, *arguments) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=120)
        assert done.returncode == status, done.stderr
        return done.stdout or done.stderr
    return run


def test_what_a_base_install_lacks():
    """Only packages of the other extras are blocked, and no dependency of the base."""
    assert {"IPython", "ipywidgets", "jupyter_client", "nbformat", "nbgrader", "matplotlib", "rensa"} <= lacking()
    assert not {"numpy", "mpi4py", "psutil", "tokenizers"} & lacking()


def test_every_module_that_is_not_for_notebooks_can_be_imported(python):
    failed = eval(python(0, "-c", IMPORT_ALL))
    assert {module for module in failed if failed[module] != "matplotlib"} <= OF_OTHERS, failed
    assert "shardlab.notebook" in failed, "nothing was blocked"


@pytest.mark.parametrize("option", ["--plot loss.png", "--trace trace"])
def test_a_picture_is_refused_before_work_starts(python, option):
    output = python(2, "-m", "mpi_impl.pretrain_gpt", *option.split())
    assert output.startswith(f"error: {option.split()[0]} needs the package matplotlib, which is not installed: ")
