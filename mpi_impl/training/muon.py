"""Muon on what a rank owns: whole matrices, or with tensor parallelism its shards of them.

The ranks that share a matrix by tensor parallelism own their shards of it at the same time, whatever the replicas have
dealt out: so they orthogonalize it together. The textbook twin is reference/optimizers/muon.py.
"""
from functools import partial

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.parallel.buffers import Buffer
from mpi_impl.runtime.arrays import narrowed
from mpi_impl.training.optimizer import Adam
from reference.optimizers.adam import OptimizerConfig
from reference.optimizers.muon import EPS, muon_update, orthogonalized, quintic, scale, shards_by_columns
from reference.parallel.layout import Piece
from reference.params import Tensor


class Muon(Adam):
    """Moves matrices along their orthogonalized momentum, and all else as Adam does."""

    def __init__(self, pieces: list[Piece], model: Buffer, states: dict[str, Buffer], config: OptimizerConfig,
                 counted: list[Piece], tensor: Group):
        """Take what Adam takes, and the tensor-parallel ranks. A piece of a matrix is all that this rank has of it."""
        super().__init__([piece for piece in pieces if not piece.of.matrix], model, states, config, counted)
        self.matrices, self.tensor = [piece for piece in pieces if piece.of.matrix], tensor

    def update(self, grads: Buffer, factor: float, rate: float) -> None:
        super().update(grads, factor, rate)
        for piece in self.matrices:
            param, m = (self.states[name].load(piece).reshape(piece.of.shape) for name in ("parameters", "m"))
            grad = grads.load(piece).reshape(piece.of.shape)
            grad *= factor
            muon_update(param, grad, m, piece.of.tensor, rate, self.config,
                        partial(orthogonalized_shard, group=self.tensor))
            self.states["m"].store(piece, m.reshape(-1))
            self.states["parameters"].store(piece, param.reshape(-1))
            if self.model is not self.states["parameters"]:
                self.model.store(piece, narrowed(param.reshape(-1), self.model.flat.dtype))


def orthogonalized_shard(x, tensor: Tensor, c: OptimizerConfig, group: Group):
    """Return the update along x, this rank's shard of a weight's momentum."""
    if group.size == 1:
        return orthogonalized(x, tensor, c)
    if c.muon_tp_mode == "duplicated":
        return duplicated(x, tensor, c, group)
    y = np.empty_like(x, order="C")
    for shard, out in zip(shards_by_columns(x, tensor), shards_by_columns(y, tensor)):
        out[...] = scale(tensor, c) * newton_schulz(shard, tensor.copies(group.size), c.muon_num_ns_steps, group)
    return y


def duplicated(x, tensor: Tensor, c: OptimizerConfig, group: Group):
    """Gather the whole momentum, and compute the whole update, as all t ranks do; return this rank's shard of it."""
    copies, split = tensor.copies(group.size), tensor.split or 0
    before, (n, *after) = x.shape[:split], x.shape[split:]
    by_rank = group.all_gather(x, split, "momentum").reshape(*before, -1, copies, n, *after)
    inside = (slice(None),) * len(before)
    y = orthogonalized(by_rank[(*inside, slice(None), 0)].reshape(*before, -1, *after), tensor, c)
    first = group.rank // copies * n                        # neighbours may hold copies of one shard
    return y[(*inside, slice(first, first + n))]


def newton_schulz(x, copies: int, steps: int, group: Group):
    """Orthogonalize a matrix of which each rank has columns, x [n, m/t], as have the neighbours that hold copies."""
    squares = group.all_reduce((x * x).sum(keepdims=True) / copies, "norm of the momentum")          # [1, 1]
    x = x / (np.sqrt(squares) + EPS)
    for _ in range(steps):
        gram = group.all_reduce(x @ x.T / copies, "products of the momentum")   # [n, m/t] @ [m/t, n] -> [n, n]
        x = quintic(x, gram)
    return x
