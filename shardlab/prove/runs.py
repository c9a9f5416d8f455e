"""Two steps on exact numbers, with every tensor recorded: on ranks, and in the textbook.

The textbook has no observer. Its caches, gradients and states are shown to one that keeps them as wholes, under the
names that they have on ranks.
"""
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.batches import Batches, whole_batch
from mpi_impl.training.trainer import Trainer
from reference.exact.array import as_exact
from reference.layer_context import LayerContext
from reference.models.model import model_forward
from reference.optimizers.adam import clip_coefficient
from reference.params import assign, leaves, shard, tree_map, with_names
from reference.precision import Precision
from reference.random.dropout import Dropout
from reference.training import trainer as training
from reference.training.random_start import RandomSamples, random_parameters, start_textbook
from shardlab.compare.names import Key
from shardlab.compare.observed import show_stage
from shardlab.compare.observer import Observer
from shardlab.compare.recorder import Recorder
from shardlab.compare.recording import TensorPart
from shardlab.prove.comparison import Parts
from shardlab.prove.sizes import ProofSizes

STEPS = 2       # in the first the optimizer has no state; the second uses the weights that the first has moved


def play_on_ranks(sizes: ProofSizes, topology: Topology, seed: int) -> Iterator[Parts]:
    """Yield this rank's parts of the initial weights, and of each step. All ranks of the topology call this."""
    model, b = sizes.model, sizes.micro_batch_size
    state = ModelState(model, topology, seed, Precision("float64"), as_exact(np.empty(0)))
    trainer, recorder = Trainer(state, sizes.optimizer), Recorder(state)
    recorder.see_pieces("optimizer parameters", state.parameters.own)
    yield recorder.pop_parts()
    start_ranks(state, random_parameters(model, seed))
    samples, batch = random_samples(sizes, seed), sizes.global_batch_size
    batches = Batches(samples if topology.place.tensor == 0 else None, model, topology, sizes.seq_length, b,
                      batch // (b * topology.data.size))
    for step in range(STEPS):
        trainer.step(batches.microbatches_of("train", step), batch, recorder)
        yield recorder.pop_parts()


def start_ranks(state: ModelState, whole) -> None:
    """Add its shards of these numbers to a rank's initial parameters, which are few numbers, often 0 or 1."""
    tensor, e, values = state.topology.tensor, state.layout.e, dict(leaves(whole))
    flat = np.zeros_like(state.device_prototype, shape=state.layout.size)
    tree_map(lambda view, named: assign(view, shard(values[named.name], named.leaf, tensor.size, tensor.rank, e,
                                                    state.topology.expert_rank)),
             state.layout.views(flat), with_names(state.layout.tensors))
    for piece in state.pieces:
        state.parameters.own.store(piece, state.parameters.own.load(piece) + flat[piece.in_buffer])
    state.zero.finish_update()


def play_in_textbook(sizes: ProofSizes, seed: int) -> Iterator[Parts]:
    """Yield the same tensors, as far as the textbook has them, of the whole batch in one pass."""
    model, seen = sizes.model, WholeTensors()
    trainer = training.Trainer(model, sizes.optimizer, seed, Precision("float64"))
    seen.see_tree("optimizer parameters", trainer.params)
    yield seen.pop_parts()
    start_textbook(trainer, random_parameters(model, seed))
    samples = random_samples(sizes, seed)
    for step in range(STEPS):
        seen.iteration = step + 1
        batch = whole_batch(samples, model, "train", step, sizes.global_batch_size)
        for name, x in batch._asdict().items():
            if x is not None:
                seen.see_inside("batch", name, x)
        seen.see_tree("parameters", trainer.params)
        seen.see_forward(trainer, batch)
        loss, norm, clipped = trainer.step(batch)
        factor = clip_coefficient(norm, sizes.optimizer.clip_grad)
        for name, grad in leaves(clipped):
            for phase in ("gradients", "reduction"):      # the same in one process
                seen.see_inside(phase, name, grad / factor)
        seen.see_inside("step", "mean loss", np.stack([loss]))
        seen.see_inside("step", "gradient norm", np.stack([norm]))
        for state, tree in (("m", trainer.m), ("v", trainer.v), ("parameters", trainer.params)):
            seen.see_tree(f"optimizer {state}", tree)
        yield seen.pop_parts()


def random_samples(sizes: ProofSizes, seed: int) -> Any:
    return RandomSamples(sizes.model, sizes.seq_length, seed)


class WholeTensors:
    """An observer of one process, which has every tensor whole."""

    has_first_position = True

    def __init__(self):
        self.iteration, self.parts = 0, []

    def see_inside(self, phase: str, name: str, x, place=None) -> None:
        """Keep a copy, wherever it is on ranks. No tensor is seen twice."""
        part = TensorPart(0, (0,) * x.ndim, x.shape, summed=False)
        self.parts.append((Key(self.iteration, phase, name), part, np.copy(x)))

    see_activation = see_outside = see_inside

    def see_tree(self, phase: str, tree) -> None:
        for name, x in leaves(tree):
            self.see_inside(phase, name, x)

    def see_forward(self, trainer: training.Trainer, batch) -> None:
        """See the activations of the next step's forward, which is computed here once more."""
        context = LayerContext(Dropout(trainer.model, trainer.seed, self.iteration))
        losses, cache = model_forward(None, trainer.params, trainer.model, batch, context)
        show_stage(cast(Observer, self), trainer.model, losses, cache)

    def pop_parts(self) -> Parts:
        """Return the parts seen since the last call, and forget them."""
        found, self.parts = self.parts, []
        return found
