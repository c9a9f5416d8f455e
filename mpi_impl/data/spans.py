"""Spans: the sentences that stand together in a sample."""
from array import array

import numpy as np

from mpi_impl.data.indexed import IndexedDataset
from reference.errors import UserError
from reference.random import counter_rng

SHORTEST = 2     # tokens: one of each of two sentences
BLOCK = 1 << 20  # sentences that are handled together, so that memory stays bounded


class Spans:
    """Consecutive sentences of a document, at least two, up to the first that makes `target` tokens or more.

    As in Megatron, the target is `longest`, or with probability short_seq_prob a random number from 2 to that, so that
    the model sees short sequences too; and a sentence that would be left over at a document's end joins the span before
    it. So spans divide the documents, except for those that are a single sentence, which are in none. (Megatron also
    leaves out documents with a sentence of more than 512 tokens. Here it is truncated when the sample is made.)

    Spans depend only on the data and the seed. Only the first sentence of each is stored.

        borders      int64 [sentences + 1]   where each sentence starts in the flat token stream; the end of the last
        documents    int64 [docs + 1]        the first sentence of each document, and finally their number
        firsts       int64 [n]               the first sentence of each span

    Empty sentences are ignored. Raises UserError if no document has two sentences.
    """

    def __init__(self, indexed: IndexedDataset, longest: int, seed: int, short_seq_prob: float):
        self.longest, self.seed, self.short_seq_prob = longest, seed, short_seq_prob
        kept = np.flatnonzero(indexed.sequence_lengths)
        starts = indexed.sequence_pointers[kept] // indexed.tokens.itemsize
        self.borders = np.append(starts, len(indexed.tokens))
        self.documents = np.searchsorted(kept, indexed.document_indices)
        self.firsts = self.find_firsts()
        if not len(self.firsts):
            raise UserError(f"{indexed.prefix} has no document of two sentences or more, and BERT learns from pairs of "
                            "them. Prepare the data again with --split-sentences, or from longer texts.")

    def targets(self, first: np.ndarray) -> np.ndarray:
        """Return the target lengths of spans that begin with these sentences, in tokens: int64 [...]."""
        whether, which = (counter_rng.key(self.seed, "spans", what) for what in ("short", "target"))
        short = SHORTEST + (counter_rng.uniform(which, first) * (self.longest - SHORTEST + 1)).astype(np.int64)
        return np.where(counter_rng.uniform(whether, first) < self.short_seq_prob, short, self.longest)

    def ends(self, first: np.ndarray) -> np.ndarray:
        """Return the sentences after the spans that begin with these: int64 [...]."""
        long_enough = np.searchsorted(self.borders, self.borders[first] + self.targets(first))
        end = np.maximum(long_enough, first + 2)
        document_end = self.documents[np.searchsorted(self.documents, first, side="right")]
        return np.where(end > document_end - 2, document_end, end)  # no sentence is left over, nor a document's end

    def find_firsts(self) -> np.ndarray:
        """Find the first sentence of each span, where the one before ends, in the same document or in the next."""
        firsts, first, n = array("q"), 0, len(self.borders) - 1
        for start in range(0, n, BLOCK):
            ends = self.ends(np.arange(start, min(start + BLOCK, n))).tolist()
            while first - start < len(ends):
                end = ends[first - start]
                if end - first > 1:
                    firsts.append(first)
                first = end
        return np.array(firsts)
