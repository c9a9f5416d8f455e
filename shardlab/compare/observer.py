"""The observer of a training step: it names each tensor that a rank sees, and finds its place in the whole tensor."""
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpi_impl.models.bert import positions_to_predict
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.passes import TrainingPass
from mpi_impl.runtime.arrays import to_host, widened
from reference.activations import Activation
from reference.layers.layer import layers_in
from reference.models.bert import CLASSIFIERS, HEADS
from reference.models.stage import has_embedding, has_head
from reference.parallel.boxes import boxes_of_piece, shape_of, without_padding
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import SHARED_BLOCK, unit_of
from reference.params import leaves
from reference.schedules.actions import Action
from shardlab.compare.names import OF_SEQUENCES, PREDICTED, name_inside
from shardlab.compare.observed import ObservedPass

OF_WORDS = ("logits", "probabilities")          # of [b, s, V/t], padding included
OF_SAMPLES = ("lengths", "swapped", "answers", *(f"{head} {name}" for head in OF_SEQUENCES
                                                 for name in ("probabilities", "loss")),
              "pooler", *CLASSIFIERS.values())    # tensors and units without an axis of positions


class Observer(ABC):
    """A rank's view of a step. Subclasses decide what to do with it."""

    def __init__(self, state: ModelState):
        self.state, self.topology = state, state.topology
        self.tensor_rank = state.topology.tensor.rank
        self.first_stage = has_embedding(state.layout.tensors)
        self.last_stage = has_head(state.layout.tensors, state.model)
        self.layers = dict(layers_in(state.layout.tensors))
        self.iteration = 0      # before the first step
        self.action = self.unit = ""        # the schedule's action and the layer at work; "" between actions

    @abstractmethod
    def see(self, phase: str, name: str, x: Any, first: tuple[int, ...], summed: bool = False) -> None:
        """See a part of a tensor, which begins at `first` in the whole. It may be overwritten later.

        With `summed` the whole is the sum of several ranks' parts; otherwise they are identical.
        """

    # ---- the beginning and the end of a step: called by the trainer and its pass ----

    def observed_pass(self, iteration: int, *arguments) -> TrainingPass:
        """Return a TrainingPass that shows its tensors to this observer."""
        return ObservedPass(self, iteration, *arguments)

    def begin_step(self, work: TrainingPass, iteration: int) -> None:
        """Begin a step of this ObservedPass."""
        self.work, self.iteration = work, iteration
        self.part = self.state.part(work.microbatches)
        self.used, self.gradients = set[str](), dict[str, Any]()
        for self.microbatch, batch in enumerate(work.microbatches):
            for name, x in batch._asdict().items():
                if x is not None and name != "counted" and (self.last_stage if name in PREDICTED else self.first_stage):
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
        self.action, self.microbatch = str(action), action.microbatch
        self.computing = "forward" if action.kind == "F" else "recompute"

    def end_action(self) -> None:
        """Note that the action is over: no layer is at work."""
        self.action = self.unit = ""

    def see_parameters(self, place: str, unit: str, tensors) -> None:
        """See the parameters of a unit, which begins its work in this place: `blocks.3`, which may be a shared block.
        """
        self.unit = place
        for name, x in leaves(tensors, unit):
            if name not in self.used:
                self.used.add(name)
                self.see_parameter("parameters", name, x)

    def begin_gradients(self, place: str, unit: str, tensors) -> None:
        """Note the gradients of a unit, to which its backward in this place is about to add."""
        self.unit = place
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
                partial = self.topology.config.sequence_parallel and not segment.tensor.dealt
                partial = partial or segment.tensor.most_shards is not None
                if partial or self.tensor_rank % segment.copies == 0:
                    self.see_parameter("gradients", name, self.gradients[name] / self.work.scale, summed=True)

    def see_factors(self, grad, x, dy) -> None:
        """See x^T dy, which is added to a weight's gradient. (Of a shared block, it tells no layer.)"""
        name = next(name for name, known in self.gradients.items() if np.may_share_memory(known, grad))
        unit = unit_of(name)
        if unit == SHARED_BLOCK:
            return
        if unit == name:                                 # a word table: it gets dlogits^T x
            self.see_inside("kept", "logits.input", self.at_all_positions(dy))
            self.see_inside("backward", "logits", self.at_all_positions(x), axis=2)
            return
        if unit in HEADS:
            self.see_factors_of_head(name.removesuffix(".w"), unit, x, dy)
            return
        if ".mlp.experts." in name:                      # the rows are copies of tokens, in an order of their own
            return
        if name.endswith(".mlp.router"):
            self.see_outside("backward", f"{unit}.mlp.logits", dy)
            return
        layer, _, weight = name.rpartition(".")
        kept, result = self.layers[layer].products[weight]
        segment = self.state.layout.by_name[name]
        split, copies = segment.tensor.split, segment.copies
        kept = name_inside(layer) if kept == "input" else f"{layer}.{kept}"
        self.see_inside("kept", kept, x, axis=2 if split == 0 else None)             # x [b, s, n/t] @ w [n/t, ...]
        dy = dy.reshape(*dy.shape[:2], *segment.shape[1:])               # such as [b, s, 3 h/t] -> [b, s, 3, a/t, d]
        partial = segment.tensor.most_shards is not None and copies > 1
        self.see_inside("backward", f"{layer}.{result}", dy, split + 1 if split else None, partial, copies)

    def see_factors_of_head(self, layer: str, unit: str, x, dy) -> None:
        """See the factors of a linear layer on top of a BERT: for all positions, or only the first."""
        if unit in ("lm_head", "span_head"):
            self.see_outside("kept", f"{layer}.input", x)
            self.see_outside("backward", f"{layer}.output", dy)
        elif self.has_first_position:
            self.see_inside("kept", f"{layer}.input", x)
            self.see_inside("backward", f"{layer}.output", dy)

    def at_all_positions(self, x):
        """Return x [b, s, ...] of the logits' x [b, n, ...], which has those that a BERT predicts: 0 elsewhere."""
        if self.state.model.causal:
            return x
        at = positions_to_predict(self.work.microbatches[self.microbatch], self.state.model, self.state.region)
        return at.scatter(widened(x) * at.real[..., None])

    # ---- the place of a part in the whole ----

    @property
    def copies_of_keys(self) -> int:
        """Return how many neighbouring ranks hold the same head of keys and values."""
        return max(1, self.topology.tensor.size // self.state.model.groups)

    @property
    def has_first_position(self) -> bool:
        """Report whether this rank holds the first position outside the regions."""
        return self.in_first_chunk and (self.tensor_rank == 0 or not self.topology.config.sequence_parallel)

    @property
    def in_first_chunk(self) -> bool:
        """Report whether this rank's part of a sequence begins with the first position."""
        return self.part is None or self.part.has_first_position

    @property
    def sample(self) -> int:
        """Return the index of the microbatch's first sample in the global batch."""
        b = len(self.work.microbatches[0].tokens)
        return samples_of(self.topology.place.data, self.microbatch, self.topology.data.size, b).start

    def see_outside(self, phase: str, name: str, x) -> None:
        """See x [b, s, ...] outside the regions, this rank's positions."""
        first = (self.sample, self.state.region.positions(x).start, *[0] * (x.ndim - 2))
        self.see_positions(phase, name, self.unscaled(phase, x), first)

    def see_positions(self, phase: str, name: str, x, first: tuple[int, ...], summed: bool = False) -> None:
        """See x [b, n, ...], of which first[1] is the first position among those that this rank has."""
        runs = [slice(first[1], first[1] + x.shape[1])] if self.part is None else self.part.runs(
            slice(first[1], first[1] + x.shape[1]))
        for run, piece in zip(runs, np.split(x, len(runs), 1)):
            self.see(phase, name, piece, (first[0], run.start, *first[2:]), summed)

    def see_inside(self, phase: str, name: str, x, axis: int | None = None, summed: bool = False,
                   copies: int = 1) -> None:
        """See x [b, ...] of all positions of this rank's part: identical on all tensor-parallel ranks, or sharded along
        an axis; then `copies` neighbouring ranks have the same shard, or each a part of it. Where there are no
        positions, see it on ranks whose part begins with the first.
        """
        first = [self.sample, *[0] * (x.ndim - 1)]
        if axis is not None:
            first[axis] = self.tensor_rank // copies * x.shape[axis]
        if name in OF_WORDS:
            x = x[..., :max(self.state.model.vocab_size - first[2], 0)]
        if x.ndim > 1 and name not in OF_SAMPLES and unit_of(name) not in OF_SAMPLES:
            self.see_positions(phase, name, self.unscaled(phase, x), tuple(first), summed)
        elif self.in_first_chunk:
            self.see(phase, name, self.unscaled(phase, x), tuple(first), summed)

    def see_activation(self, phase: str, name: str, x, place: Activation) -> None:
        """See an activation in a cache."""
        if place.exchanged:
            self.see_exchanged(phase, name, x, place.axis)
        elif place.inside:
            self.see_inside(phase, name, x, place.axis, copies=self.copies_of_keys if place.of_keys else 1)
        else:
            self.see_outside(phase, name, x)

    def see_exchanged(self, phase: str, name: str, x, axis) -> None:
        """See x of all positions and of those heads, along an axis, that this rank got from its context group."""
        c, first = self.topology.config.context_parallel_size, [self.sample, *[0] * (x.ndim - 1)]
        first[axis] = (self.tensor_rank * c + self.topology.place.context) * x.shape[axis]
        self.see(phase, name, x, tuple(first))

    def unscaled(self, phase: str, x):
        """Divide gradients by the loss scale, in a format that is wide enough."""
        return widened(x) / self.work.scale if phase == "backward" and self.work.scale != 1 else x

    def see_parameter(self, phase: str, name: str, x, summed: bool = False) -> None:
        """See this rank's shard x of a parameter, or of its gradient, without padding."""
        tensor, first = self.state.layout.by_name[name].tensor, [0] * x.ndim
        if tensor.dealt:
            first[0] = self.topology.expert_rank * x.shape[0]
        if (split := tensor.split) is not None:
            first[split] = self.tensor_rank // self.state.layout.by_name[name].copies * x.shape[split]
            x = x[(slice(None),) * split + (slice(max(tensor.shape[split] - first[split], 0)),)]
        self.see(phase, name, x, tuple(first), summed)

    def see_pieces(self, phase: str, buffer, scale: float = 1.0) -> None:
        """See this rank's own pieces of a buffer that has its parameters' layout."""
        for piece in without_padding(self.state.pieces_in(buffer, self.state.pieces), self.tensor_rank):
            values, start = buffer.load(piece), 0
            for box in boxes_of_piece(piece, self.tensor_rank, self.topology.expert_rank):
                shape = shape_of(box)
                stop = start + int(np.prod(shape))
                x = values[start:stop].reshape(shape)
                self.see(phase, piece.of.name, x / scale if scale != 1 else x, tuple(along.start for along in box))
                start = stop
