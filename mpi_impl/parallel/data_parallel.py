"""Data parallelism on ranks. Its textbook twin is reference/data_parallel.py, which deals out the samples, too."""
from mpi_impl.comm.group import Group


def all_reduce_gradients(flat, group: Group) -> None:
    """The sum over replicas of their flat gradient buffers, in place: one collective for all tensors.

    A sum, not a mean: every replica has divided its losses by the size of the *global* batch already, so how the
    samples are spread over replicas and microbatches changes nothing.
    """
    group.all_reduce(flat, "gradients")
