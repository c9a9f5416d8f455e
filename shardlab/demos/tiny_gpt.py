"""The GPT that several demos train, its tokens, and the textbook's run that theirs must equal.

It is so small that a step takes milliseconds, and so simple that you can count its numbers by hand: no dropout, no
padding of the vocabulary, and an output table separate from the embedding's.
"""
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.comm.instruments import Instruments
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.comm.trace import Trace
from mpi_impl.parallel.buffers import Buffer
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig, number_of_microbatches
from reference.models.stage import has_embedding, has_head
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.parallel.pipeline import split_into_stages
from reference.parallel.stages import layers_of_rank
from reference.params import leaves, split
from reference.precision import Precision
from reference.training import trainer as training
from shardlab.demos.printing import and_list, span
from shardlab.demos.runner import Demo

SEED, FLOAT64 = 1, Precision("float64")
WORDS, POSITIONS = 12, 6

# The key bias's gradient is 0 but for rounding, which Adam must not scale up: eps is above it.
OPTIMIZER = OptimizerConfig(lr=0.01, lr_decay_iters=1, lr_decay_style="constant", adam_eps=1e-4)


def tiny_gpt(num_layers: int, heads: int = 2) -> ModelConfig:
    """Return the config of a GPT with 4 columns per head."""
    return ModelConfig(num_layers, 4 * heads, heads, WORDS, POSITIONS, untie_embeddings_and_output_weights=True,
                       init_method_std=0.2, hidden_dropout=0, attention_dropout=0, make_vocab_size_divisible_by=1)


@contextmanager
def training_on(world: Group, model: ModelConfig, parallel: ParallelConfig,
                optimizer: OptimizerConfig = OPTIMIZER, precision: Precision = FLOAT64) -> Iterator[Trainer]:
    """Make a trainer, for the duration of the `with` block."""
    topology = connect(world, parallel)
    try:
        yield Trainer(ModelState(model, topology, SEED, precision, world.instruments.like), optimizer)
    finally:
        disconnect(topology)


def apart(ranks: Group, trace: bool = False) -> Group:
    """Return the same ranks with a ledger of their own, and a trace."""
    device = ranks.instruments
    return Group(ranks.comm, ranks.name, Instruments(trace=Trace(recording=trace), like=device.like,
                                                     device_path=device.device_path))


def textbook_of(model: ModelConfig, optimizer: OptimizerConfig = OPTIMIZER) -> training.Trainer:
    """Return the textbook's trainer for the same run in one process."""
    return training.Trainer(model, optimizer, SEED, FLOAT64)


def global_batch(step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets [B, s], identical on every rank. Counting on from the first token gives all others."""
    first = np.random.default_rng([SEED, step]).integers(WORDS, size=(samples, 1))
    windows = (first + np.arange(POSITIONS + 1)) % WORDS
    return windows[:, :-1], windows[:, 1:]


def share_of(trainer: Trainer, tokens, targets, b: int) -> list:
    """Return this replica's microbatches of b samples."""
    replica, d = trainer.topology.place.data, trainer.topology.data.size
    mine = [samples_of(replica, k, d, b) for k in range(number_of_microbatches(len(tokens), b, d))]
    tokens, targets = (np.asarray(x, like=trainer.state.device_prototype) for x in (tokens, targets))
    return [GPTBatch(tokens[samples], targets[samples]) for samples in mine]


def step_and_compare(demo: Demo, trainer: Trainer, textbook: training.Trainer, step: int, samples: int,
                     b: int, traced: AbstractContextManager | None = None) -> tuple[float, float]:
    """Take the same training step on the ranks, `traced`, and in one process, and compare. Return both losses."""
    tokens, targets = global_batch(step, samples)
    with traced or nullcontext():
        result = trainer.step(share_of(trainer, tokens, targets, b), samples)
    loss, norm, grads = textbook.step(GPTBatch(tokens, targets))
    demo.equal("every loss", result.loss, loss)
    demo.equal("norm of the gradient", result.grad_norm, norm)
    check_tensors(demo, "every gradient", trainer, trainer.state.gradients.own, grads)
    return result.loss, loss


def holds(trainer: Trainer) -> str:
    """Describe what a rank holds: 'the embedding, layer 0 and layer 4'."""
    layers = [span(held.start, held.stop, "layer") for held in trainer.state.stages.values()]
    tensors = trainer.state.layout.tensors
    return and_list([*["the embedding"] * has_embedding(tensors), *layers,
                     *["the head"] * has_head(tensors, trainer.state.model)])


def check_tensors(demo: Demo, what: str, trainer: Trainer, buffer: Buffer, whole) -> None:
    """Compare every tensor of which this rank has a part with that part of the textbook's `whole` model."""
    parallel, tensors = trainer.topology.config, trainer.state.layout.tensors
    stage, = split_into_stages(whole, [layers_of_rank(trainer.state.stages)], trainer.state.model)
    expected = split(stage, tensors, parallel.tensor_model_parallel_size)[trainer.topology.tensor.rank]
    found = dict(leaves(trainer.state.layout.views(trainer.state.whole(buffer))))
    demo.equal(what, {name: found[name] for name, _ in leaves(expected)}, expected)
