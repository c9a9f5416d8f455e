"""A GPT small enough to ask it for one token after another; and tokenizers of a few words."""
import re

import numpy as np

from mpi_impl.data.tokenizer import Tokenizer
from reference.config import ModelConfig
from reference.models.gpt import gpt_forward, gpt_logits, gpt_tensors
from tests.cases import Case


class LittleGPT:
    """Random weights, in float64; the positions are learned, so that it matters where a window begins."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int):
        self.c = ModelConfig(num_layers=2, hidden_size=6, num_attention_heads=2, vocab_size=vocab_size,
                             max_position_embeddings=seq_length)
        self.p = Case(1, self.c, 1, seq_length, seed).params(gpt_tensors(self.c))

    def losses(self, batch):
        """Return the losses of a batch's targets: [b, s]."""
        return gpt_forward(batch.tokens, self.p, self.c, batch.targets)[0]

    def logits(self, tokens):
        """Return the logits: [b, s, V]."""
        return gpt_logits(tokens, self.p, self.c)

    def log_probabilities(self, context):
        """Return the log-probability of each token of the vocabulary after these tokens: [V]."""
        logits = self.logits(np.array([context]))[0, -1]
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


class Words(Tokenizer):
    """A token for each word and each end of a line, in the order in which they are first seen."""

    eod = 0

    def __init__(self):
        self.ids = {"": 0}

    def encode(self, text):
        return [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\S+|\n", text)]


class Letters(Tokenizer):
    """The letters a and b, each with or without a blank before it: four tokens, and the fifth ends a document."""

    eod = 4

    def encode(self, text):
        return [["a", "b", " a", " b"].index(found) for found in re.findall(" ?[ab]", text)]


def batches(dataset, batch_type, part, count):
    """Yield all rows of a part, `count` at a time; the last batch may reach beyond the end."""
    for first in range(0, dataset.samples(part), count):
        yield batch_type.unpack(dataset.batch(part, first, count))
