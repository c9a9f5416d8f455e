"""A student at JupyterLab: the bundle's server, and a notebook in a real browser, with its cells and outputs."""
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from mpi_impl.launch.launcher import stop

WIDGET = "window.jupyterapp.shell.currentWidget"
CELLS = f"""() => JSON.stringify({WIDGET}.content.model.toJSON().cells.map(cell => ({{
    source: [].concat(cell.source).join(''), count: cell.execution_count,
    said: (cell.outputs || []).map(out => [].concat(out.text || out.traceback || []).join('\\n')).join('\\n')}})))"""
READY = f"""path => window.jupyterapp && {WIDGET}?.context?.path == path && {WIDGET}.context.isReady
    && {WIDGET}.context.sessionContext.session?.kernel"""
SELECT = f"""i => {{ const notebook = {WIDGET}.content; notebook.activeCellIndex = i; notebook.deselectAll();
    notebook.mode = 'command'; notebook.node.focus(); return notebook.scrollToItem(i); }}"""
PATIENCE = 120.0        # seconds


@contextmanager
def jupyterlab(bundle: Path, home: Path) -> Iterator[str]:
    """Serve the notebooks of an unpacked bundle as its run.sh does, and yield the address, with its token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(bundle),
                    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                    "JUPYTER_CONFIG_PATH": str(bundle / "notebooks" / ".jupyter")}
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}",
         "--ServerApp.token=a", f"--ServerApp.root_dir={bundle / 'notebooks'}", "--LabApp.expose_app_in_browser=True"],
        cwd=bundle / "notebooks", env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{address}/api?token=a"))
        yield address
    finally:
        stop(server)


def answers(address: str) -> bool:
    try:
        return urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def wait_until(condition) -> None:
    """Wait until a condition is true. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("JupyterLab does not get there")
        time.sleep(0.2)


class Notebook:
    """A notebook in the browser. Cells are found by the beginning of their text."""

    def __init__(self, page, address: str, path: str):
        self.page = page
        page.goto(f"{address}/lab/tree/{path}?token=a&reset")      # without the notebooks that were open before
        page.wait_for_function(READY, arg=path, timeout=1000 * PATIENCE)

    def cells(self) -> list[dict]:
        return json.loads(self.page.evaluate(CELLS))

    def find(self, beginning: str) -> int:
        return next(i for i, cell in enumerate(self.cells()) if cell["source"].startswith(beginning))

    def write(self, beginning: str, text: str) -> None:
        """Replace the text of a cell."""
        self.page.evaluate(f"([i, text]) => {WIDGET}.content.model.cells.get(i).sharedModel.setSource(text)",
                           [self.find(beginning), text])

    def start(self, beginning: str) -> int:
        """Select a cell and press Shift-Enter. Return its index."""
        i = self.find(beginning)
        self.page.evaluate(SELECT, i)
        self.page.keyboard.press("Shift+Enter")
        return i

    def run(self, beginning: str) -> str:
        """Run a cell to its end. Return what is below it, without colours."""
        self.page.evaluate(f"i => {{ {WIDGET}.content.model.cells.get(i).sharedModel.execution_count = null }}",
                           self.find(beginning))       # the stored one may be that of the run, too
        i = self.start(beginning)
        wait_until(lambda: self.cells()[i]["count"] is not None and self.idle())
        return self.said(i)

    def idle(self) -> bool:
        return self.page.evaluate(f"() => {WIDGET}.context.sessionContext.session.kernel.status") == "idle"

    def said(self, i: int) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.cells()[i]["said"])

    def interrupt(self) -> None:
        """Click on the square button."""
        self.page.locator('[data-command="notebook:interrupt-kernel"]:visible').first.click()
        wait_until(self.idle)

    def save(self) -> None:
        self.page.evaluate(f"() => {WIDGET}.context.save()")
