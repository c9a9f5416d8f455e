"""What notebooks have besides: `%load_ext mpi_impl.notebook` gives the magic `%%ranks` and shows figures."""
from mpi_impl.notebook.ranks import load_ipython_extension

__all__ = ["load_ipython_extension"]
