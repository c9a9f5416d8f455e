"""Training steps on ranks: a schedule's forwards and backwards, the reduction over replicas, and the update."""
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpi_impl.parallel.model_state import Held, ModelState
from mpi_impl.parallel.passes import ForwardPass, Peaks, StepObserver, TrainingPass
from mpi_impl.parallel.pipeline import Pipeline
from mpi_impl.runtime.arrays import to_host
from mpi_impl.training.optimizer import Adam
from mpi_impl.training.replays import Replays
from reference.batches import number_of_tokens
from reference.layer_context import EVALUATION, AuxiliaryLosses, LayerContext
from reference.models.model import sequences_of
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.parallel.stages import schedule_of
from reference.precision import LossScaler
from reference.random.dropout import Dropout
from reference.schedules.generators import evaluation_schedule


class StepResult(NamedTuple):
    """The report of a step, identical on all ranks."""

    losses: tuple[float, ...]     # of the model's heads, each a weighted mean over the global batch
    grad_norm: float              # before clipping
    learning_rate: float
    loss_scale: float = 1.0
    auxiliary: tuple[float, ...] = ()   # of experts: the load-balancing loss and the z-loss, sums over the layers

    @property
    def loss(self) -> float:
        """Return the sum of the losses, which the gradients are of."""
        return sum(self.losses)

    @property
    def skipped(self) -> bool:
        """Report whether the gradients were not finite, so that no weight was moved."""
        return not np.isfinite(self.grad_norm)


class Trainer:
    """Steps that move one rank's ModelState, and evaluations of it. All ranks call its methods together."""

    def __init__(self, state: ModelState, optimizer: OptimizerConfig, replayed: bool = False):
        """With `replayed` steps on a GPU are recorded, and replayed. Nothing is dropped, and no message is MPI's."""
        self.state, self.topology, self.ledger = state, state.topology, state.topology.world.ledger
        assert optimizer.muon == state.topology.config.whole_matrices, "the layout is another optimizer's"
        owned = state.pieces, state.parameters.own, state.optimizer_states, optimizer, state.counted
        if optimizer.muon:
            from mpi_impl.training.muon import Muon  # loaded where it is chosen

            self.optimizer: Adam = Muon(*owned, state.topology.tensor)
        else:
            self.optimizer = Adam(*owned)
        self.scaler = LossScaler(state.precision.scaling)
        self.iteration = 0            # steps so far, skipped ones included
        self.measured = False         # whether the next steps count the bytes of activations
        self.peaks = Peaks()          # of the last step
        self.pipelines: dict[tuple[str, int], Pipeline] = {}
        self.replays = Replays(self.compute_gradients, self.ledger) if replayed else None

    def step(self, microbatches: Sequence, global_batch_size: int, observer: StepObserver | None = None) -> StepResult:
        """Make one step on this replica's microbatches (reference/batches.py) of a global batch of B sequences.

        Where the gradients are not finite no weight moves, and it is up to the caller what to do about it. An
        `observer` is shown every tensor.
        """
        self.iteration += 1
        result = self.compute_step(microbatches, global_batch_size, observer)
        self.scaler.update(result.skipped)
        return result

    def compute_step(self, microbatches: Sequence, global_batch_size: int, observer: StepObserver | None) -> StepResult:
        """Compute the reduced gradients, and update the weights.

        A step that was skipped can be computed again, to show it to an observer: no weight has moved.
        """
        state, scale = self.state, self.scaler.scale
        contexts = self.contexts(microbatches, self.auxiliary_losses(microbatches, global_batch_size))
        arguments = microbatches, self.total_weights(microbatches, global_batch_size), contexts, scale
        if self.replays and not observer and not self.measured:
            work = self.replays.play(*arguments)
        else:
            work = self.compute_gradients(*arguments, observer)
        self.peaks = work.peaks if self.measured else self.peaks._replace(caches=work.peaks.caches)
        with self.ledger.phase("reduction"):
            losses, auxiliary = self.whole_losses(work.losses), self.whole_auxiliary_losses(contexts)
        if observer:
            observer.see_reduction(sum(losses))
        with self.ledger.phase("optimizer"), self.topology.world.trace.slice("compute", "optimizer", "other"):
            norm, rate = self.optimizer.step(state.gradients.own, state.zero.owners, scale)
            if np.isfinite(norm):
                state.zero.finish_update()
        if observer:
            observer.see_update(norm, rate)
        return StepResult(losses, norm, rate, scale, auxiliary)

    def compute_gradients(self, microbatches: Sequence, totals: Sequence[float], contexts: Sequence[LayerContext],
                          scale: float, observer: StepObserver | None = None) -> TrainingPass:
        """Compute the gradients of `scale` times the loss, and reduce them."""
        state = self.state
        state.gradients.expect(len(microbatches))
        arguments = state, microbatches, totals, contexts, scale, self.measured
        work = observer.observed_pass(self.iteration, *arguments) if observer else TrainingPass(*arguments)
        self.pipeline("training", len(microbatches)).play(work.compute, state.device_prototype,
                                                          state.shape(microbatches))
        with self.ledger.phase("reduction"):
            state.reduce_gradients()
        return work

    def evaluate(self, microbatches: Sequence, global_batch_size: int) -> tuple[float, ...]:
        """Return the losses of the heads over a global batch, of which this replica has these microbatches."""
        with self.ledger.phase("evaluation"):
            work = ForwardPass(self.state.model, self.state.region, self.state.stage_params, microbatches,
                               self.total_weights(microbatches, global_batch_size), self.state.device_prototype,
                               EVALUATION._replace(part=self.state.part(microbatches)))
            self.pipeline("evaluation", len(microbatches)).play(
                work.compute, self.state.device_prototype, self.state.shape(microbatches), phases={"F": "evaluation"})
            return self.whole_losses(work.losses)

    def contexts(self, microbatches: Sequence, auxiliary: AuxiliaryLosses | None) -> list[LayerContext]:
        """Return what this step drops, and what it keeps, of each of this replica's microbatches."""
        b, (replica, d) = len(microbatches[0].tokens), (self.topology.place.data, self.topology.data.size)
        first = [samples_of(replica, k, d, b).start for k in range(len(microbatches))]
        part = self.state.part(microbatches)
        return [LayerContext(Dropout(self.state.model, self.state.seed, self.iteration, sample, part=part),
                             self.topology.config.recompute, part=part,
                             auxiliary=auxiliary and replace(auxiliary, found={})) for sample in first]

    def auxiliary_losses(self, microbatches: Sequence, global_batch_size: int) -> AuxiliaryLosses | None:
        """Return the weights of the losses of experts in the global batch, or None for a model without experts."""
        model = self.state.model
        if model.experts is None:
            return None
        sequences = global_batch_size * sequences_of(model)
        tokens = sequences * microbatches[0].tokens.shape[1] * self.topology.config.context_parallel_size
        if not model.causal:
            mine = np.stack([number_of_tokens(batch) for batch in microbatches]).sum(keepdims=True)
            with self.ledger.phase("data"):
                tokens = int(self.topology.data.all_reduce(to_host(mine), "tokens without padding")[0])
        return AuxiliaryLosses(sequences, tokens, self.scaler.scale)

    def whole_auxiliary_losses(self, contexts: Sequence[LayerContext]) -> tuple[float, ...]:
        """Return the losses of experts, sums over all layers, on every rank; () for a model without experts."""
        if self.state.model.experts is None:
            return ()
        found = np.zeros_like(self.state.main, shape=2, dtype=np.float64)
        found += sum(context.auxiliary.total for context in contexts if context.auxiliary)
        found = self.on_host(found)
        if self.topology.config.sequence_parallel:
            self.topology.tensor.all_reduce(found, "losses of experts")
        self.topology.replicas.all_reduce(found, "losses of experts")
        return tuple(self.topology.pipeline.all_reduce(found, "losses of experts").tolist())

    def total_weights(self, microbatches: Sequence, global_batch_size: int) -> list[float]:
        """Return the sum of the loss weights over the global batch, for each head."""
        if microbatches[0].weights is None:
            return [global_batch_size * microbatches[0].tokens.shape[1] * self.topology.config.context_parallel_size]
        mine = sum(np.stack([weights.sum() for weights in batch.weights_of_heads(self.state.model.heads)])
                   for batch in microbatches)
        with self.ledger.phase("data"):
            total = self.topology.replicas.all_reduce(to_host(mine).astype(np.float64), "weights of the losses")
        return np.maximum(total, 1).tolist()                # where nothing counts, the loss is 0

    def whole_losses(self, losses) -> tuple[float, ...]:
        """Return the sums over replicas of what their last stages have found, [heads], on every rank."""
        found = self.topology.replicas.all_reduce(self.on_host(losses), "loss")
        return tuple(self.topology.pipeline.broadcast(found, "loss", self.state.last_rank).tolist())

    def on_host(self, x) -> np.ndarray:
        """Return x as soon as this rank's device has computed it.

        With NCCL the device waits for other ranks, and here the host waits for the device: so this is where a rank
        that has stopped is missed.
        """
        world = self.topology.world
        with world.watchdog.waiting(world.name, "loss", world.others):
            return to_host(x).copy()

    def pipeline(self, purpose: str, m: int) -> Pipeline:
        """Return the pipeline for "training", or for "evaluation": forwards alone, on the same stages."""
        if (purpose, m) not in self.pipelines:
            schedule = (schedule_of(self.topology.config, m) if purpose == "training" else
                        evaluation_schedule([list(stages) for stages in self.state.stages_of_ranks], m))
            self.pipelines[purpose, m] = Pipeline(schedule, self.topology)
        return self.pipelines[purpose, m]

    def held(self) -> Held:
        """Return the bytes that this rank holds, and in the last measured step held for a while."""
        return self.state.held()._replace(activations=self.peaks.activations, recomputed=self.peaks.recomputed)
