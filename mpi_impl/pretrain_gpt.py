"""Train a GPT: `mpirun -np 8 python -m mpi_impl.pretrain_gpt --tensor-model-parallel-size 4 ...`."""
import time
from math import exp, isfinite

from mpi_impl.comm import report
from mpi_impl.comm.group import Group, library, world
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import connect
from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare import prepare
from mpi_impl.data.unigram import unigram_cross_entropy
from mpi_impl.entry import run
from mpi_impl.training.arguments import Settings, parse
from mpi_impl.training.batches import Batches, whole_batch
from mpi_impl.training.metrics import Metrics, open_for_writing
from mpi_impl.training.sample import sample
from mpi_impl.training.trainer import Trainer
from mpi_impl.training.verify import Verifier, shown
from reference.cost import Work, parameters
from reference.errors import UserError


def main(argv: list[str] | None = None) -> None:
    Pretraining(parse(argv, world().size), world(Ledger())).run()


class Pretraining:
    """One rank's part of a run. What only rank 0 has (tokenizer, metrics) is None elsewhere."""

    def __init__(self, settings: Settings, ranks: Group):
        self.settings, self.args, self.world = settings, settings.args, ranks
        self.first = ranks.rank == 0
        self.metrics = self.tokenizer = None
        ranks.from_first(self.open_outputs)
        prefix, vocab_size = ranks.from_first(self.prepare_data)
        self.topology = connect(ranks, settings.parallel)
        self.dataset = self.open_dataset(prefix) if self.topology.place.tensor == 0 else None
        self.unigram = ranks.from_first(lambda: self.check_data(vocab_size))
        self.batches = Batches(self.dataset, self.topology, self.args.seq_length, self.args.micro_batch_size,
                               settings.microbatches)
        self.model = settings.model(vocab_size)
        self.trainer = Trainer(self.model, settings.optimizer, self.topology, self.args.seed, self.args.dtype)
        self.verifier = Verifier(self.trainer, settings.optimizer, self.args.seed) if self.args.verify else None
        self.evaluations = 0

    # ---- before the first step ----

    def open_outputs(self) -> None:
        """On rank 0: every file that will be written can be."""
        a = self.args
        tokens = a.global_batch_size * a.seq_length
        self.metrics = Metrics(a.train_iters, tokens, a.log_interval, a.metrics_file)
        for path in (a.ledger, a.plot):
            if path:
                open_for_writing(path).close()

    def prepare_data(self) -> tuple[str, int]:
        """On rank 0: the corpus as tokens on disk, and the size of the vocabulary."""
        a = self.args
        prefix, self.tokenizer = prepare(a.data_path, a.tokenizer_type, a.vocab_size, a.vocab_file, a.merge_file,
                                         a.data_cache_path, report=self.say)
        return prefix, self.tokenizer.vocab_size

    def open_dataset(self, prefix: str) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), self.args.seq_length, self.args.seed, self.args.split)

    def check_data(self, vocab_size: int) -> float | None:
        """On rank 0: what is wrong with the data is said now. -> the validation loss of a unigram model."""
        self.dataset.check_vocabulary(vocab_size)
        self.dataset.batch("train", 0, 1)
        if self.args.eval_iters == 0:
            return None
        self.dataset.batch("validation", 0, 1)
        return unigram_cross_entropy(self.dataset, vocab_size)

    # ---- the run ----

    def run(self) -> None:
        self.say(self.introduction())
        last = self.train()
        self.evaluate(last)
        self.say_end(last)
        if self.args.sample_tokens and self.topology.place.data == 0:
            self.write_sample()

    def train(self) -> int:
        """Steps until --train-iters or --exit-interval says stop -> the last iteration."""
        a = self.args
        for iteration in range(1, a.train_iters + 1):
            began = time.perf_counter()
            result = self.trainer.step(self.batches.microbatches_of("train", iteration - 1), a.global_batch_size)
            seconds = time.perf_counter() - began
            note = self.verify(iteration, result) if self.verifier else ""
            if self.first:
                self.metrics.step(iteration, result, seconds, note)
            if not (isfinite(result.loss) and isfinite(result.grad_norm)):
                raise UserError(f"The loss of iteration {iteration} is {result.loss} and the gradient's norm "
                                f"{result.grad_norm}: the run has diverged. Try a smaller --lr, now {a.lr}, or a "
                                "longer warm-up (--lr-warmup-iters).")
            if a.exit_interval and iteration % a.exit_interval == 0:
                break
            if iteration % a.eval_interval == 0 and iteration < a.train_iters:
                self.evaluate(iteration)
        return iteration

    def verify(self, iteration: int, result) -> str:
        batch = None, None
        if self.first:
            batch = whole_batch(self.dataset, "train", iteration - 1, self.args.global_batch_size)
        return shown(self.verifier.check(*batch, result))

    def evaluate(self, iteration: int) -> None:
        """The mean loss over the first --eval-iters global batches of the validation part."""
        if self.args.eval_iters == 0:
            return
        losses = [self.trainer.evaluate(self.batches.microbatches_of("validation", i), self.args.global_batch_size)
                  for i in range(self.args.eval_iters)]
        self.evaluations += len(losses)
        if self.first:
            loss = sum(losses) / len(losses)
            self.metrics.evaluation(iteration, loss, exp(min(loss, 700)))

    def write_sample(self) -> None:
        tokens = sample(self.trainer, self.topology.tensor.from_first(lambda: self.tokenizer.eod),
                        self.args.sample_tokens, self.args.seed)
        if self.first:
            print(f"\n{len(tokens)} tokens sampled from the model:\n{self.tokenizer.decode(tokens)}", flush=True)

    # ---- what it says ----

    def introduction(self) -> str:
        p, m = self.settings.parallel, self.model
        t, d = p.tensor_model_parallel_size, p.data_parallel_size
        return (f"{p.world_size} ranks ({library()}): tensor parallel {t} x data parallel {d}; "
                f"{self.settings.microbatches} microbatch(es) of {self.args.micro_batch_size} a replica and step\n"
                f"GPT of {parameters(m):,} parameters, {self.trainer.layout.size:,} on each rank; vocabulary "
                f"{m.vocab_size:,}, padded to {m.padded_vocab_size(t):,}; {self.args.dtype}")

    def say_end(self, last: int) -> None:
        if not self.first:
            return
        print()
        if self.verifier:
            print(self.verifier.summary())
        if self.metrics.validation and self.unigram is not None:
            print(f"validation loss {self.metrics.validation[-1][1]:.4f} nats per token; a unigram model of the "
                  f"corpus gives {self.unigram:.4f}")
        if self.args.plot:
            from mpi_impl.training.plots import plot_losses   # matplotlib takes a second to import
            plot_losses(self.args.plot, self.metrics.losses, self.metrics.validation, self.unigram)
            print(f"losses drawn in {self.args.plot}")
        work = Work(last, last * self.settings.microbatches, self.evaluations,
                    self.evaluations * self.settings.microbatches)
        sizes = (self.world.ledger, self.model, self.settings.parallel, self.args.micro_batch_size,
                 self.args.seq_length, work)
        print(f"\n{report.report(*sizes)}", flush=True)
        if self.args.ledger:
            report.write_json(self.args.ledger, *sizes)

    def say(self, text: str) -> None:
        if self.first:
            print(text, flush=True)


if __name__ == "__main__":
    run(main)
