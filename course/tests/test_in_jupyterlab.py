"""A student's first task in a notebook, and all solved labs in a browser, with the bundle alone."""
import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from threading import Timer

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from course.grading.answers import about, name_of
from course.grading.bundle import make_bundle
from course.tests.submissions import LAB1, LAB_NAMES, released, solution
from tests.browser import DESK, open_browser

# What stands below each cell in JupyterLab, as soon as a certain cell has something below it, or there is an error.
OUTPUTS = """last => {
    const cells = jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.sharedModel.toJSON());
    const below = cells.map(cell => cell.outputs || []);
    return below[last].length || below.flat().some(output => output.output_type == 'error') ? below : null;
}"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    zipfile.ZipFile(BytesIO(make_bundle({lab: released(lab) for lab in LAB_NAMES}, {}))).extractall(folder)
    return folder / "shardlab"


@pytest.fixture
def run(bundle):
    """Start a kernel that finds the packages of the bundle alone. Return a function that runs a cell in it, interrupts
    it after some seconds, and returns what is below the cell, without colours.
    """
    manager, client = start_new_kernel(cwd=bundle / "notebooks" / "labs",
                                       env={**os.environ, "PYTHONPATH": str(bundle)})

    def run(source: str, seconds: float | None = None) -> str:
        said: list[str] = []
        if seconds:
            Timer(seconds, manager.interrupt_kernel).start()
        client.execute_interactive(source, timeout=120, output_hook=lambda message: said.append(
            message["content"].get("text") or "\n".join(message["content"].get("traceback", ()))))
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(said))

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_student_solves_the_first_task(run, bundle):
    """With an error first, then a deadlock, an endless loop, and the right answer."""
    cells = {cell.metadata.nbgrader.grade_id: cell.source for cell in nbformat.read(
        bundle / "notebooks" / "labs" / f"{LAB1}.ipynb", 4).cells if "nbgrader" in cell.metadata}
    head, check = "%%answer pass_on\ndef pass_on(group, x):\n", cells["check_pass_on"]
    run("%load_ext course.grading")
    run(cells["tools"])
    said = run(f"{head}    return x\n\n1 / 0")
    assert "line 5" in said and "ZeroDivisionError" in said and "The answer pass_on has failed" in said
    run(f"{head}    group.send(x, (group.rank + 1) % group.size)\n    return group.receive(0)")
    assert "They wait in a cycle" in run(check)
    run(f"{head}    while True:\n        x = x + 1")
    said = run(check, seconds=3)     # its ranks start, and are at work until its limit of five seconds
    assert "You interrupted pass_on" in said and "in pass_on" in said and "pool.py" not in said
    run(f"{head}    return group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)")
    assert "passed: pass_on on 2 and 4 ranks\n" in run(check)


@pytest.fixture(scope="module")
def jupyterlab(bundle):
    """Start JupyterLab as the bundle's run.sh does, and a browser. Yield JupyterLab's address, and a page."""
    options = {"ServerApp.root_dir": bundle, "ServerApp.port": 0, "IdentityProvider.token": "",
               "LabApp.expose_app_in_browser": True}
    environment = {**os.environ, "PYTHONPATH": str(bundle), "JUPYTER_CONFIG_PATH": f"{bundle}/notebooks/.jupyter"}
    with open_browser() as browser, subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
             *(f"--{name}={value}" for name, value in options.items())],
            cwd=bundle, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://127[.\d]+:\d+", line)))
            page = browser.new_page(viewport=DESK)
            page.set_default_timeout(240_000)
            yield address, page
        finally:
            server.terminate()


@pytest.mark.deep
@pytest.mark.parametrize("lab", LAB_NAMES)
def test_a_student_runs_a_solved_lab_in_a_browser(jupyterlab, bundle, lab):
    """With "Restart the kernel and run all cells", as before a submission."""
    address, page = jupyterlab
    path = bundle / "notebooks" / "labs" / f"{lab}.ipynb"
    notebook = nbformat.read(path, 4)
    for cell, solved in zip(notebook.cells, solution(lab).cells, strict=True):
        if name_of(cell):
            cell.source = solved.source
    nbformat.write(notebook, path)
    checks = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code" and about(cell).get("points")]
    page.goto(f"{address}/lab/tree/notebooks/labs/{path.name}?reset")
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("button", name="Restart the kernel and run all cells").click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    below = page.wait_for_function(OUTPUTS, arg=checks[-1]).json_value()
    assert [output for outputs in below for output in outputs if output["output_type"] == "error"] == []
    assert [i for i in checks if "passed: " not in str(below[i])] == []
