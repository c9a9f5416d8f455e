"""The machine at work, and nothing around it: a small GPT learns a text, byte by byte, on t x p x d ranks.

    mpirun -np 8 python -m mpi_impl.train --t 2 --p 2       # so d is 2: two replicas of two stages, each on two ranks

Read it first, and from here what it calls: `connect` forms the groups of ranks, `ModelState` holds this rank's part of
the model, `Trainer` makes the steps. `pretrain_gpt` is this loop with Megatron's options and all instruments.
"""
import argparse
from pathlib import Path

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.comm.topology import connect, disconnect
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig, number_of_microbatches, require_positive
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.data_parallel import samples_of
from reference.precision import Precision

BYTES = 256     # the vocabulary
OWN_LAYERS = Path(__file__).parent / "layers"      # the text, if no other is named


def main(argv: list[str] | None = None) -> None:
    """Train, and print the losses. All ranks call this. Raises UserError for sizes that do not fit."""
    options, ranks = options_of(argv), world()
    require_positive("train_iters", options.train_iters)
    model = ModelConfig(options.num_layers, options.hidden_size, options.num_attention_heads, BYTES, options.seq_length,
                        hidden_dropout=0.0, attention_dropout=0.0)
    parallel = parallel_of(options, ranks.size)
    b, batch = options.micro_batch_size, options.global_batch_size
    m = number_of_microbatches(batch, b, parallel.data_parallel_size)
    text = ranks.broadcast_object(lambda: read(options.text, options.seq_length))

    topology = connect(ranks, parallel)
    state = ModelState(model, topology, options.seed, Precision("float32"))
    trainer = Trainer(state, OptimizerConfig(options.lr, options.train_iters))
    if ranks.rank == 0:
        print(f"{ranks.size} ranks: tensor {options.t} x pipeline {options.p} x data {parallel.data_parallel_size}; "
              f"{state.layout.size:,} parameters on rank 0", flush=True)
    for step in range(options.train_iters):
        tokens = draw(text, batch, options.seq_length, np.random.default_rng([options.seed, step]))
        mine = [samples_of(topology.place.data, k, topology.data.size, b) for k in range(m)]
        result = trainer.step([GPTBatch(tokens[samples, :-1], tokens[samples, 1:]) for samples in mine], batch)
        if ranks.rank == 0:
            print(f"step {step + 1:3}  loss {result.loss:.4f}  gradient {result.grad_norm:.3f}", flush=True)
    disconnect(topology)


def options_of(argv: list[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = ArgumentParser(prog="mpi_impl.train", description="Train a small GPT on all ranks.")
    for name, default, about in (
            ("t", 1, "ranks that share each layer: tensor parallelism"),
            ("p", 1, "stages of the pipeline"), ("zero-stage", 0, "what replicas share of the states: 0 to 3"),
            ("num-layers", 4, "of the model"), ("hidden-size", 64, "columns of the model"),
            ("num-attention-heads", 4, "in each layer"), ("seq-length", 64, "tokens in a sample"),
            ("global-batch-size", 16, "samples in a step"),
            ("micro-batch-size", 2, "samples that go through the pipeline together"), ("train-iters", 20, "steps"),
            ("seed", 1, "of weights and samples")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default: {default})")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--text", type=Path, default=OWN_LAYERS, help="a file to learn (default: our own layers)")
    return parser.parse_args(argv)


def parallel_of(options, size: int) -> ParallelConfig:
    """Give what t and p leave to data parallelism. Raises UserError if they do not divide the ranks."""
    if min(options.t, options.p) < 1 or size % (options.t * options.p):
        raise UserError(f"--t x --p is {options.t} x {options.p}, which does not divide the {size} ranks. Choose "
                        "others, or start another number of ranks.")
    return ParallelConfig(options.t, options.p, size // (options.t * options.p), zero_stage=options.zero_stage)


def read(path: Path, length: int) -> np.ndarray:
    """Return the bytes of a file, or of all Python files in a folder. Raises UserError if they are too few."""
    try:
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    except OSError as error:
        raise UserError(f"--text is {path}, which cannot be read: {error.strerror}.") from None
    if len(text) <= length:
        raise UserError(f"--text is {path}, which has {len(text)} bytes, but a sample takes {length + 1}.")
    return text


def draw(text: np.ndarray, samples: int, length: int, random: np.random.Generator) -> np.ndarray:
    """Draw pieces of the text, int64 [samples, length + 1], the same on all ranks."""
    starts = random.integers(len(text) - length, size=(samples, 1))
    return text[starts + np.arange(length + 1)].astype(np.int64)


if __name__ == "__main__":
    run(main)
