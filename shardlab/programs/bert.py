"""The training of a BERT, as `mpi_impl.pretrain_bert` starts it."""
from mpi_impl.data.bert import BERTDataset
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.tokenizer import Tokenizer
from shardlab.programs.pretraining import Pretraining


class PretrainingBERT(Pretraining):
    """Samples are pairs of pieces of text, some of whose tokens are masked."""

    architecture = "bert"
    sentences = True

    def open_dataset(self, prefix: str, tokenizer: Tokenizer | None) -> BERTDataset:
        assert tokenizer is not None
        return BERTDataset(IndexedDataset(prefix), self.args.seq_length, self.args.seed, self.args.split, tokenizer,
                           self.args.mask_prob, self.args.short_seq_prob)
