"""What is made from pyproject.toml, or repeats a line of it, agrees with it."""
import re
import tomllib

import pytest

from tests.launching import ROOT
from tools.environment_yml import environment_yml

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def test_environment_yml_is_up_to_date():
    made = environment_yml()
    assert (ROOT / "environment.yml").read_text() == made, "Run `python tools/environment_yml.py`."


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
