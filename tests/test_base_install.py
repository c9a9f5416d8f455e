"""The base install: `pip install ".[mpich]"` is enough for everything but notebooks and tests."""
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

    def run(*arguments) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout
    return run


def test_what_a_base_install_lacks():
    """Only packages of the other extras are blocked, and no dependency of the base."""
    assert {"IPython", "ipywidgets", "jupyter_client", "nbformat", "nbgrader", "pytest", "scipy"} <= lacking()
    assert not {"numpy", "mpi4py", "matplotlib", "PIL", "tokenizers"} & lacking()


def test_every_module_that_is_not_for_notebooks_can_be_imported(python):
    failed = eval(python("-c", IMPORT_ALL))
    assert set(failed) <= OF_OTHERS, failed
    assert "shardlab.notebook" in failed, "nothing was blocked"


def test_a_run_draws_its_whole_pictures(python, tmp_path):
    """(Other programs that draw are run by tests/test_readme_commands.py.)"""
    python("-m", *"""mpi_impl.pretrain_gpt --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16
        --train-iters 1 --eval-iters 0 --plot loss.png --trace trace""".split())
    for picture in "loss.png", "trace/timeline.png":
        data = (tmp_path / picture).read_bytes()
        assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82"), picture
