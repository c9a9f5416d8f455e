"""The zero-shot evaluation of a GPT, without training on the task."""
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.runtime.files import write_whole
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.batches import Batches, needs_samples
from reference.config import ModelConfig
from shardlab.evaluate.arguments import check_architecture, forward_parallel, seq_length
from shardlab.evaluate.pretrained import architecture_of
from shardlab.evaluate.progress import report_progress
from shardlab.evaluate.scored import ScoredBatch, ScoredDataset
from shardlab.evaluate.sums import Sums, check_finite
from shardlab.evaluate.tasks import TASKS
from shardlab.generate.sources import ModelSource, find, load_model
from shardlab.programs.program import Program


class ScoredBatches(Batches):
    """Samples with weights, distributed over ranks."""

    def __init__(self, dataset: ScoredDataset | None, model: ModelConfig, topology: Topology, seq_length: int,
                 micro_batch_size: int, like):
        """Make one microbatch for each rank of a pipeline: while one is on its way out, the next is on its way in."""
        super().__init__(dataset, model, topology, seq_length, micro_batch_size, topology.pipeline.size, like)
        self.unpack, self.shape = ScoredBatch.unpack, (micro_batch_size, ScoredBatch.width(seq_length))


class ZeroShot(Program):
    """One rank's part of the program."""

    dataset: Any = None          # on the ranks that need it, rank 0 among them

    def __init__(self, args, ranks: Group):
        super().__init__(args, ranks)
        device, self.task = self.device, TASKS[args.task]
        source, tokenizer = ranks.broadcast_object(self.find_model)
        self.args = args = replace(args, seq_length=seq_length(args, source.model))
        self.topology = self.connect(forward_parallel(args, source.model, ranks.size))
        ranks.collect_objects(lambda: self.read(source, tokenizer))
        self.count, self.samples = ranks.broadcast_object(lambda: (self.dataset.samples("test"), self.dataset.name))
        replica = load_model(source, self.topology, args.dtype, device.like)
        batches = ScoredBatches(self.dataset, source.model, self.topology, args.seq_length, args.micro_batch_size,
                                device.like)
        self.sums = Sums(replica, batches, self.task.make_pass)
        placed = ranks.hosts().describe(self.topology.tensor.size)
        work = device.description or kernels.describe(args.dtype)
        self.introduction = "\n".join(filter(None, [source.describe() + tokenizer.note, work, self.about(),
                                                   placed]))

    def find_model(self) -> tuple[ModelSource, Tokenizer]:
        """Find the model and its tokenizer, on rank 0."""
        check_outputs(self.args)
        check_architecture(self.args, architecture_of(self.args))
        source = find(self.args)
        return source, source.tokenizer(self.args)

    def read(self, source: ModelSource, tokenizer: Tokenizer) -> None:
        """Read the data set on the ranks that need it."""
        if self.topology.place.tensor == 0 and needs_samples(source.model, self.topology):
            self.dataset = self.task.open(self.args, tokenizer)

    def about(self) -> str:
        c = self.topology.config
        return (f"{self.args.task}: {self.count:,} {self.samples} of up to {self.args.seq_length:,} tokens, on "
                f"{c.world_size} ranks: tensor parallel {c.tensor_model_parallel_size} x pipeline parallel "
                f"{c.pipeline_model_parallel_size} x data parallel {c.data_parallel_size}")

    def work(self) -> None:
        self.say(self.introduction)
        began = time.perf_counter()
        with np.errstate(over="ignore", invalid="ignore"):     # infinite logits are reported once, in a sentence
            total = self.sums.over("test", self.count, report_progress(self.count, self.samples, self.say))
        seconds = time.perf_counter() - began
        check_finite(total)
        if self.first:
            line, numbers = self.dataset.measures(total)
            self.say(f"{line}\n{self.count:,} {self.samples} in {seconds:.1f} s: "
                     f"{self.count * self.args.seq_length / seconds:,.0f} tokens/s")
            if self.args.metrics_file:
                row = {"task": self.args.task} | numbers | {"seconds": seconds}
                write_whole(self.args.metrics_file, json.dumps(row) + "\n")
