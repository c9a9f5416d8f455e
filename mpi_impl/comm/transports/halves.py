"""16-bit floats by MPI, which does not know these formats: their bits move as integers, and sums are ours."""
import numpy as np

from mpi_impl.comm.transports.buffers import split_in_pieces
from mpi_impl.comm.transports.mpi import MPITransport
from mpi_impl.comm.transports.transport import AllToAll, Collectives, PointToPoint, PostedCollectives
from mpi_impl.kernels import sum_in_rank_order
from mpi_impl.runtime.arrays import contiguous, is_half


class HalvesTransport(Collectives, AllToAll, PointToPoint, PostedCollectives):
    """MPI for 16-bit floats. Sums are made in float32, in rank order, and rounded once."""

    def __init__(self, mpi: MPITransport):
        self.mpi, self.size = mpi, mpi.size

    def takes(self, x):
        return is_half(x)

    def all_reduce(self, x, op):
        """Sum one piece on each rank, and gather the pieces: 2 bytes an element on the wire."""
        flat = contiguous(x).reshape(-1)
        pieces = np.pad(flat, (0, -flat.size % self.size)).reshape(self.size, -1)
        self.all_gather(self._reduce(pieces, op), pieces, 0)
        x[...] = pieces.reshape(-1)[:flat.size].reshape(x.shape)

    def all_gather(self, x, out, axis):
        self.mpi.all_gather(mpi_view(x), mpi_view(out), axis)

    def reduce_scatter(self, x, out, axis):
        pieces = split_in_pieces(x, self.size, axis)
        out[...] = self._reduce(pieces.reshape(self.size, *out.shape), "sum")

    def broadcast(self, x, root):
        self.mpi.broadcast(mpi_view(x), root)

    def all_to_all_rows(self, x, sent, out, received):
        self.mpi.all_to_all_rows(mpi_view(x), sent, mpi_view(out), received)

    def post(self, operation, x, out, sizes=None):
        return self.mpi.post(operation, mpi_view(x), mpi_view(out), sizes)

    def post_send(self, x, to, tag):
        return self.mpi.post_send(mpi_view(x), to, tag)

    def post_receive(self, x, source, tag):
        return self.mpi.post_receive(mpi_view(x), source, tag)

    def _reduce(self, pieces, op):
        """Return the sum (or maximum) over all ranks of the piece, of every rank's pieces [size, ...], that is ours."""
        theirs = np.empty_like(pieces)
        self.mpi.all_to_all(mpi_view(pieces), mpi_view(theirs))
        mine = np.empty_like(theirs[0])
        sum_in_rank_order(theirs, op, mine)
        return mine


def mpi_view(x):
    """Return a view of the bits of 16-bit floats as integers, which MPI can move."""
    return x.view(np.uint16)
