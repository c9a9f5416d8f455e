"""One rank's model, and its steps: a schedule's forwards and backwards, reduction over replicas, Adam."""
from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.mappings import region_of
from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.buffers import Buffer, OffloadedShard, Shard, Whole
from mpi_impl.parallel.passes import ForwardPass, TrainingPass
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.parallel.zero import GRADIENTS, Parameters, ShardedParameters
from mpi_impl.recording.observed import ObservedPass
from mpi_impl.recording.observer import Observer
from mpi_impl.runtime.arrays import dtype_of, to_host
from mpi_impl.runtime.files import writing
from mpi_impl.training.optimizer import Adam, counted_pieces, tiles
from reference.config import ModelConfig
from reference.dropout import Dropout
from reference.layer_context import LayerContext
from reference.models.model import model_tensors
from reference.models.stage import has_embedding, has_head, stage_of
from reference.optimizer import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import Piece
from reference.parallel.stages import layers_of_rank, layout_of, schedule_of, stages_of_ranks
from reference.params import HOST
from reference.precision import LossScaler, Precision
from reference.schedules.generators import evaluation_schedule


class StepResult(NamedTuple):
    """What one step reports, alike on all ranks."""

    losses: tuple[float, ...]     # of the model's heads, each a weighted mean over the global batch
    grad_norm: float              # before clipping
    learning_rate: float
    loss_scale: float = 1.0

    @property
    def loss(self) -> float:
        """Their sum, of which the gradients are."""
        return sum(self.losses)

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite, so that no weight was moved."""
        return not isfinite(self.grad_norm)


class Held(NamedTuple):
    """Bytes that a rank holds from step to step, and at most at once for a while: measured, or as formulas say."""

    parameters: int
    gradients: int
    optimizer: int
    offloaded: int            # of parameters and optimizer, in far memory; not in those above
    gathered: int             # for a while: units that ZeRO-3 has gathered, as the layout says
    unreduced: int | None     # for a while: gradients that ZeRO-2 and 3 have yet to send; None where no formula says it
    activations: int          # for a while: caches, and what waits for W; 0 if they were not measured
    recomputed: int           # for a while: the caches of layers that a backward has computed again; likewise

    @property
    def states(self) -> int:
        """Return the bytes of the model's states, offloaded ones included."""
        return self.parameters + self.gradients + self.optimizer + self.offloaded


class Trainer:
    """One rank's parameters, gradients and moments, over one layout of flat buffers, and the steps that move them."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, topology: Topology, seed: int,
                 precision: Precision, like=HOST, offload_folder: str | None = None):
        """`like` is an array of the library that the buffers shall belong to. With --cpu-offload shards are in files
        in `offload_folder`, or without one in host memory. Raises UserError for too few layers.
        """
        self.model, self.topology, self.ledger, self.seed = model, topology, topology.world.ledger, seed
        self.precision, self.scaler, self.offload_folder = precision, LossScaler(precision.scaling), offload_folder
        self.device_prototype, self.main = (np.empty_like(like, shape=0, dtype=dtype_of(name))      # of the model; of the optimizer
                                for name in (precision.compute, precision.main))
        self.iteration = 0                              # steps so far, skipped ones, too
        self.region = region_of(topology.tensor, topology.config)
        # Which layers are here, as which stages.
        self.stages_of_ranks, last = stages_of_ranks(model, topology.config), model.num_layers - 1
        self.stages = self.stages_of_ranks[topology.place.pipeline]
        self.last_rank = next(r for r, held in enumerate(self.stages_of_ranks) if last in layers_of_rank(held))
        tensors = model_tensors(model, layers_of_rank(self.stages))
        self.tie_word_table(tensors)
        # What this rank holds of them, and what it owns of that.
        self.layout = layout_of(tensors, topology.config)
        self.pieces = self.layout.pieces(topology.data.rank % topology.config.shards)
        self.parameters = self.make_parameters()
        self.parameters.initialize(tensors, seed, topology.tensor.size, topology.tensor.rank)
        make_gradients = GRADIENTS[topology.config.zero_stage]
        self.gradients = make_gradients(self.layout, topology.data, self.contributions, self.main)
        self.optimizer = Adam(self.pieces, self.parameters.own, self.make_states(), optimizer,
                              counted_pieces(self.pieces, topology.tensor.rank, self.tied_copy))
        # What a schedule's actions work on.
        self.stage_params, self.stage_grads = (
            {stage: stage_of(units, layers) for stage, layers in self.stages.items()}
            for units in (self.parameters.units(tensors), self.gradients.units(tensors)))
        self.pipelines: dict[tuple[str, int], Pipeline] = {}
        self.peak_caches = 0                            # the most that this rank held at once in the last step
        self.measured = False                           # whether the next steps count the bytes of activations:
        self.peak_activations = self.peak_recomputed = 0     # the most that were held, and computed again

    def make_parameters(self) -> Parameters:
        """A buffer of them all, or with ZeRO-3 of what this rank owns. No values yet."""
        if self.topology.config.zero_stage == 3:
            return ShardedParameters(self.layout, self.topology.data, self.own_shard(self.device_prototype), self.device_prototype)
        return Parameters(self.layout, self.topology.data, Whole(np.zeros_like(self.device_prototype, shape=self.layout.size)))

    def make_states(self) -> dict[str, Buffer]:
        """What the optimizer keeps: master weights, which in 16 bits are a copy of the parameters; and moments."""
        master = self.parameters.own
        if self.precision.half:
            master = self.own_shard(self.main)
            for tile in tiles(self.pieces, self.device_prototype):
                master.store(tile.place, self.parameters.own.load(tile.place).astype(self.main.dtype))
        return {"parameters": master, "m": self.own_shard(self.main), "v": self.own_shard(self.main)}

    def own_shard(self, like) -> Shard:
        """A buffer for what this rank owns, of zeros, of the kind of `like`."""
        if self.topology.config.cpu_offload:
            with writing(self.offload_folder or "far memory"):
                return OffloadedShard(self.layout.shard_size, like.dtype, like, self.offload_folder)
        return Shard(np.zeros_like(like, shape=self.layout.shard_size))

    def tie_word_table(self, tensors) -> None:
        """Tied logits read the embedding's table, so the first stage uses it, and the last.

        If both are on one rank, the table gets two contributions a microbatch. If they are on two, each has a copy: the
        copies' gradients are summed over `embedding_group`, and only the first counts in the norm.
        """
        first, last = has_embedding(tensors), has_head(tensors, self.model)
        self.contributions = {"embedding.word": 2} if self.model.tied and first and last else {}
        self.embedding_group = self.topology.embedding if self.model.tied and first != last else None
        self.tied_copy = "embedding.word" if self.embedding_group and last else ""

    def step(self, microbatches: Sequence, global_batch_size: int, observer: Observer | None = None) -> StepResult:
        """One step on this replica's microbatches (reference/batches.py) of a global batch of B sequences.

        Where the gradients are not finite no weight moves; what then follows from that is the caller's business. An
        `observer` is shown every tensor.
        """
        self.iteration += 1
        scale = self.scaler.scale
        self.gradients.expect(len(microbatches))
        training_pass = partial(ObservedPass, observer) if observer else TrainingPass
        work = training_pass(self.model, self.region, self.stage_params, microbatches,
                             self.total_weights(microbatches, global_batch_size), self.stage_grads,
                             self.gradients.contributed, self.contexts(microbatches), scale, self.measured)
        self.pipeline("training", len(microbatches)).play(work.compute, self.device_prototype, self.shape(microbatches))
        self.peak_caches = work.peak_caches
        if self.measured:
            self.peak_activations, self.peak_recomputed = work.peak_activations, work.peak_recomputed
        with self.ledger.phase("reduction"):
            self.gradients.finish()
            self.sum_copies()
            losses = self.whole_losses(work.losses)
        if observer:
            observer.reduced(sum(losses))
        with self.ledger.phase("optimizer"), self.topology.world.trace.slice("compute", "optimizer", "other"):
            zero = self.topology.config.zero_stage > 0
            owners = self.topology.world if zero else self.topology.model      # of the whole model between them
            norm, rate = self.optimizer.step(self.gradients.own, owners, scale)
            result = StepResult(losses, norm, rate, scale)
            if zero and not result.skipped:
                self.parameters.publish()
        if observer:
            observer.updated(norm, rate)
        self.scaler.update(result.skipped)
        return result

    def take_over(self) -> None:
        """The optimizer's states have got new values: the model gets the master weights, on all replicas."""
        self.optimizer.take_over()
        if self.topology.config.zero_stage:
            self.parameters.publish()

    def contexts(self, microbatches: Sequence) -> list[LayerContext]:
        """Return what is dropped and what is kept of each of this replica's microbatches, in the step that begins."""
        b, (replica, d) = len(microbatches[0].tokens), (self.topology.place.data, self.topology.data.size)
        return [LayerContext(Dropout(self.model, self.seed, self.iteration, samples_of(replica, k, d, b).start),
                             self.topology.config.recompute) for k in range(len(microbatches))]

    def sum_copies(self) -> None:
        """Add up gradients that several ranks have a part of, although each holds the whole tensor.

        Two stages use the tied word table. With sequence parallelism every tensor-parallel rank has applied norms,
        biases of row-parallel layers and positions to its own part of the sequence.
        """
        if self.embedding_group:
            self.sum_pieces(self.embedding_group, "tied embedding",
                            [piece for piece in self.pieces if piece.of.name == "embedding.word"])
        if self.topology.config.sequence_parallel:
            self.sum_pieces(self.topology.tensor, "replicated gradients",
                            [piece for piece in self.pieces if piece.of.tensor.split is None])

    def sum_pieces(self, group: Group, reason: str, pieces: list[Piece]) -> None:
        """All in one call. The group's ranks own the same part of these tensors, which may be none."""
        if pieces:
            total = group.all_reduce(np.concatenate([self.gradients.own.load(piece) for piece in pieces]), reason)
            ends = np.cumsum([piece.size for piece in pieces]).tolist()
            for piece, part in zip(pieces, np.split(total, ends[:-1]), strict=True):
                self.gradients.own.store(piece, part)

    def evaluate(self, microbatches: Sequence, global_batch_size: int) -> tuple[float, ...]:
        """The losses of the heads over a global batch of which this replica has these microbatches; nothing is learned.
        """
        with self.ledger.phase("evaluation"):
            work = ForwardPass(self.model, self.region, self.stage_params, microbatches,
                               self.total_weights(microbatches, global_batch_size))
            self.pipeline("evaluation", len(microbatches)).play(
                work.compute, self.device_prototype, self.shape(microbatches), phases={"F": "evaluation"})
            return self.whole_losses(work.losses)

    def total_weights(self, microbatches: Sequence, global_batch_size: int) -> list[float]:
        """What the weights of the global batch's losses add up to, for each head: the replicas tell one another."""
        if microbatches[0].weights is None:
            return [global_batch_size * microbatches[0].tokens.shape[1]]
        mine = sum(np.stack([weights.sum() for weights in batch.weights_of_heads(self.model.heads)])
                   for batch in microbatches)
        with self.ledger.phase("data"):
            total = self.topology.data.all_reduce(to_host(mine).astype(np.float64), "weights of the losses")
        return np.maximum(total, 1).tolist()                # where nothing counts, the loss is 0

    def whole_losses(self, losses) -> tuple[float, ...]:
        """The sums over replicas of what their last stages have found, [heads], on every rank."""
        found = self.topology.data.all_reduce(self.on_host(losses), "loss")
        return tuple(self.topology.pipeline.broadcast(found, "loss", self.last_rank).tolist())

    def on_host(self, x) -> np.ndarray:
        """x, once this rank's device has come so far.

        With NCCL it is the device that waits for other ranks, and here the host waits for the device: so it is here
        that a rank which has stopped is missed.
        """
        world = self.topology.world
        with world.watchdog.waiting(world.name, "loss", world.others):
            return to_host(x).copy()

    def pipeline(self, purpose: str, m: int) -> Pipeline:
        """For training, or for evaluation: forwards alone, on the same stages."""
        if (purpose, m) not in self.pipelines:
            schedule = (schedule_of(self.topology.config, m) if purpose == "training" else
                        evaluation_schedule([list(stages) for stages in self.stages_of_ranks], m))
            self.pipelines[purpose, m] = Pipeline(schedule, self.topology)
        return self.pipelines[purpose, m]

    def shape(self, microbatches: Sequence) -> tuple[int, int, int]:
        """[b, s, h] of what goes from stage to stage, or [b, s/t, h] where the sequence is cut."""
        b, s = microbatches[0].tokens.shape
        return b, s // self.topology.config.sequence_shards, self.model.hidden_size

    def whole(self, buffer: Buffer):
        """The flat buffer [layout.size], like a NumPy array, of which the replicas own parts; called by all of them."""
        flat = np.zeros_like(self.device_prototype, shape=self.layout.size, dtype=buffer.flat.dtype)
        for piece in self.pieces:
            flat[piece.in_buffer] = buffer.load(piece)
        return self.topology.data.all_reduce(flat, "all parts") if self.topology.config.shards > 1 else flat

    @property
    def saved(self) -> list[Piece]:
        """What this rank saves, so that all ranks save every element once, as they count it once in the norm.

        Without ZeRO all replicas own all, and the first one saves it.
        """
        return self.optimizer.counted if self.topology.config.zero_stage or self.topology.place.data == 0 else []

    def held(self) -> Held:
        """What this rank holds, as its arrays say."""
        parameters = self.parameters.own
        states = [buffer for buffer in self.optimizer.states.values() if buffer is not parameters]
        return Held(parameters.device_bytes, self.gradients.own.device_bytes, sum(buffer.device_bytes for buffer in states),
                    sum(buffer.offloaded_bytes for buffer in (parameters, *states)), self.parameters.whole_bytes,
                    self.gradients.whole_bytes, self.peak_activations, self.peak_recomputed)
