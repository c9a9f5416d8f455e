"""BERT samples: pairs of neighbouring pieces of text, the same whoever asks, and what is masked can be restored."""
from math import sqrt

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from mpi_impl.data.bert import BERTDataset, shorten
from mpi_impl.data.dataset import PARTS, shuffle
from mpi_impl.data.indexed import IndexedDataset, write_indexed
from mpi_impl.data.sentences import split_sentences
from mpi_impl.data.tokenizer import BertWordPieceLowerCase, NullTokenizer
from reference import counter_rng
from reference.batches import BERTBatch
from reference.errors import UserError
from tests.data.test_masking import plain_mask, words_of
from tests.data.test_spans import DOCUMENTS, corpus, enough

PAD, CLS, SEP, MASK = 0, 2, 3, 4
SPLITS = st.sampled_from(["1", "1,1,1", "9,1"])


def word_pieces(vocab_size, seed=0, share=0.7):
    """Return a tokenizer without words, a `share` of whose ids begins one."""
    tokenizer = BertWordPieceLowerCase.__new__(BertWordPieceLowerCase)
    tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask = PAD, CLS, SEP, MASK
    tokenizer.vocab_size = vocab_size
    tokenizer.begins_word = np.random.default_rng(seed).random(vocab_size) < share
    return tokenizer


@st.composite
def datasets(draw, split=SPLITS, **options):
    indexed = corpus(draw(DOCUMENTS.filter(enough)))
    tokenizer = word_pieces(5 + len(indexed.tokens), draw(st.integers(0, 9)))
    options = {"masked_lm_prob": draw(st.sampled_from([0.15, 0.5])), "short_seq_prob": 0.3} | options
    return BERTDataset(indexed, draw(st.integers(5, 30)), draw(st.integers(-2, 9)), draw(split), tokenizer, **options)


def unmask(batch):
    """Return the tokens before they were masked."""
    return np.where(batch.weights, batch.targets, batch.tokens)


@given(datasets(), st.sampled_from(PARTS), st.integers(0, 99), st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_batches_do_not_depend_on_how_they_are_cut(dataset, part, first, counts):
    """One large batch is any small ones put together, over the ends of epochs too."""
    assume(dataset.samples(part))
    whole = dataset.batch(part, first, sum(counts))
    starts = first + np.cumsum([0, *counts])
    pieces = [dataset.batch(part, int(start), count) for start, count in zip(starts, counts, strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert whole.dtype == np.int64 and whole.shape == (sum(counts), BERTBatch.width(dataset.seq_length))


@given(datasets(), st.sampled_from(PARTS), st.integers(0, 99))
def test_samples_are_those_of_the_plain_construction(dataset, part, first):
    """Token by token, from the same draws, by the description of each."""
    n, s = dataset.samples(part), dataset.seq_length
    assume(n)
    batch = BERTBatch.unpack(dataset.batch(part, first, 3))

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
        chance = np.array([draw("n-gram", index) for index in at])
        lengths = np.where(chance < 6 / 11, 1, np.where(chance < 9 / 11, 2, 3))
        budget = max(1, round(dataset.masked_lm_prob * text.sum()))
        masked = plain_mask(words_of(begins, text), budget, [draw("turn", index) for index in at], lengths)
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


@given(datasets(short_seq_prob=0.0), st.integers(0, 3))
def test_restored_pieces_are_neighbours_in_the_text(dataset, epoch):
    """Both are consecutive tokens; what comes later in the text is B, or A where they are swapped."""
    n = dataset.samples("train")
    assume(n)
    batch = BERTBatch.unpack(dataset.batch("train", epoch * n, n))
    for tokens, types, length, swapped in zip(unmask(batch), batch.token_types, batch.lengths, batch.swapped,
                                              strict=True):
        a, b = tokens[1:length][types[1:length] == 0][:-1], tokens[:length][types[:length] == 1][:-1]
        assert len(a) and len(b) and (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
        former, latter = (b, a) if swapped else (a, b)
        assert former[-1] < latter[0]
        if length < dataset.seq_length:
            assert former[-1] + 1 == latter[0]                      # nothing was cut off


@given(datasets(split=st.just("1"), short_seq_prob=0.0), st.integers(0, 3))
def test_an_epoch_is_every_span_once(dataset, epoch):
    """In another order and with other masks than in the epoch before. A seed of 0 is one, too."""
    n = dataset.samples("train")
    seen = BERTBatch.unpack(dataset.batch("train", epoch * n, n))
    firsts = [tokens[tokens > 4].min() for tokens in unmask(seen)]
    sentences = np.searchsorted(dataset.spans.borders + 5, firsts, side="right") - 1
    spans = np.searchsorted(dataset.spans.firsts, sentences, side="right") - 1
    assert sorted(spans) == list(range(n))


def long_corpus(seq_length=40, **options):
    """Return a data set of a few hundred full samples."""
    indexed = corpus([[7, 8, 9, 10] * 100] * 10)
    tokenizer = word_pieces(5 + len(indexed.tokens))
    return BERTDataset(indexed, seq_length, 3, options.pop("split", "1,1"), tokenizer, **options)


def test_training_draws_anew_in_each_epoch_and_validation_never():
    """The same sample has other masks, another cut and another order the next time, or the same ones."""
    dataset = long_corpus(short_seq_prob=0.0)
    n = dataset.samples("validation")
    np.testing.assert_array_equal(dataset.batch("validation", 0, n), dataset.batch("validation", 5 * n, n))
    n = dataset.samples("train")
    rows = [dataset.batch("train", epoch * n, n)[np.argsort(shuffle(n, 3, epoch))] for epoch in range(2)]
    one, other = map(BERTBatch.unpack, rows)
    assert 0.35 < (one.swapped == other.swapped).mean() < 0.65
    assert (one.weights != other.weights).any(1).all()
    equal = (unmask(one) == unmask(other)).all(1)
    assert equal.any() and not equal.all()
    assert (one.weights[equal] != other.weights[equal]).any(1).all()


def test_the_shares_are_those_asked_for():
    """15 % of the tokens are to be predicted; half of the pairs are swapped; [CLS] and [SEP] are never masked."""
    dataset = long_corpus(split="1", short_seq_prob=0.0)
    n = 20_000
    batch = BERTBatch.unpack(dataset.batch("train", 0, n))
    text = batch.lengths.sum() - 3 * n
    assert (batch.weights.sum(1) <= np.maximum(1, np.rint(0.15 * (batch.lengths - 3)))).all()
    assert abs(batch.weights.sum() / text - 0.15) < 0.5 / 37 + 1e-3          # the rounding of each sample
    assert abs(batch.swapped.mean() - 0.5) < 5 * 0.5 / sqrt(n)
    assert (batch.targets[batch.weights == 1] > 4).all() and not batch.targets[batch.weights == 0].any()
    n = batch.weights.sum()
    for share, found in (0.8, batch.tokens == MASK), (0.1, batch.tokens == batch.targets):
        assert abs(found[batch.weights == 1].sum() - share * n) < 5 * sqrt(share * (1 - share) * n)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 60))
def test_the_longer_piece_is_cut_first(a, b, target):
    """As if tokens were taken one by one, from the second piece where both are equal."""
    short_a, short_b = a, b
    while short_a + short_b > target:
        if short_a > short_b:
            short_a -= 1
        else:
            short_b -= 1
    assert shorten(np.array([[a], [b]]), np.array([target])).tolist() == [[short_a], [short_b]]


def test_an_end_of_document_in_the_data_is_no_word():
    """Data of Megatron's may have [SEP] after each document: it is never masked, and no word reaches over it."""
    indexed = corpus([[3, 3]] * 50)
    indexed.tokens[5::6] = SEP
    dataset = BERTDataset(indexed, 12, 1, "1", word_pieces(400, share=0.1), masked_lm_prob=0.9, short_seq_prob=0.0)
    batch = BERTBatch.unpack(dataset.batch("train", 0, 500))
    assert (unmask(batch) == SEP).sum() == 3 * 500
    assert not (batch.targets == SEP).any()
    words_after = batch.weights[:, 1:][unmask(batch)[:, :-1] == SEP]
    assert words_after.any() and not words_after.all()


TEXT = """Guido van Rossum wrote a language. It has a name! Is it a snake? No, it is a group of comedians.
They were British.

The second paragraph begins here. It ends here."""


def test_sentences_of_a_text_come_back_as_words(tmp_path):
    """From text to files to samples and back: each sample reads like the text that it was made of."""
    tokenizer = BertWordPieceLowerCase.train([TEXT], 200)
    sentences = split_sentences(TEXT)
    documents = [[np.array(ids) for ids in tokenizer.encode_batch(sentences)]] * 3
    write_indexed(tmp_path / "x", documents, tokenizer.vocab_size)
    dataset = BERTDataset(IndexedDataset(tmp_path / "x"), 200, 1, "1", tokenizer, short_seq_prob=0.0)
    dataset.check_vocabulary(tokenizer.vocab_size)
    batch = BERTBatch.unpack(dataset.batch("train", 0, 9))
    plain = tokenizer.decode(tokenizer.encode(TEXT))
    for tokens, length, swapped in zip(unmask(batch), batch.lengths, batch.swapped, strict=True):
        empty, *pieces, end = tokenizer.decode(tokens[:length]).replace("[CLS]", "[SEP]").split("[SEP]")
        pieces = [piece.strip() for piece in (reversed(pieces) if swapped else pieces)]
        assert " ".join(pieces) == plain and not empty and not end
    assert len({tuple(row) for row in batch.tokens}) == 9


@pytest.mark.parametrize(("options", "sentence"), [
    ({"seq_length": 4}, "--seq-length 4 is too short"),
    ({"masked_lm_prob": 0}, "--mask-prob 0 leaves nothing to predict"),
    ({"masked_lm_prob": 1.0}, "--mask-prob 1.0 leaves nothing"),
    ({"short_seq_prob": -0.1}, "--short-seq-prob -0.1 is not a probability"),
    ({"tokenizer": NullTokenizer(9)}, r"--tokenizer-type NullTokenizer has no \[CLS\], \[SEP\] and \[MASK\]"),
    ({"split": "a"}, "--split a is not a division"),
    ({"indexed": corpus([[5], [6]])}, "no document of two sentences.*--split-sentences"),
])
def test_what_cannot_be_is_refused(options, sentence):
    """Before any sample is made."""
    fitting = {"indexed": corpus([[5, 5]]), "seq_length": 8, "seed": 1, "split": "1", "tokenizer": word_pieces(20)}
    BERTDataset(**fitting)
    with pytest.raises(UserError, match=sentence):
        BERTDataset(**fitting | options)


def test_a_part_without_samples_is_refused_when_it_is_asked_for():
    """As with a GPT's."""
    dataset = BERTDataset(corpus([[5, 5]]), 8, 1, "1", word_pieces(20))
    with pytest.raises(UserError, match="The validation part of data has no sample: --split 1"):
        dataset.batch("validation", 0, 1)
