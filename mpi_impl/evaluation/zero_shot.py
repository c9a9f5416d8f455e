"""A GPT on WikiText-103 or LAMBADA, as it is: nothing is learnt of them."""
import time
from abc import ABC, abstractmethod

import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import Group
from mpi_impl.comm.topology import Topology, connect
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.evaluation.arguments import check_architecture, forward_parallel, seq_length
from mpi_impl.evaluation.lambada import LAMBADA
from mpi_impl.evaluation.passes import WordsPass
from mpi_impl.evaluation.pretrained import architecture_of
from mpi_impl.evaluation.scored import ScoredBatch, ScoredDataset
from mpi_impl.evaluation.sums import Sums, check_finite
from mpi_impl.evaluation.telling import Telling
from mpi_impl.evaluation.wikitext103 import WikiText103
from mpi_impl.generation.replica import loaded
from mpi_impl.generation.sources import Source, find
from mpi_impl.parallel.passes import ForwardPass
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.training.batches import Batches, reads
from reference.config import ModelConfig
from reference.precision import Precision


class ScoredBatches(Batches):
    """Samples with weights, dealt out to ranks."""

    def __init__(self, dataset: ScoredDataset | None, model: ModelConfig, topology: Topology, seq_length: int,
                 micro_batch_size: int, like):
        """A microbatch for each rank of a pipeline: while one is on its way out, the next is on its way in."""
        super().__init__(dataset, model, topology, seq_length, micro_batch_size, topology.pipeline.size, like)
        self.unpack, self.shape = ScoredBatch.unpack, (micro_batch_size, ScoredBatch.width(seq_length))


class ZeroShot(ABC):
    """One rank's part of the program. What depends on the task is a subclass's."""

    make_pass: type[ForwardPass]
    samples: str                 # what they are called

    @abstractmethod
    def open_dataset(self, tokenizer: Tokenizer) -> ScoredDataset:
        """The samples. Raises UserError for a file that is not the task's."""

    @abstractmethod
    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        """On rank 0, from the sum over all samples: a line for a person, and numbers by name."""

    def __init__(self, args, ranks: Group):
        self.args, self.world = args, ranks
        device = device_of(args.device, ranks, args.distributed_backend)
        ranks.instruments.device_path = device.path
        self.telling = Telling(args.metrics_file, ranks.rank == 0)
        source, tokenizer = ranks.broadcast_object(self.find_model)
        args.seq_length = seq_length(args, source.model)
        self.topology = connect(ranks, forward_parallel(args, source.model, ranks.size))
        self.dataset: ScoredDataset | None = None       # on ranks that read only, rank 0 among them
        ranks.collect_objects(lambda: self.read(source, tokenizer))
        self.count = ranks.broadcast_object(self.count_samples)
        precision = Precision(args.dtype)
        near = np.empty_like(device.like, dtype=dtype_of(precision.compute))
        reader = source.reader(ranks, self.topology.place.tensor, precision.main)
        replica = loaded(source.model, self.topology, near, reader)
        batches = ScoredBatches(self.dataset, source.model, self.topology, args.seq_length, args.micro_batch_size,
                                device.like)
        self.sums = Sums(replica, batches, self.make_pass)
        placed = ranks.hosts().describe(self.topology.tensor.size)
        self.told = "\n".join(filter(None, [source.told(), device.description or kernels.told(), self.about(), placed]))

    def find_model(self) -> tuple[Source, Tokenizer]:
        """On rank 0."""
        check_outputs(self.args)
        check_architecture(self.args, architecture_of(self.args))
        source = find(self.args)
        return source, source.tokenizer(self.args)

    def read(self, source: Source, tokenizer: Tokenizer) -> None:
        """Where it is needed."""
        if self.topology.place.tensor == 0 and reads(source.model, self.topology):
            self.dataset = self.open_dataset(tokenizer)

    def count_samples(self) -> int:
        """On rank 0."""
        assert self.dataset is not None
        return self.dataset.samples("test")

    def about(self) -> str:
        c = self.topology.config
        return (f"{self.args.task}: {self.count:,} {self.samples} of up to {self.args.seq_length:,} tokens, on "
                f"{c.world_size} ranks: tensor parallel {c.tensor_model_parallel_size} x pipeline parallel "
                f"{c.pipeline_model_parallel_size} x data parallel {c.data_parallel_size}")

    def run(self) -> None:
        self.telling.say(self.told)
        began = time.perf_counter()
        with np.errstate(over="ignore", invalid="ignore"):     # logits without end are told of once, in a sentence
            total = self.sums.over("test", self.count, self.telling.progress(self.count, self.samples))
        seconds = time.perf_counter() - began
        check_finite(total)
        if self.world.rank == 0:
            line, numbers = self.measures(total)
            self.telling.say(f"{line}\n{self.count:,} {self.samples} in {seconds:.1f} s: "
                             f"{self.count * self.args.seq_length / seconds:,.0f} tokens/s")
            self.telling.write(task=self.args.task, **numbers, seconds=seconds)
        self.world.allgather_objects(None)      # all are there; what is left is MPI's shutdown


class Perplexity(ZeroShot):
    """Of WikiText-103: the losses of all windows."""

    make_pass = ForwardPass
    samples = "windows"
    dataset: WikiText103

    def open_dataset(self, tokenizer: Tokenizer) -> WikiText103:
        return WikiText103(self.args.data_path, tokenizer, self.args.seq_length, self.args.overlapping_eval)

    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        found, t, t_o = self.dataset.perplexities(total), self.dataset.tokens, self.dataset.original_tokens
        return (f"perplexity {found.perplexity:.4f}, for each of T_o = {t_o:,} words\n"
                f"perplexity {found.token_perplexity:.4f}, for each of T = {t:,} tokens: a loss of {found.loss:.4f} "
                f"nats\nperplexity {found.adjusted_perplexity:.4f}, as Megatron's program has it (T_o - 1)"
                ), found._asdict() | {"tokens": t, "original_tokens": t_o}


class LastWords(ZeroShot):
    """Of LAMBADA: how many are right."""

    make_pass = WordsPass
    samples = "passages"

    def open_dataset(self, tokenizer: Tokenizer) -> LAMBADA:
        return LAMBADA(self.args.data_path, tokenizer, self.args.seq_length)

    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        right = round(total)
        return (f"accuracy {right / self.count:.2%}: of {self.count:,} last words {right:,} are right",
                {"accuracy": right / self.count, "right": right, "samples": self.count})
