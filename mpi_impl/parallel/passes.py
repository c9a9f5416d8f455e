"""The computation behind a schedule's actions: the F of an evaluation; the F, B, I and W of a training step."""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.models.model import model_backward, model_forward
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.sinks import DeferredSink, ImmediateSink
from reference.array_bytes import array_bytes
from reference.config import ModelConfig
from reference.layer_context import EVALUATION, LayerContext
from reference.models.stage import StageCache, has_head
from reference.schedules.actions import Action


class ForwardPass:
    """Some microbatches on their way through this rank's stages, forward only."""

    def __init__(self, model: ModelConfig, region: TensorParallelRegion, params: dict[int, Any],
                 microbatches: Sequence, totals: Sequence[float], like, context: LayerContext = EVALUATION):
        """Begin a pass of these microbatches (reference/batches.py) through this rank's `params`, by stage.

        `totals` are the sums of the loss weights over the global batch, one for each head; `like` is an array of the
        library of the parameters.
        """
        self.model, self.region, self.params = model, region, params
        self.microbatches, self.totals = microbatches, totals
        self.contexts: Sequence[LayerContext] = [context] * len(microbatches)
        # The heads' weighted sums, where the last stage is. They stay where they are computed: reading synchronizes.
        self.losses = np.zeros_like(like, shape=len(totals), dtype=np.float64)
        self.dtypes: list = []                         # of the heads' losses
        self.compute: dict[str, Callable] = {"F": self.forward}

    def forward(self, action: Action, x):
        """Map the x [b, s, h] of the stage before to x for the next. The last stage adds to the losses instead."""
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y, cache = model_forward(x, params, self.model, batch, self.region, self.contexts[action.microbatch])
        self.keep(action, y, cache)
        if has_head(params, self.model):
            self.dtypes = [loss.dtype for loss in y]
            for i, (loss, weights) in enumerate(zip(y, self.weights(batch), strict=True)):
                self.losses[i] += (loss * weights).sum(dtype=np.float64)
            return None
        return y

    def weights(self, batch) -> list:
        """Return the weight of each loss in the global batch, for each head: float64, of the losses' shapes."""
        return [weights / total for weights, total in zip(batch.weights_of_heads(self.model.heads), self.totals)]

    def keep(self, action: Action, y, cache: StageCache) -> None:
        """Keep nothing: no backward follows."""


class Peaks(NamedTuple):
    """The most that a rank held at the same time in a step."""

    caches: int = 0           # of stages, whole or waiting for W
    activations: int = 0      # bytes of them
    recomputed: int = 0       # bytes held besides, while layers were computed again


class TrainingPass(ForwardPass):
    """Forward and backward of some microbatches. Gradients are added to the state's."""

    def __init__(self, state: ModelState, microbatches: Sequence, totals: Sequence[float],
                 contexts: Sequence[LayerContext], scale: float = 1.0, measured: bool = False):
        """Begin a pass with a context for each microbatch. Gradients are those of `scale` times the loss. Bytes are
        counted only if the pass is `measured`.
        """
        super().__init__(state.model, state.region, state.stage_params, microbatches, totals, state.device_prototype)
        self.grads, self.contexts, self.scale = state.stage_grads, contexts, scale
        self.sink = ImmediateSink(state.gradients.contributed, self.measure_recomputed, state.region.group.progress)
        self.measured, self.peaks = measured, Peaks()
        self.caches: dict[tuple[int, int], StageCache] = {}       # by stage and microbatch: from F until B, or until I
        self.deferred: dict[tuple[int, int], DeferredSink] = {}   # from I until W
        self.compute |= {"B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}

    def keep(self, action: Action, y, cache: StageCache) -> None:
        """Keep the cache until the microbatch's backward."""
        self.caches[action.stage, action.microbatch] = cache
        self.raise_peaks(caches=len(self.caches) + len(self.deferred))
        self.measure()

    def measure(self) -> None:
        """Count the bytes of the activations that this rank holds now."""
        if self.measured:
            waiting = [sink.held() for sink in self.deferred.values()]
            self.raise_peaks(activations=array_bytes(self.caches, waiting, besides=self.microbatches))

    def measure_recomputed(self, caches) -> None:
        """Count the bytes of what a backward has computed again."""
        if self.measured:
            self.raise_peaks(recomputed=array_bytes(caches, besides=self.microbatches))

    def raise_peaks(self, **found: int) -> None:
        """Replace the peaks that are lower."""
        self.peaks = Peaks(*map(max, self.peaks, Peaks(**found)))

    def backward(self, action: Action, dy):
        """Map the dx of the stage after to dx for the stage before, and add all gradients."""
        return self.differentiate(action, dy, self.sink)

    def input_gradient(self, action: Action, dy):
        """Do the same, but put off the gradients of weight matrices until W. The others cost little, and come now."""
        sink = self.deferred[action.stage, action.microbatch] = DeferredSink(self.sink)
        dx = self.differentiate(action, dy, sink)
        self.measure()
        return dx

    def weight_gradient(self, action: Action, _) -> None:
        """Add what the input gradient has put off."""
        self.deferred.pop((action.stage, action.microbatch)).drain()

    def differentiate(self, action: Action, dy, sink):
        """Run a stage's backward. The last stage begins with the weights of its losses."""
        params, cache = self.params[action.stage], self.caches.pop((action.stage, action.microbatch))
        if has_head(params, self.model):
            weights = self.weights(self.microbatches[action.microbatch])
            dy = tuple((self.scale * each).astype(dtype) for each, dtype in zip(weights, self.dtypes))
        return model_backward(dy, params, cache, self.model, self.grads[action.stage], sink, self.region)


class StepObserver(Protocol):
    """A listener of a step: shardlab/compare/observer.py shows it every tensor."""

    def observed_pass(self, iteration: int, *arguments) -> TrainingPass:
        """Return a TrainingPass of these arguments, which the observer watches."""

    def see_reduction(self, loss: float) -> None:
        """See the gradients and the loss after their sum over the ranks."""

    def see_update(self, norm: float, rate: float) -> None:
        """See the optimizer's states after its step."""
