"""One BLAS thread for the process of the tests, beside which ranks are at work. To be imported before NumPy."""
import os
import sys

from mpi_impl.runtime.rank_environment import thread_settings

if "numpy" not in sys.modules:
    made = thread_settings(os.environ)
    os.environ.update(made)
    import numpy  # noqa: F401
    for name in made:       # what tests start chooses for itself
        del os.environ[name]
