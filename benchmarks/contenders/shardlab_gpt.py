"""One rank of Shardlab's side of cpu_step.py and cuda_step.py: a training step of a tensor-parallel model.

Its arguments are the sizes of a work, as 512,6,8,256,8,8192,0,0,0, and the number of identical microbatches of a step.
`--sequence-parallel` turns that on, and keeps gathered inputs, so that it sends no more than without. With
`--data-parallel` ranks divide the samples instead, and with `--zero-stage-3`, too, all states. The step is in float32
on CPU cores, with `--bf16` in bfloat16; with `--cuda` in bfloat16 on a GPU, and with `--graph`, too, by a CUDA graph.
With `--where`, too, it takes a few steps by itself on the GPU, and prints the milliseconds of a step by kind of work,
as JSON (gpu_times.py).
"""
import json
import sys

import gpu_times
import numpy as np
from models import model_of
from turns import serve
from works import Work, lengths_of

from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import world
from mpi_impl.comm.topology import connect
from mpi_impl.launch.entry import run
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.runtime.arrays import moved_to
from mpi_impl.training.trainer import Trainer
from reference.batches import BERTBatch, GPTBatch
from reference.config import ParallelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.precision import Precision


def batch_of(work: Work) -> GPTBatch | BERTBatch:
    """Draw the samples of a step."""
    data = np.random.default_rng(0)
    tokens, targets = data.integers(work.V, size=(2, work.b, work.s))
    if not work.bert:
        return GPTBatch(tokens, targets)
    lengths, position = np.array(lengths_of(work)), np.arange(work.s)
    order = data.random(tokens.shape) + (position >= lengths[:, None])       # padding is last
    masked = order.argsort(1).argsort(1) < work.predicted
    types = (position >= lengths[:, None] // 2) & (position < lengths[:, None])
    return BERTBatch(tokens, types.astype(np.int64), targets, masked.astype(np.int64), lengths,
                     data.integers(2, size=work.b))


def main() -> None:
    work, microbatches, ranks = Work.read(sys.argv[1]), int(sys.argv[2]), world()
    optimizer = OptimizerConfig(lr=1e-4, lr_decay_iters=1, lr_decay_style="constant", clip_grad=0.0)
    sequence, cuda = "--sequence-parallel" in sys.argv, "--cuda" in sys.argv
    device = device_of("cuda" if cuda else "cpu", ranks)
    like, ranks.instruments.device_path = device.like, device.path
    replicas = ranks.size if "--data-parallel" in sys.argv else 1
    parallel = ParallelConfig(ranks.size // replicas, data_parallel_size=replicas, sequence_parallel=sequence,
                              keep_gathered_inputs=sequence, zero_stage=3 * ("--zero-stage-3" in sys.argv))
    topology = connect(ranks, parallel)
    precision = Precision("bfloat16" if cuda or "--bf16" in sys.argv else "float32")
    trainer = Trainer(ModelState(model_of(work), topology, 1, precision, like), optimizer, "--graph" in sys.argv)
    batch = batch_of(work._replace(b=work.b // replicas))
    batch = type(batch)(*(x if x is None else moved_to(x, like) for x in batch))

    def step():
        """Take a step, and return when the optimizer's last kernel has ended."""
        trainer.step([batch] * microbatches, work.b * microbatches)
        if cuda:
            import cupy
            cupy.cuda.get_current_stream().synchronize()

    if "--where" in sys.argv:
        print(json.dumps(gpu_times.time_of_steps(step, 3)))
    else:
        serve(step)


if __name__ == "__main__":
    run(main)
