"""The training of a GPT, as `mpi_impl.pretrain_gpt` starts it."""
from mpi_impl.data.dataset import Dataset
from mpi_impl.data.gpt import GPTDataset
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.tokenizer import Tokenizer
from mpi_impl.data.unigram import unigram_cross_entropy
from shardlab.programs.pretraining import Pretraining
from shardlab.programs.sample import sample

PROMPT = 32      # tokens that a sample begins with


class PretrainingGPT(Pretraining):
    """Samples are windows of the text, and at the end the model may write some."""

    architecture = "gpt"

    def open_dataset(self, prefix: str, tokenizer: Tokenizer | None) -> GPTDataset:
        return GPTDataset(IndexedDataset(prefix), self.args.seq_length, self.args.seed, self.args.split)

    def baseline(self, dataset: Dataset, vocab_size: int) -> float:
        assert isinstance(dataset, GPTDataset)
        return unigram_cross_entropy(dataset, vocab_size)

    def conclude(self) -> None:
        """Sample --sample-tokens on one replica, or on e that share experts; on all where each has only a shard of the
        parameters.
        """
        if not self.args.sample_tokens:
            return
        prompt = self.world.broadcast_object(self.sample_prompt)
        if self.topology.expert_replicas.rank == 0 or self.trainer.state.zero.gathers_parameters:
            tokens = sample(self.trainer, prompt, self.args.sample_tokens, self.args.seed)
            if self.tokenizer is not None:
                self.written = "<|>".join(map(self.tokenizer.decode, (prompt, tokens)))
                print(f"\n{len(prompt)} tokens of the validation data, and after <|> {len(tokens)} tokens sampled from "
                      f"the model:\n{self.written}", flush=True)

    def sample_prompt(self) -> list[int]:
        """Return the first tokens of the validation data, or the end of a document if there are none; on rank 0."""
        assert self.dataset is not None
        if not self.dataset.samples("validation"):
            return [self.sources.eod]
        return self.dataset.batch("validation", 0, 1)[0, :min(PROMPT, self.args.seq_length)].tolist()
