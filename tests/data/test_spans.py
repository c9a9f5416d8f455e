"""Spans: every sentence stands in one, and each is as long as it should be."""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data import spans
from mpi_impl.data.indexed import IndexedDataset, write_indexed
from mpi_impl.data.spans import Spans
from reference.errors import UserError

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8)  # the lengths of their sentences


def corpus(documents):
    """Return a corpus whose tokens, after the special ones, are their own positions, so that a sample shows where it
    comes from.
    """
    lengths = np.array([n for document in documents for n in document], np.int32)
    return SimpleNamespace(prefix="data", tokens=5 + np.arange(lengths.sum()), sequence_lengths=lengths,
                           sequence_pointers=8 * (np.cumsum(lengths, dtype=np.int64) - lengths),
                           document_indices=np.cumsum([0, *map(len, documents)]))


def enough(documents):
    """Report whether one of the documents has two sentences."""
    return any(np.count_nonzero(document) > 1 for document in documents)


def plain_spans(documents, targets):
    """Return the spans sentence by sentence, as Megatron's build_mapping does: [(first, end)]."""
    found, sentence = [], 0
    for document in documents:
        document = [n for n in document if n]
        first, length = sentence, 0
        for left, n in zip(reversed(range(len(document))), document, strict=True):
            length, sentence = length + n, sentence + 1
            if left == 0 or (length >= targets[first] and sentence - first >= 2 and left > 1):
                if sentence - first > 1:
                    found.append((first, sentence))
                first, length = sentence, 0
    return found


@given(DOCUMENTS.filter(enough), st.integers(2, 30), st.integers(-9, 9), st.sampled_from([0.0, 0.3, 1.0]),
       st.integers(1, 5))
def test_spans_are_those_of_the_plain_loop(documents, longest, seed, short_seq_prob, block):
    """However many sentences are looked at together, and with empty ones among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK", block)
        found = Spans(corpus(documents), longest, seed, short_seq_prob)
    targets = found.targets(np.arange(len(found.borders)))
    assert targets.min() >= 2 and targets.max() <= longest
    ends = found.ends(found.firsts)
    assert list(zip(found.firsts.tolist(), ends.tolist(), strict=True)) == plain_spans(documents, targets)
    assert found.borders.tolist() == np.cumsum([0, *(n for d in documents for n in d if n)]).tolist()


@given(DOCUMENTS.filter(enough), st.integers(2, 30))
def test_every_sentence_that_is_not_alone_stands_in_one_span(documents, longest):
    """And none reaches over the end of a document."""
    found = Spans(corpus(documents), longest, 1, 0.5)
    sentences = [i for span in zip(found.firsts, found.ends(found.firsts), strict=True) for i in range(*span)]
    document_of = [k for k, document in enumerate(documents) for n in document if n]
    assert sentences == [i for i, k in enumerate(document_of) if document_of.count(k) > 1]
    for first, end in zip(found.firsts, found.ends(found.firsts), strict=True):
        assert document_of[first] == document_of[end - 1]


def test_short_targets_have_their_share_and_are_spread_evenly():
    """One in ten, and each length from 2 to the longest as often as another, within five standard deviations."""
    n, longest = 100_000, 11
    targets = Spans(corpus([[1, 1]]), longest, 7, 0.1).targets(np.arange(n))
    counts = np.bincount(targets, minlength=longest + 1)[2:]
    expected = n * (np.full(10, 0.01) + 0.9 * (np.arange(2, 12) == longest))
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (targets != Spans(corpus([[1, 1]]), longest, 8, 0.1).targets(np.arange(n))).any()


@pytest.mark.parametrize("documents", [[[5], [7]], [[0, 5, 0]], [[9]]])
def test_documents_of_single_sentences_are_refused(documents):
    """Nothing can be learned about the order of sentences where there is only one."""
    with pytest.raises(UserError, match="data has no document of two sentences or more.*--split-sentences"):
        Spans(corpus(documents), 20, 1, 0.1)


def test_the_files_of_an_indexed_data_set_do(tmp_path):
    """In their own types, with their pointers in bytes."""
    documents = [[np.arange(n) for n in lengths] for lengths in ([3, 4, 0, 2], [5], [1, 1])]
    write_indexed(tmp_path / "x", documents, 100)
    found = Spans(IndexedDataset(tmp_path / "x"), 20, 1, 0.0)
    assert found.borders.tolist() == [0, 3, 7, 9, 14, 15, 16]
    assert (found.firsts.tolist(), found.ends(found.firsts).tolist()) == ([0, 4], [3, 6])
