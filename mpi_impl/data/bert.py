"""Samples for a BERT: pairs of consecutive pieces of text, with some tokens masked."""
from collections.abc import Callable

import numpy as np

from mpi_impl.data.dataset import Dataset
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.masking import choose_positions, replace_masked
from mpi_impl.data.spans import Spans
from mpi_impl.data.tokenizer import BertWordPieceCase, BertWordPieceLowerCase, Tokenizer, WordPieceTokenizer
from reference.batches import BERTBatch
from reference.errors import UserError
from reference.random import counter_rng

SPECIAL_TOKENS = 3  # in [CLS] A [SEP] B [SEP]
WORD_PIECE = (BertWordPieceLowerCase.name, BertWordPieceCase.name)


class BERTDataset(Dataset):
    """Samples of an indexed data set whose documents are divided into sentences, in three parts.

    A sample is a span of sentences (see Spans), divided at a random sentence: A and B, or in half of the samples B and
    A, which the model learns to distinguish (sentence order: Lan et al. 2020, section 3.1). A sample that is too long
    loses tokens at one end, the longer piece first. (Megatron tosses a coin for each token, so that the middle
    remains.) Then masked_lm_prob of the tokens are chosen for prediction, as masking.py says.

    The spans are the same in every epoch. The division, the order and the masks are drawn again in each epoch of
    training, while validation and test always see the same. Every draw is a function of (seed, part, purpose, number of
    the sample, position), so any rank can make any sample.

    Raises UserError for a tokenizer without [MASK], for options out of their range, for sentences that Spans refuses,
    and for a split that cannot be read.
    """

    def __init__(self, indexed: IndexedDataset, seq_length: int, seed: int, split: str, tokenizer: Tokenizer,
                 masked_lm_prob: float = 0.15, short_seq_prob: float = 0.1):
        check_samples(tokenizer.name, seq_length, masked_lm_prob, short_seq_prob)
        assert isinstance(tokenizer, WordPieceTokenizer)
        self.tokenizer, self.masked_lm_prob = tokenizer, masked_lm_prob
        self.spans = Spans(indexed, seq_length - SPECIAL_TOKENS, seed, short_seq_prob)
        super().__init__(indexed, seq_length, seed, split, len(self.spans.firsts))

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples as the base class says: int64 [count, BERTBatch.width(s)], which BERTBatch.unpack reads."""
        samples = self.order(part, first_sample, count)
        numbers = np.arange(first_sample, first_sample + count) if part == "train" else samples

        def uniform(what: str, index: np.ndarray) -> np.ndarray:
            return counter_rng.uniform(counter_rng.key(self.seed, "bert", part, what), index)

        begin, length, swapped = self.pairs(samples, lambda what: uniform(what, numbers))
        tokens, token_types, text = self.sequences(begin, length)
        after_special = np.zeros_like(text)
        after_special[:, 1:] = ~text[:, :-1]                            # truncation may have left half a word there
        begins = text & (self.tokenizer.begins_word[tokens] | after_special)
        budgets = np.maximum(1, np.rint(self.masked_lm_prob * text.sum(1))).astype(np.int64)
        index = numbers[:, None] * self.seq_length + np.arange(self.seq_length)             # [count, s]
        masked = choose_positions(begins, text, budgets, uniform, index)
        seen = replace_masked(tokens, masked, self.tokenizer, uniform, index)
        lengths = length.sum(0) + SPECIAL_TOKENS
        return BERTBatch(seen, token_types, np.where(masked, tokens, 0), masked.astype(np.int64), lengths,
                         swapped).pack()

    def pairs(self, samples: np.ndarray, uniform: Callable[[str], np.ndarray]):
        """Return the start and length of A and B in the token stream for each sample, and whether they are swapped.

        They are int64 [2, count], [2, count] and [count]; uniform(purpose) gives each sample a number between 0 and 1.
        """
        first = self.spans.firsts[samples]
        end, target = self.spans.ends(first), self.spans.targets(first)
        middle = first + 1 + (uniform("cut") * (end - first - 1)).astype(np.int64)
        swapped = uniform("swap") < 0.5
        borders = self.spans.borders[[first, middle, end]]              # [3, count]
        order = np.array([swapped, ~swapped], np.int64)                 # [2, count]: 0 comes first in the text
        begin = np.take_along_axis(borders[:-1], order, 0)
        length = np.take_along_axis(np.diff(borders, axis=0), order, 0)
        kept = shorten(length, target)
        begin += (length - kept) * (np.stack([uniform("end of A"), uniform("end of B")]) < 0.5)
        return begin, kept, swapped.astype(np.int64)

    def sequences(self, begin: np.ndarray, length: np.ndarray):
        """Return [CLS] A [SEP] B [SEP] and padding: tokens, token types int64 [count, s], and a bool mask of the text.

        A [SEP] in the data, which ends a document, is not text.
        """
        position = np.arange(self.seq_length)
        a, b = length[:, :, None]                                       # [count, 1]
        in_a = (position >= 1) & (position < 1 + a)                     # [count, s]
        in_b = (position >= 2 + a) & (position < 2 + a + b)
        source = np.where(in_a, begin[0][:, None] + position - 1, begin[1][:, None] + position - 2 - a)
        special = np.where((position == 1 + a) | (position == 2 + a + b), self.tokenizer.sep, self.tokenizer.pad)
        special[:, 0] = self.tokenizer.cls
        inside = in_a | in_b
        tokens = np.where(inside, self.indexed.tokens[np.where(inside, source, 0)], special).astype(np.int64)
        in_second = (position >= 2 + a) & (position < SPECIAL_TOKENS + a + b)
        return tokens, in_second.astype(np.int64), inside & (tokens != self.tokenizer.sep)


def shorten(length: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Remove tokens from the longer of two pieces (the second of equals) until both have `target` together.

    Lengths are int64 [2, count], targets [count]; the result is [2, count].
    """
    a, b = length
    kept = np.minimum(a, np.maximum(target - b, (target + 1) // 2))
    return np.stack([kept, np.minimum(b, target - kept)])


def check_samples(tokenizer_type: str, seq_length: int, masked_lm_prob: float, short_seq_prob: float) -> None:
    """Raise UserError for options that no samples can be made with."""
    if tokenizer_type not in WORD_PIECE:
        raise UserError(f"--tokenizer-type {tokenizer_type} has no [CLS], [SEP] and [MASK], which BERT needs. Give "
                        f"{' or '.join(WORD_PIECE)}.")
    if seq_length < SPECIAL_TOKENS + 2:
        raise UserError(f"--seq-length {seq_length} is too short for a pair of sentences, [CLS] A [SEP] B [SEP]. "
                        f"Give {SPECIAL_TOKENS + 2} or more.")
    if not 0 < masked_lm_prob < 1:
        raise UserError(f"--mask-prob {masked_lm_prob} leaves nothing to predict, or nothing to predict it from. "
                        "Give a share between 0 and 1, such as 0.15.")
    if not 0 <= short_seq_prob <= 1:
        raise UserError(f"--short-seq-prob {short_seq_prob} is not a probability. Give a number from 0 to 1.")
