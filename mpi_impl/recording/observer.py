"""The observer of a training step: it names each tensor that a rank sees, and finds its place in the whole tensor."""
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.passes import TrainingPass
from mpi_impl.recording.names import PREDICTED
from mpi_impl.runtime.arrays import to_host, widened
from reference.models.bert import HEADS
from reference.models.stage import has_embedding, has_head
from reference.parallel.boxes import boxes_of_piece, shape_of, without_padding
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import unit_of
from reference.params import leaves
from reference.schedules.actions import Action

# The factors of a weight's gradient x^T dy: the input kept by the forward, and the gradient of the output.
FACTORS = {"attention.w_qkv": ("attention.input", "attention.qkv"),
           "attention.w_out": ("attention.context", "attention.partial"),
           "mlp.w_in": ("mlp.input", "mlp.pre_activation"), "mlp.w_out": ("mlp.hidden", "mlp.partial")}
BY_COLUMNS = ("attention.context", "mlp.hidden", "mlp.pre_activation", "logits", "probabilities")    # of [b, s, n/t]
OF_WORDS = ("logits", "probabilities")          # of [b, s, V/t], padding included


class Observer(ABC):
    """A rank's view of a step. Subclasses decide what to do with it."""

    def __init__(self, state: ModelState):
        self.state, self.topology = state, state.topology
        self.tensor_rank = state.topology.tensor.rank
        self.first_stage = has_embedding(state.layout.tensors)
        self.last_stage = has_head(state.layout.tensors, state.model)
        self.iteration = 0      # before the first step

    @abstractmethod
    def see(self, phase: str, name: str, x: Any, first: tuple[int, ...], summed: bool = False) -> None:
        """See a part of a tensor, which begins at `first` in the whole. It may be overwritten later.

        With `summed` the whole is the sum of several ranks' parts; otherwise they are identical.
        """

    # ---- the beginning and the end of a step: called by the trainer and its pass ----

    def begin_step(self, work: TrainingPass, iteration: int) -> None:
        """Begin a step of this ObservedPass."""
        self.work, self.iteration = work, iteration
        self.unit, self.used, self.gradients = "", set[str](), dict[str, Any]()
        for self.microbatch, batch in enumerate(work.microbatches):
            for name, x in batch._asdict().items():
                if x is not None and (self.last_stage if name in PREDICTED else self.first_stage):
                    self.see_inside("batch", name, x)

    def see_reduction(self, loss: float) -> None:
        """See the gradients and the loss after their sum over the ranks."""
        self.see_pieces("reduction", self.state.gradients.own, self.work.scale)
        if self.last_stage and self.tensor_rank == 0:
            self.see("step", "loss of each replica", to_host(self.work.losses), (0,), summed=True)
        self.see("step", "mean loss", np.stack([loss]), (0,))
        self.gradients = {}         # with ZeRO these buffers must not live longer

    def see_update(self, norm: float, rate: float) -> None:
        """See the optimizer's states after its step. If the norm is not finite, they have not moved."""
        self.see("step", "gradient norm", np.stack([norm]), (0,))
        self.see("step", "learning rate", np.stack([rate]), (0,))
        for state, buffer in self.state.optimizer_states.items():
            self.see_pieces(f"optimizer {state}", buffer)

    # ---- in between: called by the observed pass ----

    def begin_action(self, action: Action) -> None:
        """Note the schedule's next action. A forward inside a backward is a recomputed layer."""
        self.microbatch, self.computing = action.microbatch, "forward" if action.kind == "F" else "recompute"

    def see_parameters(self, unit: str, tensors) -> None:
        """See the parameters of a unit, which begins its work."""
        self.unit = unit
        for name, x in leaves(tensors, unit):
            if name not in self.used:
                self.used.add(name)
                self.see_parameter("parameters", name, x)

    def begin_gradients(self, unit: str, tensors) -> None:
        """Note the gradients of a unit, to which its backward is about to add."""
        self.unit = unit
        self.gradients |= leaves(tensors, unit)

    def see_gradients(self, unit: str) -> None:
        """See a unit's gradients after a microbatch: after the last one they are complete on this rank.

        (With ZeRO-2 and 3 each microbatch's are reduced and freed. If the gradient is identical on all tensor-parallel
        ranks, only the first rank's counts.)
        """
        if not self.state.gradients.whole_after_backward:
            return
        for name, segment in self.state.layout.by_name.items():
            if unit_of(name) == unit:
                identical = segment.tensor.split is None and not self.topology.config.sequence_parallel
                if self.tensor_rank == 0 or not identical:
                    self.see_parameter("gradients", name, self.gradients[name] / self.work.scale, summed=True)

    def see_factors(self, grad, x, dy) -> None:
        """See x^T dy, which is added to a weight's gradient."""
        name = next(name for name, known in self.gradients.items() if np.may_share_memory(known, grad))
        unit = unit_of(name)
        if unit == name:                                 # a word table: it gets dlogits^T x
            self.see_inside("kept", "logits.input", dy)
            self.see_inside("backward", "logits", x)
            return
        if unit in HEADS:
            self.see_factors_of_head(name.removesuffix(".w"), unit, x, dy)
            return
        kept, gradient = FACTORS[name.removeprefix(f"{unit}.")]
        if gradient == "attention.qkv":                  # [b, s, 3 h/t] -> [b, s, 3, a/t, d]
            dy = dy.reshape(*dy.shape[:2], 3, -1, self.state.model.head_size)
        self.see_inside("kept", f"{unit}.{kept}", x)
        self.see_inside("backward", f"{unit}.{gradient}", dy)

    def see_factors_of_head(self, layer: str, unit: str, x, dy) -> None:
        """See the factors of a linear layer on top of a BERT: for all positions, or only the first."""
        if unit == "lm_head":
            self.see_outside("kept", f"{layer}.input", x)
            self.see_outside("backward", f"{layer}.output", dy)
        elif self.has_first_position:
            self.see_inside("kept", f"{layer}.input", x)
            self.see_inside("backward", f"{layer}.output", dy)

    # ---- the place of a part in the whole ----

    @property
    def has_first_position(self) -> bool:
        """Report whether this rank holds the first position outside the regions."""
        return self.tensor_rank == 0 or not self.topology.config.sequence_parallel

    @property
    def sample(self) -> int:
        """Return the index of the microbatch's first sample in the global batch."""
        b = len(self.work.microbatches[0].tokens)
        return samples_of(self.topology.place.data, self.microbatch, self.topology.data.size, b).start

    def see_outside(self, phase: str, name: str, x) -> None:
        """See x [b, s, ...] outside the regions, this rank's positions."""
        positions = self.state.region.positions(x)
        self.see(phase, name, self.unscaled(phase, x), (self.sample, positions.start, *[0] * (x.ndim - 2)))

    def see_inside(self, phase: str, name: str, x, axis: int | None = None, summed: bool = False) -> None:
        """See x [b, ...] of all positions: identical on all tensor-parallel ranks, or sharded along an axis."""
        site = name.removeprefix(f"{unit_of(name)}.")
        axis = 2 if site in BY_COLUMNS else 3 if site == "attention.qkv" else axis
        first = [self.sample, *[0] * (x.ndim - 1)]
        if axis is not None:
            first[axis] = self.tensor_rank * x.shape[axis]
        if site in OF_WORDS:
            x = x[..., :max(self.state.model.vocab_size - first[2], 0)]
        self.see(phase, name, self.unscaled(phase, x), tuple(first), summed)

    def unscaled(self, phase: str, x):
        """Divide gradients by the loss scale, in a format that is wide enough."""
        return widened(x) / self.work.scale if phase == "backward" and self.work.scale != 1 else x

    def see_parameter(self, phase: str, name: str, x, summed: bool = False) -> None:
        """See this rank's shard x of a parameter, or of its gradient, without padding."""
        tensor, first = self.state.layout.by_name[name].tensor, [0] * x.ndim
        if (split := tensor.split) is not None:
            first[split] = self.tensor_rank * x.shape[split]
            x = x[(slice(None),) * split + (slice(max(tensor.shape[split] - first[split], 0)),)]
        self.see(phase, name, x, tuple(first), summed)

    def see_pieces(self, phase: str, buffer, scale: float = 1.0) -> None:
        """See this rank's own pieces of a buffer that has its parameters' layout."""
        for piece in without_padding(self.state.pieces, self.tensor_rank):
            values, start = buffer.load(piece), 0
            for box in boxes_of_piece(piece, self.tensor_rank):
                shape = shape_of(box)
                stop = start + int(np.prod(shape))
                x = values[start:stop].reshape(shape)
                self.see(phase, piece.of.name, x / scale if scale != 1 else x, tuple(along.start for along in box))
                start = stop
