"""A student's first hour: from the bundle alone, in JupyterLab, in a real browser."""
import time
import zipfile
from io import BytesIO

import nbformat
import pytest

from grading.bundle import make_bundle
from grading.release import without_secrets
from tests.browser import DESK, open_browser
from tests.labs.jupyterlab import Notebook, jupyterlab
from tests.labs.submissions import LAB1, solution

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("student")
    released = {LAB1: nbformat.writes(without_secrets(solution(LAB1)))}
    zipfile.ZipFile(BytesIO(make_bundle(released))).extractall(folder)
    return folder / "shardlab"


@pytest.fixture(scope="module")
def address(bundle, tmp_path_factory):
    with jupyterlab(bundle, tmp_path_factory.mktemp("home")) as address:
        yield address


@pytest.fixture(scope="module")
def page():
    with open_browser() as browser:
        yield browser.new_page(viewport=DESK)


def test_the_first_page_has_notebooks_and_no_questions(address, page, bundle):
    page.goto(f"{address}/lab?token=a")
    page.wait_for_selector(".jp-DirListing-item", timeout=120_000)
    files = page.locator(".jp-DirListing-itemText").all_inner_texts()
    assert "01_splitting_matrices.ipynb" in files and not [name for name in files if name.endswith(".py")]
    page.wait_for_timeout(3000)     # a question about news would come now
    assert page.locator(".Toastify__toast").count() == 0
    said = page.locator("body").inner_text() + "".join(
        tab.get_attribute("title") or "" for tab in page.locator(".jp-SideBar .lm-TabBar-tab").all())
    assert "Create Assignment" not in said and "Nbgrader" not in said


def test_a_student_solves_the_first_task(address, page, bundle):
    """With an error first, then a deadlock, an endless loop, and the right answer."""
    lab = Notebook(page, address, f"labs/{LAB1}.ipynb")
    lab.run("%load_ext grading")
    lab.run("import numpy as np\n\nfrom grading import check_data")
    task, check, head = "%%answer pass_on", "# Warming up", "%%answer pass_on\ndef pass_on(group, x):\n"
    lab.write(task, f"{head}    return x\n\n1 / 0")
    said, count = lab.run(task), lab.cells()[lab.find(task)]["count"]
    assert f"Cell In[{count}], line 5" in said and "ZeroDivisionError" in said

    lab.write(task, f"{head}    group.send(x, (group.rank + 1) % group.size)\n    return group.receive(0)")
    lab.run(task)
    assert "They wait in a cycle" in lab.run(check)

    lab.write(task, f"{head}    while True:\n        x = x + 1")
    lab.run(task)
    i = lab.start(check)
    time.sleep(3)       # the check's ranks start, and are at work until its limit of five seconds
    lab.interrupt()
    assert "in pass_on" in lab.said(i) and "pool.py" not in lab.said(i)

    lab.write(task, f"{head}    return group.exchange(x, (group.rank + 1) % group.size, (group.rank - 1) % group.size)")
    lab.run(task)
    assert lab.run(check) == "passed: pass_on on 2 and 4 ranks\n"
    lab.save()
    page.wait_for_timeout(2000)
    assert {path.suffix for path in (bundle / "notebooks" / "labs").iterdir() if path.is_file()} == {".ipynb"}
