"""Runs walkthroughs one after the other in one kernel, with the same ranks: to start them takes longer than most cells.

Each begins with no names, in the kernel or on ranks, and counts its cells from 1.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tools import notebooks

# What every notebook calls Pool is, in this kernel, the one that is there.
BEFORE_THE_FIRST = """
from mpi_impl.notebook import ranks as module
from mpi_impl.notebook.cell import run_cell

class SamePool:
    def __init__(self, pool, forget):
        self.pool, self.pools, self.forget, self.run_cell = pool, {}, forget, run_cell

    def __call__(self, size, show):
        found = self.pools.setdefault(size, self.pool(size, show=show))
        if found.up:
            found.run(size, self.run_cell, self.forget, "forget")
        return found

module.Pool = SamePool(module.Pool, "for _ in set(globals()) - {'np', '_'}: del globals()[_]\\ndel _")
"""
BEFORE_EACH = """
shell = get_ipython()
shell.extension_manager.loaded.discard("mpi_impl.notebook")
shell.reset(new_session=True)
get_ipython().execution_count = 1
"""


@contextmanager
def one_kernel() -> Iterator[None]:
    """Let `tools.notebooks.execute` run all notebooks in one kernel for the duration of the `with` block."""
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(notebooks.FOLDER))
    try:
        run(kernel, BEFORE_THE_FIRST)
        with mock.patch.object(notebooks, "NotebookClient", partial(renew, kernel)):
            yield
    finally:
        kernel.shutdown_kernel()


def renew(kernel: KernelManager, notebook, **settings) -> NotebookClient:
    run(kernel, BEFORE_EACH)
    return NotebookClient(notebook, km=kernel, **settings)


def run(kernel: KernelManager, source: str) -> None:
    NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), km=kernel).execute()
