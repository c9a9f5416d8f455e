"""One rank of Shardlab's side of cpu_step.py: a training step of a tensor-parallel GPT, taken when told to.

Started with the sizes of a work, as 512,6,8,256,8,8192, and the number of microbatches that a step has, all alike; with
`--sequence-parallel`, that is on, and keeps what it gathers, so that it sends no more than without.
"""
import sys

import numpy as np
from turns import serve
from works import Work

from mpi_impl.comm.group import world
from mpi_impl.comm.topology import connect
from mpi_impl.entry import run
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.optimizer import OptimizerConfig
from reference.precision import Precision


def main() -> None:
    work, microbatches, ranks = Work(*map(int, sys.argv[1].split(","))), int(sys.argv[2]), world()
    model = ModelConfig(work.L, work.h, work.a, work.V, work.s, hidden_dropout=0.0, attention_dropout=0.0)
    optimizer = OptimizerConfig(lr=1e-4, lr_decay_iters=1, lr_decay_style="constant", clip_grad=0.0)
    cut = "--sequence-parallel" in sys.argv
    topology = connect(ranks, ParallelConfig(ranks.size, sequence_parallel=cut, keep_gathered_inputs=cut))
    trainer = Trainer(model, optimizer, topology, seed=1, precision=Precision("float32"))
    tokens, targets = np.random.default_rng(0).integers(work.V, size=(2, work.b, work.s))
    serve(lambda: trainer.step([(tokens, targets)] * microbatches, work.b * microbatches))


if __name__ == "__main__":
    run(main)
