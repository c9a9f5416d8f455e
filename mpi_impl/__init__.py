"""The machine: the layers of `reference/`, under the same names, where each rank holds one shard.

A rank is one process of a job started by `mpirun` or by `python -m mpi_impl.launch`. It computes on NumPy arrays
(or CuPy's, on a GPU) and meets the others in the collectives of `mpi_impl.comm`. Read a file of `reference/` first,
then its twin here: what was added is the communication.
"""
from mpi_impl.runtime.interrupt import end_until_ready

end_until_ready()   # before whatever takes time

from mpi_impl.runtime.rank_environment import prepare  # noqa: E402

prepare()  # before any other file of the package imports NumPy or starts MPI
