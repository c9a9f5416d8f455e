"""A student's first task, in a notebook, with the bundle alone."""
import os
import re
import time
import zipfile
from io import BytesIO

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from course.grading.bundle import make_bundle
from course.grading.release import without_secrets
from course.tests.submissions import LAB1, solution


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    released = {LAB1: nbformat.writes(without_secrets(solution(LAB1)))}
    zipfile.ZipFile(BytesIO(make_bundle(released, {}))).extractall(folder)
    return folder / "shardlab"


class Kernel:
    """A notebook's kernel that finds the packages of the bundle alone."""

    def __init__(self, bundle, folder):
        self.manager, self.client = start_new_kernel(cwd=folder, env={**os.environ, "PYTHONPATH": str(bundle)})

    def run(self, source: str, seconds: float | None = None) -> str:
        """Run a cell, and interrupt it after some seconds. Return what is below it, without colours."""
        said: list[str] = []
        if seconds:
            started = self.client.execute(source)
            time.sleep(seconds)
            self.manager.interrupt_kernel()
            while (message := self.client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle" or \
                    message["parent_header"]["msg_id"] != started:
                said += message["content"].get("traceback", [])
        else:
            self.client.execute_interactive(source, timeout=120, output_hook=lambda message: said.append(
                message["content"].get("text") or "\n".join(message["content"].get("traceback", ()))))
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(said))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(bundle):
    found = Kernel(bundle, bundle / "notebooks" / "labs")
    yield found
    found.close()


def test_a_student_solves_the_first_task(kernel, bundle):
    """With an error first, then a deadlock, an endless loop, and the right answer."""
    cells = {cell.metadata.nbgrader.grade_id: cell.source for cell in nbformat.read(
        bundle / "notebooks" / "labs" / f"{LAB1}.ipynb", 4).cells if "nbgrader" in cell.metadata}
    head, check = "%%answer pass_on\ndef pass_on(group, x):\n", cells["check_pass_on"]
    kernel.run("%load_ext course.grading")
    kernel.run(cells["tools"])
    said = kernel.run(f"{head}    return x\n\n1 / 0")
    assert "line 5" in said and "ZeroDivisionError" in said and "The answer pass_on has failed" in said
    kernel.run(f"{head}    group.send(x, (group.rank + 1) % group.size)\n    return group.receive(0)")
    assert "They wait in a cycle" in kernel.run(check)
    kernel.run(f"{head}    while True:\n        x = x + 1")
    said = kernel.run(check, seconds=3)     # its ranks start, and are at work until its limit of five seconds
    assert "You interrupted pass_on" in said and "in pass_on" in said and "pool.py" not in said
    kernel.run(f"{head}    return group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)")
    assert "passed: pass_on on 2 and 4 ranks\n" in kernel.run(check)
