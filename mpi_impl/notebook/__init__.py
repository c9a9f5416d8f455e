"""The notebook extension: `%load_ext mpi_impl.notebook` adds the magic `%%ranks` and displays figures."""
from mpi_impl.notebook.ranks import load_ipython_extension

__all__ = ["load_ipython_extension"]
