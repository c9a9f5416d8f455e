"""BERT samples: spans of sentences, divided into pairs of neighbouring pieces, the same whoever asks, in which whole
words are masked, as many as the budget allows.
"""
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mpi_impl.data import spans
from mpi_impl.data.bert import BERTDataset
from mpi_impl.data.dataset import PARTS, shuffle
from mpi_impl.data.spans import Spans
from mpi_impl.data.tokenizer import BertWordPieceLowerCase
from reference.batches import BERTBatch
from reference.random import counter_rng

PAD, CLS, SEP, MASK = 0, 2, 3, 4


# ---- spans ----------------------------------------------------------------------------------------------------------


def corpus(documents):
    """Return a corpus of documents whose sentences have these lengths. Its tokens, after the special ones, are their
    own positions, so that a sample shows where it comes from.
    """
    lengths = np.array([n for document in documents for n in document], np.int32)
    return SimpleNamespace(prefix="data", tokens=5 + np.arange(lengths.sum()), sequence_lengths=lengths,
                           sequence_pointers=8 * (np.cumsum(lengths, dtype=np.int64) - lengths),
                           document_indices=np.cumsum([0, *map(len, documents)]))


def have_a_pair(documents):
    """Report whether one of the documents has two sentences."""
    return any(np.count_nonzero(document) > 1 for document in documents)


DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=8).filter(have_a_pair)


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


@given(DOCUMENTS, st.integers(2, 30), st.integers(-9, 9), st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 5))
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


def test_short_targets_have_their_share_and_are_spread_evenly():
    """One in ten, and each length from 2 to the longest as often as another, within five standard deviations."""
    n, longest = 100_000, 11
    targets, others = (Spans(corpus([[1, 1]]), longest, seed, 0.1).targets(np.arange(n)) for seed in (7, 8))
    counts = np.bincount(targets, minlength=longest + 1)[2:]
    expected = n * (np.full(10, 0.01) + 0.9 * (np.arange(2, 12) == longest))
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert (targets != others).any()


def plain_mask(begins, text, budget, turn, chance):
    """Return the masked positions of one sample, computed with sets after the description: a chance below 6/11 is an
    n-gram of one word, below 9/11 of two.
    """
    words, masked = [], set()
    for position in np.flatnonzero(text).tolist():
        if begins[position]:
            words.append([])
        words[-1].append(position)
    for i in sorted(range(len(words)), key=lambda i: turn[words[i][0]]):
        n = 1 + (chance[words[i][0]] >= 6 / 11) + (chance[words[i][0]] >= 9 / 11)
        while n and len(masked) + len(sum(words[i:i + n], [])) > budget:
            n -= 1
        gram = set(sum(words[i:i + n], []))
        if not gram & masked:
            masked |= gram
    return masked


# ---- samples --------------------------------------------------------------------------------------------------------


def word_pieces(vocab_size, seed=0, share=0.7):
    """Return a tokenizer without words, a `share` of whose ids begins one."""
    tokenizer = BertWordPieceLowerCase.__new__(BertWordPieceLowerCase)
    tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask = PAD, CLS, SEP, MASK
    tokenizer.vocab_size = vocab_size
    tokenizer.begins_word = np.random.default_rng(seed).random(vocab_size) < share
    return tokenizer


@st.composite
def datasets(draw):
    indexed = corpus(draw(DOCUMENTS))
    tokenizer = word_pieces(5 + len(indexed.tokens), draw(st.integers(0, 9)))
    return BERTDataset(indexed, draw(st.integers(5, 30)), draw(st.integers(-2, 9)),
                       draw(st.sampled_from(["1", "1,1,1", "9,1"])), tokenizer, draw(st.sampled_from([0.15, 0.5])), 0.3)


@given(datasets(), st.sampled_from(PARTS), st.integers(0, 99))
def test_samples_are_those_of_the_plain_construction(dataset, part, first):
    """Token by token, from the same draws, by the description of each: so it does not matter in which batch it is."""
    n, s = dataset.samples(part), dataset.seq_length
    assume(n)
    rows = dataset.batch(part, first, 3)
    batch = BERTBatch.unpack(rows)
    assert rows.dtype == np.int64 and rows.shape == (3, BERTBatch.width(s))

    def draw(what, index):
        return float(counter_rng.uniform(counter_rng.key(dataset.seed, "bert", part, what), np.array([index]))[0])

    for k in range(3):
        epoch, place = divmod(first + k, n)
        place = int(shuffle(n, dataset.seed, epoch)[place]) if part == "train" else place
        sample = dataset.ranges[part].start + place
        number = first + k if part == "train" else sample
        begin = dataset.spans.firsts[[sample]]
        target, (end,) = int(dataset.spans.targets(begin)[0]), dataset.spans.ends(begin)
        sentences = [list(range(5 + dataset.spans.borders[i], 5 + dataset.spans.borders[i + 1]))
                     for i in range(begin[0], end)]
        cut = 1 + int(draw("cut", number) * (len(sentences) - 1))
        pieces = [sum(sentences[:cut], []), sum(sentences[cut:], [])]
        swapped = draw("swap", number) < 0.5
        pieces = pieces[::-1] if swapped else pieces
        while len(pieces[0]) + len(pieces[1]) > target:
            longer = 0 if len(pieces[0]) > len(pieces[1]) else 1
            del pieces[longer][0 if draw(f"end of {'AB'[longer]}", number) < 0.5 else -1]
        tokens = [CLS, *pieces[0], SEP, *pieces[1], SEP]
        types = [0] * (len(pieces[0]) + 2) + [1] * (len(pieces[1]) + 1)
        text = np.isin(np.arange(len(tokens)), [0, len(pieces[0]) + 1, len(tokens) - 1], invert=True)
        begins = text & (dataset.tokenizer.begins_word[tokens] | ~np.roll(text, 1))
        at = [number * s + position for position in range(len(tokens))]
        budget = max(1, round(dataset.masked_lm_prob * text.sum()))
        masked = plain_mask(begins, text, budget, *([draw(what, index) for index in at] for what in ("turn", "n-gram")))
        seen = list(tokens)
        for position in masked:
            chance = draw("replace", at[position])
            other = int(draw("token", at[position]) * dataset.tokenizer.vocab_size)
            seen[position] = MASK if chance < 0.8 else other if chance < 0.9 else tokens[position]
        padding = s - len(tokens)
        assert batch.tokens[k].tolist() == seen + [PAD] * padding
        assert batch.token_types[k].tolist() == types + [0] * padding
        assert batch.targets[k].tolist() == [t if i in masked else 0 for i, t in enumerate(tokens)] + [0] * padding
        assert batch.weights[k].tolist() == [int(i in masked) for i in range(s)]
        assert (batch.lengths[k], batch.swapped[k]) == (len(tokens), swapped)


def unmask(batch):
    """Return the tokens before they were masked."""
    return np.where(batch.weights, batch.targets, batch.tokens)


def test_an_end_of_document_in_the_data_is_not_a_word():
    """Data of Megatron's may have [SEP] after each document: it is never masked, and no word reaches over it."""
    indexed = corpus([[3, 3]] * 50)
    indexed.tokens[5::6] = SEP
    dataset = BERTDataset(indexed, 12, 1, "1", word_pieces(400, share=0.1), masked_lm_prob=0.9, short_seq_prob=0.0)
    batch = BERTBatch.unpack(dataset.batch("train", 0, 500))
    assert (unmask(batch) == SEP).sum() == 3 * 500
    assert not (batch.targets == SEP).any()
    words_after = batch.weights[:, 1:][unmask(batch)[:, :-1] == SEP]
    assert words_after.any() and not words_after.all()
