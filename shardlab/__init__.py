"""The bench around the machine: what runs it with all instruments, predicts, compares, proves, plans and shows it.

`shardlab X` on the command line is `shardlab/X` here. The machine (`mpi_impl/`) knows nothing of it.
"""
import mpi_impl  # noqa: F401  which sets the ranks' environment before anything imports NumPy
