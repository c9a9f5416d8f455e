"""One rank's part of the model: parameters, gradients and optimizer states, in flat buffers of one layout."""
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.regions import region_of
from mpi_impl.comm.topology import Topology
from mpi_impl.layers.context_attention import ContextPart, part_of
from mpi_impl.parallel.buffers import Buffer, OffloadedShard, Shard
from mpi_impl.parallel.tiles import tiles
from mpi_impl.parallel.zero import STAGES
from mpi_impl.runtime.arrays import dtype_of, narrowed
from mpi_impl.runtime.files import writing
from reference.config import ModelConfig
from reference.models.model import model_tensors
from reference.models.stage import has_embedding, has_head, stage_of
from reference.parallel.layout import SHARED_BLOCK, Piece, shared_pieces, unit_of
from reference.parallel.stages import layers_of_rank, layout_of, stages_of_ranks
from reference.params import HOST
from reference.precision import Precision


class Held(NamedTuple):
    """Bytes that a rank holds from step to step, and the most that it holds for a while: measured, or predicted."""

    parameters: int
    gradients: int
    optimizer: int
    offloaded: int            # bytes of parameters and optimizer; not in those above
    gathered: int             # for a while: units that ZeRO-3 has gathered, as the layout says
    unreduced: int            # for a while: gradients that ZeRO-2 and 3 have yet to send
    activations: int = 0      # for a while: caches, and what waits for W; 0 if not measured
    recomputed: int = 0       # for a while: the caches of layers that a backward has computed again; likewise

    @property
    def states(self) -> int:
        """Return the bytes of the model's states, offloaded ones included."""
        return self.parameters + self.gradients + self.optimizer + self.offloaded


class ModelState:
    """The layers of one rank, their layout and buffers; what it owns, counts and saves; the bytes it holds."""

    def __init__(self, model: ModelConfig, topology: Topology, seed: int, precision: Precision, like=HOST,
                 offload_folder: str | None = None):
        """Draw the initial values. `like` is an array of the library that the buffers shall belong to. With
        --cpu-offload shards are in files in `offload_folder`, or without one in host memory. Raises UserError for too
        few layers.
        """
        self.model, self.topology, self.seed, self.precision = model, topology, seed, precision
        self.offload_folder = offload_folder
        self.region = region_of(topology.tensor, topology.config, topology.expert, topology.context)
        self.device_prototype, self.main = (np.empty_like(like, shape=0, dtype=dtype_of(name))
                                            for name in (precision.compute, precision.main))   # model's; optimizer's
        # Which layers are here, as which stages.
        self.stages_of_ranks = stages_of_ranks(model, topology.config)
        self.stages = self.stages_of_ranks[topology.place.pipeline]
        tensors = model_tensors(model, layers_of_rank(self.stages))
        self.tie_word_table(tensors)
        self.share_block(tensors)
        # Their tensors: where they lie, what this rank holds of them, and what it owns.
        self.layout = layout_of(tensors, topology.config)
        self.zero = STAGES[topology.config.zero_stage](self.layout, topology, self.device_prototype, self.main,
                                                       self.contributions, self.new_shard)
        self.parameters, self.gradients, self.pieces = self.zero.parameters, self.zero.gradients, self.zero.pieces
        self.parameters.initialize(tensors, seed, topology.tensor.size, topology.tensor.rank)
        self.counted = list(filter(self.zero.counts, counted_pieces(self.pieces, topology.tensor.rank, self.copies)))
        self.optimizer_states = self.make_optimizer_states()
        # What a schedule's actions work on.
        self.stage_params, self.stage_grads = (
            {stage: stage_of(units, layers) for stage, layers in self.stages.items()}
            for units in (self.parameters.units(tensors), self.gradients.units(tensors)))
        self.warm_up()

    def warm_up(self) -> None:
        """Warm up all groups that move arrays of the device in collectives."""
        topology = self.topology
        groups = (topology.tensor, topology.context, topology.shards, topology.expert_replicas, topology.instances,
                  self.embedding_group, self.block_group, *map(topology.neighbours, shared_pieces(self.pieces)))
        for group in dict.fromkeys(filter(None, groups)):
            group.warm_up(self.device_prototype)

    def tie_word_table(self, tensors) -> None:
        """Find out who shares the word table: tied logits use the embedding's, so the first and the last stage do.

        If both are on one rank, the table gets two contributions a microbatch. If they are on two, each has a copy: the
        copies' gradients are summed over `embedding_group`, and only the first counts in the norm.
        """
        first, last = has_embedding(tensors), has_head(tensors, self.model)
        self.contributions = {"embedding.word": 2} if self.model.tied and first and last else {}
        self.embedding_group = self.topology.embedding if self.model.tied and first != last else None
        self.copies = {"embedding.word"} if self.embedding_group and last else set()

    def share_block(self, tensors) -> None:
        """Find out who shares a block of all layers: it gets a contribution from each of this rank's layers, and every
        rank of the pipeline has a copy of it.
        """
        shares, pipeline = self.model.share_layers, self.topology.pipeline
        self.contributions |= {SHARED_BLOCK: len(tensors.blocks)} if shares else {}
        self.block_group = pipeline if shares and pipeline.size > 1 else None
        self.copies |= {SHARED_BLOCK} if self.block_group and pipeline.rank > 0 else set()

    # ---- buffers ----

    def new_shard(self, like, matrices: bool = True) -> Shard:
        """Allocate zeros of the kind of `like` for what this rank owns, with Muon's matrices or without."""
        size = self.layout.shard_size if matrices else self.layout.adam_size
        if self.topology.config.cpu_offload:
            with writing(self.offload_folder or "host memory"):
                return OffloadedShard(size, like.dtype, like, self.offload_folder)
        return Shard(np.zeros_like(like, shape=size))

    def make_optimizer_states(self) -> dict[str, Buffer]:
        """Return the moments and the master weights, which in 16 bits are a copy of the parameters. Muon has a moment
        less: the momentum, m.
        """
        master = self.parameters.own
        if self.precision.half:
            master = self.new_shard(self.main)
            for tile in tiles(self.pieces, self.device_prototype):
                master.store(tile.place, self.parameters.own.load(tile.place).astype(self.main.dtype))
        return {"parameters": master, "m": self.new_shard(self.main), "v": self.new_shard(self.main, matrices=False)}

    def pieces_in(self, buffer: Buffer, pieces: Sequence[Piece]) -> list[Piece]:
        """Return those of some pieces that a buffer has: v has none of Muon's matrices."""
        return [piece for piece in pieces if buffer is not self.optimizer_states["v"] or not piece.of.matrix]

    def adopt_master_weights(self) -> None:
        """Give the model the values of the master weights, on all replicas: they were loaded."""
        master = self.optimizer_states["parameters"]
        if master is not self.parameters.own:
            for tile in tiles(self.pieces, self.device_prototype):
                self.parameters.own.store(tile.place, narrowed(master.load(tile.place), self.device_prototype.dtype))
        self.zero.finish_update()

    def whole(self, buffer: Buffer):
        """Return a flat buffer [layout.size], like a NumPy array, from the replicas' parts; called by all of them. What
        a state lacks is 0.
        """
        flat = np.zeros_like(self.device_prototype, shape=self.layout.size, dtype=buffer.flat.dtype)
        for piece in self.pieces_in(buffer, self.pieces):
            flat[piece.in_buffer] = buffer.load(piece)
        if self.layout.parts > 1:
            for dealt, run in groupby(self.layout.buckets, lambda bucket: bucket.dealt):
                buckets, group = list(run), self.topology.expert_replicas if dealt else self.topology.shards
                group.all_reduce(flat[buckets[0].start:buckets[-1].stop], "all parts")
        return flat

    # ---- gradients ----

    def reduce_gradients(self) -> None:
        """Wait for the sums over the replicas, and sum partial gradients of tensors that several ranks hold.

        Two stages use the tied word table, and all stages a shared block. With sequence parallelism every
        tensor-parallel rank has applied norms, routers, biases of row-parallel layers and positions to its own part of
        the sequence. (Experts see all of it.) With fewer heads of keys and values than ranks, neighbours have used
        copies of the same head for other queries.
        """
        self.gradients.finish()
        if self.embedding_group:
            self.sum_pieces(self.embedding_group, "tied embedding",
                            [piece for piece in self.pieces if piece.of.name == "embedding.word"])
        if self.block_group:
            self.sum_pieces(self.block_group, "shared block",
                            [piece for piece in self.pieces if unit_of(piece.of.name) == SHARED_BLOCK])
        if self.topology.config.sequence_parallel:
            self.sum_pieces(self.topology.tensor, "replicated gradients",
                            [piece for piece in self.pieces
                             if piece.of.tensor.split is None and not piece.of.tensor.dealt])
        for copies, pieces in shared_pieces(self.pieces).items():
            self.sum_pieces(self.topology.neighbours(copies), f"gradients of {copies} copies", pieces)

    def sum_pieces(self, group: Group, reason: str, pieces: list[Piece]) -> None:
        """Sum these gradients in one call. The group's ranks own the same part of them, which may be none."""
        if pieces:
            total = group.all_reduce(np.concatenate([self.gradients.own.load(piece) for piece in pieces]), reason)
            ends = np.cumsum([piece.size for piece in pieces]).tolist()
            for piece, part in zip(pieces, np.split(total, ends[:-1]), strict=True):
                self.gradients.own.store(piece, part)

    # ---- what others ask ----

    def part(self, microbatches: Sequence) -> ContextPart | None:
        """Return this rank's part of the microbatches' sequences; None without context parallelism."""
        return part_of(self.topology.context, self.topology.config.cp_comm_type, microbatches[0].tokens.shape[1])

    @property
    def last_rank(self) -> int:
        """Return the pipeline rank with the head."""
        last = self.model.num_layers - 1
        return next(rank for rank, held in enumerate(self.stages_of_ranks) if last in layers_of_rank(held))

    @property
    def saved(self) -> list[Piece]:
        """Return the pieces that this rank saves: together all ranks save every element once, as the norm counts it."""
        return list(filter(self.zero.saves, self.counted))

    def shape(self, microbatches: Sequence) -> tuple[int, int, int]:
        """Return the shape [b, s, h] of what one stage sends to the next, or [b, s/t, h] with sequence parallelism."""
        b, s = microbatches[0].tokens.shape
        return b, s // self.topology.config.sequence_shards, self.model.hidden_size

    def held(self) -> Held:
        """Return the bytes of this rank's buffers, and of what was gathered or unreduced for a while."""
        parameters = self.parameters.own
        states = [buffer for buffer in self.optimizer_states.values() if buffer is not parameters]
        return Held(parameters.device_bytes, self.gradients.own.device_bytes,
                    sum(buffer.device_bytes for buffer in states),
                    sum(buffer.offloaded_bytes for buffer in (parameters, *states)),
                    self.parameters.whole_bytes, self.gradients.whole_bytes)


def counted_pieces(pieces: list[Piece], tensor_rank: int, copies: Collection[str]) -> list[Piece]:
    """Return what a rank adds to the norm, so that the sum over all owners of the model counts every element once.

    Each of t ranks has its own shard of a split tensor. Replicated tensors are identical on all of them, and the first
    rank counts them; likewise the first of the neighbours that hold copies of one shard. `copies` are the units that
    this rank has a copy of and another pipeline rank counts.
    """
    return [piece for piece in pieces if unit_of(piece.of.name) not in copies and tensor_rank % piece.of.copies == 0]
