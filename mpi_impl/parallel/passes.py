"""What a schedule's actions do on a rank: the F of an evaluation; the F, B, I and W of a training step."""
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.models.model import model_backward, model_forward
from mpi_impl.parallel.sinks import DeferredSink, ImmediateSink
from reference.config import ModelConfig, Recompute
from reference.costs.activation_inventory import array_bytes
from reference.dropout import Dropout
from reference.models.stage import KEEP_INPUT, StageCache, has_head
from reference.schedules.actions import Action


class ForwardPass:
    """Some microbatches on their way through this rank's stages, forward only."""

    def __init__(self, model: ModelConfig, region: TensorParallelRegion, params: dict[int, Any],
                 microbatches: Sequence, totals: Sequence[float]):
        """`params` are this rank's, by stage; `microbatches` are batches (reference/batches.py).

        `totals` are what the weights of the global batch's losses add up to, for each head.
        """
        self.model, self.region, self.params = model, region, params
        self.microbatches, self.totals = microbatches, totals
        self.dropouts: Sequence[Dropout | None] = [None] * len(microbatches)    # nothing is dropped,
        self.recompute = KEEP_INPUT                    # and nothing is kept for a backward
        # The heads' weighted sums, where the last stage is. They stay where they are computed: to look is to wait.
        self.losses = np.zeros(len(totals), np.float64, like=microbatches[0].tokens)
        self.dtypes: list = []                         # of the heads' losses
        self.compute: dict[str, Callable] = {"F": self.forward}

    def forward(self, action: Action, x):
        """x [b, s, h] of the stage before -> x for the next; None of the last stage, which adds to the losses."""
        params, batch = self.params[action.stage], self.microbatches[action.microbatch]
        y, cache = model_forward(x, params, self.model, batch, self.region, self.dropouts[action.microbatch],
                                 self.recompute)
        self.keep(action, y, cache)
        if has_head(params, self.model):
            self.dtypes = [loss.dtype for loss in y]
            for i, (loss, weights) in enumerate(zip(y, self.weights(batch), strict=True)):
                self.losses[i] += (loss * weights).sum(dtype=np.float64)
            return None
        return y

    def weights(self, batch) -> list:
        """Of the heads' losses in the whole: float64, of the losses' shapes."""
        return [weights / total for weights, total in zip(batch.weights_of_heads(self.model.heads), self.totals)]

    def keep(self, action: Action, y, cache: StageCache) -> None:
        """Nothing goes backward, so no cache is kept."""


class TrainingPass(ForwardPass):
    """Forward and backward, with gradients added to `grads`, by stage, through the sink."""

    def __init__(self, model: ModelConfig, region: TensorParallelRegion, params: dict[int, Any],
                 microbatches: Sequence, totals: Sequence[float], grads: dict[int, Any], contributed: Callable,
                 dropouts: Sequence[Dropout], recompute: Recompute, scale: float = 1.0, measured: bool = False):
        """`contributed` is handed the units of `grads` to which a microbatch has given all; `dropouts` are the
        microbatches'. Gradients are those of `scale` times the loss. If the run is `measured`, peak_activations is the
        most bytes that were held, and peak_recomputed of what was held besides while layers were computed again.
        """
        super().__init__(model, region, params, microbatches, totals)
        self.grads, self.dropouts, self.recompute, self.scale = grads, dropouts, recompute, scale
        self.sink = ImmediateSink(contributed, self.measure_recomputed)
        self.measured, self.peak_activations, self.peak_recomputed = measured, 0, 0
        self.caches: dict[tuple[int, int], StageCache] = {}       # by stage and microbatch: from F until B, or until I
        self.deferred: dict[tuple[int, int], DeferredSink] = {}   # from I until W
        self.peak_caches = 0                                      # the most of both that were ever held
        self.compute |= {"B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}

    def keep(self, action: Action, y, cache: StageCache) -> None:
        self.caches[action.stage, action.microbatch] = cache
        self.peak_caches = max(self.peak_caches, len(self.caches) + len(self.deferred))
        self.measure()

    def measure(self) -> None:
        """What this rank holds now."""
        if self.measured:
            waiting = [sink.held() for sink in self.deferred.values()]
            held = array_bytes(self.caches, waiting, besides=self.microbatches)
            self.peak_activations = max(self.peak_activations, held)

    def measure_recomputed(self, caches) -> None:
        """What a backward has computed again."""
        if self.measured:
            self.peak_recomputed = max(self.peak_recomputed, array_bytes(caches, besides=self.microbatches))

    def backward(self, action: Action, dy):
        """dx of the stage after -> dx for the stage before, with all gradients."""
        return self.differentiate(action, dy, self.sink)

    def input_gradient(self, action: Action, dy):
        """The same, but the gradients of weight matrices wait for W. The others cost little, and are added now."""
        sink = self.deferred[action.stage, action.microbatch] = DeferredSink(self.sink)
        dx = self.differentiate(action, dy, sink)
        self.measure()
        return dx

    def weight_gradient(self, action: Action, _) -> None:
        """What the input gradient put off."""
        self.deferred.pop((action.stage, action.microbatch)).drain()

    def differentiate(self, action: Action, dy, sink):
        params, cache = self.params[action.stage], self.caches.pop((action.stage, action.microbatch))
        if has_head(params, self.model):
            weights = self.weights(self.microbatches[action.microbatch])
            dy = tuple((self.scale * each).astype(dtype) for each, dtype in zip(weights, self.dtypes))
        return model_backward(dy, params, cache, self.model, self.grads[action.stage], sink, self.region)
