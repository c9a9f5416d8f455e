"""Demos, each of one idea on any number of ranks: `python -m mpi_impl.launch -n 4 -m mpi_impl.demos.memory`."""
