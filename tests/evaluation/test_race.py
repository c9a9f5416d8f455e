"""RACE: what a row holds, which questions a batch has, and when an answer is right."""
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.tokenizer import BertWordPieceLowerCase
from mpi_impl.evaluation.race import LEVELS, PARTS, RACEDataset, answers_right
from reference.batches import ChoiceBatch
from reference.errors import UserError
from tests.evaluation.little_gpt import batches

PAD, CLS, SEP = 0, 1, 2
VOCABULARY = "who ate the cat a dog it was old . ? _".split()
TEXTS = st.lists(st.sampled_from(VOCABULARY), max_size=9).map(" ".join)
QUESTIONS = st.tuples(TEXTS, st.lists(TEXTS, min_size=4, max_size=4), st.sampled_from("ABCD"))


class Tokenizer:
    """A token for each word of the vocabulary, after the special ones."""

    cls, sep, pad = CLS, SEP, PAD

    @staticmethod
    def encode_batch(texts):
        return [[3 + VOCABULARY.index(word) for word in re.findall(r"\w+|[.?]", text)] for text in texts]


@st.composite
def passages(draw):
    """Draw an object as in a file of RACE."""
    questions, options, answers = zip(*draw(st.lists(QUESTIONS, min_size=1, max_size=4)), strict=True)
    return {"article": draw(TEXTS), "questions": list(questions), "options": list(options), "answers": list(answers),
            "id": "high18.txt"}


def written(root: Path, part, by_level):
    """Write RACE's folder, with these passages in one part: those of each level, in order."""
    for level, passages in zip(LEVELS, by_level, strict=True):
        folder = root / part / level
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            file.unlink()
        for number, passage in enumerate(passages):
            (folder / f"{number}.txt").write_text(json.dumps(passage))
    return str(root)


@st.composite
def data_sets(draw, root, part):
    """Draw the passages of a part, and read the data set from them."""
    by_level = [draw(st.lists(passages(), min_size=1, max_size=2)) for _ in LEVELS]
    longest = draw(st.integers(1, 12))
    path = written(root, PARTS[part], by_level)
    s, seed = longest + draw(st.integers(4, 9)), draw(st.integers(0, 9))
    dataset = RACEDataset(path, Tokenizer(), s, seed, longest, (part,))
    return [passage for level in by_level for passage in level], dataset, longest


def plain_rows(passages, s, longest):
    """Return for each question four padded sequences with types and lengths, and the index of the right answer."""
    for passage in passages:
        for question, options, answer in zip(passage["questions"], passage["options"], passage["answers"]):
            sequences = []
            for option in options:
                text = option.join(question.split("_")) if question.count("_") else question + " " + option
                choice, article = Tokenizer.encode_batch([text, passage["article"]])
                pairs = [(CLS, 0)] + [(token, 0) for token in choice[:longest]] + [(SEP, 0)]
                while article and len(pairs) < s - 1:
                    pairs.append((article.pop(0), 1))
                pairs.append((SEP, 1))
                sequences.append((pairs + [(PAD, 0)] * (s - len(pairs)), len(pairs)))
            yield sequences, ord(answer) - ord("A")


@given(st.data())
def test_rows_are_the_questions_as_they_lie(tmp_path, data):
    """Every question once, with its options in its blanks or after it, cut where they are too long, then as much of the
    passage as fits."""
    passages, dataset, longest = data.draw(data_sets(tmp_path, "test"))
    s, expected = dataset.seq_length, list(plain_rows(passages, dataset.seq_length, longest))
    assert dataset.samples("test") == len(expected)
    found = []
    for batch in batches(dataset, ChoiceBatch, "test", data.draw(st.integers(1, 5))):
        for i in np.flatnonzero(batch.weights):
            four = slice(4 * i, 4 * i + 4)
            pairs = np.stack([batch.tokens[four], batch.token_types[four]], -1)    # [4, s, 2]
            assert pairs.shape == (4, s, 2)
            sequences = [(list(map(tuple, x)), n) for x, n in zip(pairs.tolist(), batch.lengths[four].tolist())]
            found.append((sequences, batch.answers[i]))
    assert found == expected


@given(st.data(), st.integers(0, 40), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_batches_do_not_depend_on_how_they_are_cut(tmp_path, data, first, counts):
    """Of any part, beyond its end too."""
    part = data.draw(st.sampled_from([*PARTS]))
    _, dataset, _ = data.draw(data_sets(tmp_path, part))
    whole = dataset.batch(part, first, sum(counts))
    assert whole.dtype == np.int64 and whole.shape == (sum(counts), ChoiceBatch.width(dataset.seq_length))
    starts = np.cumsum([first, *counts])
    pieces = [dataset.batch(part, int(start), count) for start, count in zip(starts, counts)]
    assert (np.concatenate(pieces) == whole).all()
    weights = ChoiceBatch.unpack(whole).weights
    n = dataset.samples(part)
    assert weights.tolist() == [int(part == "train" or first + i < n) for i in range(sum(counts))]
    if part != "train":
        assert (whole[:, :-1] == dataset.batch(part, first % n, sum(counts))[:, :-1]).all()


@given(st.data(), st.integers(0, 5))
def test_every_question_is_trained_on_once_an_epoch(tmp_path, data, epoch):
    """An epoch is a permutation of the part as it lies."""
    _, dataset, _ = data.draw(data_sets(tmp_path, "train"))
    dataset.parts["test"] = dataset.parts["train"]
    n = dataset.samples("train")
    seen, lying = dataset.batch("train", epoch * n, n), dataset.batch("test", 0, n)
    assert sorted(seen.tolist()) == sorted(lying.tolist())


def test_with_a_tokenizer_of_bert(tmp_path):
    """It adds no special tokens of its own, and the text of a row can be read."""
    text = "who ate the cat ? a dog . it was old"
    tokenizer = BertWordPieceLowerCase.train([text] * 9, 100)
    path = written(tmp_path, "test", [[passage("A dog ate it.")]] * 2)
    batch = ChoiceBatch.unpack(RACEDataset(path, tokenizer, 32, 0, 8, ("test",)).batch("test", 0, 1))
    rows = [tokenizer.decode(tokens[:n]) for tokens, n in zip(batch.tokens, batch.lengths, strict=True)]
    assert [row.replace(" ", "") for row in rows] == [
        f"[CLS]who?{option}[SEP]adogateit.[SEP]" for option in ("a", "dog", "cat", "it")]
    assert (batch.tokens[0, batch.lengths[0]:] == tokenizer.pad).all()


def passage(article="the cat", n=1):
    return {"article": article, "questions": ["who ?"] * n, "options": [["a", "dog", "cat", "it"]] * n,
            "answers": ["C"] * n}


def test_epochs_and_seeds_have_other_orders(tmp_path):
    """And the same seed has the same."""
    words = VOCABULARY[:10]
    path = written(tmp_path, "train", [[passage(a) for a in words], [passage(f"the {a}") for a in words]])
    orders = [tuple(map(tuple, RACEDataset(path, Tokenizer(), 12, seed, 8, ("train",)).batch("train", 20 * epoch, 20)))
              for seed in (0, 1, 0) for epoch in range(2)]
    assert len(set(orders)) == 4 and orders[4:] == orders[:2]


def test_the_files_of_all_parts_are_read_in_order(tmp_path):
    """Middle schools first, and hidden files are none of RACE's."""
    for part, articles in zip(PARTS, ["who ate", "the cat", "a dog"], strict=True):
        folder = {"validation": "dev"}.get(part, part)
        written(tmp_path, folder, [[passage(article, 2)] for article in articles.split()])
        (tmp_path / folder / "high" / "._0.txt").write_bytes(b"\x00")
    dataset = RACEDataset(str(tmp_path), Tokenizer(), 12, 0, 8)
    found = [[VOCABULARY[q.article[0] - 3] for q in dataset.parts[part]] for part in PARTS]
    assert found == [["who", "who", "ate", "ate"], ["the", "the", "cat", "cat"], ["a", "a", "dog", "dog"]]


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 99))
def test_right_answers_are_those_with_the_highest_score(b, fillers, seed):
    """Questions that only fill the batch are none."""
    rng = np.random.default_rng(seed)
    n = b + fillers
    scores, answers, weights = rng.normal(size=(n, 4)), rng.integers(0, 4, n), np.arange(n) < b
    expected = sum(sorted(range(4), key=lambda i: scores[q, i])[-1] == answers[q] for q in range(b))
    assert answers_right(scores, ChoiceBatch(None, None, None, answers, weights.astype(int))) == expected


@pytest.mark.parametrize(("change", "sentence"), [
    ({"answers": ["E"]}, "invalid enum value 'E', at `\\$.answers\\[0\\]`"),
    ({"answers": [2]}, "expected `str`, got `int`, at"), ({"answers": ["AB"]}, "invalid enum value 'AB'"),
    ({"options": [["a", "b", "c"]]}, "expected `array` of length 4, at .*It should read like"),
    ({"options": [["a", "b", "c", 4]]}, "expected `str`, got `int`, at"),
    ({"options": ["abcd"]}, "expected `array`, got `str`, at"), ({"questions": [3]}, "expected `str`, got `int`, at"),
    ({"questions": [], "options": [], "answers": []}, "has no question"),
    ({"answers": []}, "has 1 questions, 1 options, 0 answers, but needs the same number of each"),
    ({"article": None}, "expected `str`, got `null`, at"), ({"questions": "who ?"}, "expected `array`, got `str`, at"),
])
def test_what_is_no_passage_is_refused(tmp_path, change, sentence):
    """In a sentence that names the file."""
    path = written(tmp_path, "test", [[passage()], [passage(), passage() | change]])
    with pytest.raises(UserError, match=f"test/high/1.txt.* {sentence}"):
        RACEDataset(path, Tokenizer(), 12, 0, 8, ("test",))


@pytest.mark.parametrize("text, sentence", [("", "is empty"), ("{", "is not JSON"), ("[]", "expected `object`")])
def test_what_is_no_object_is_refused(tmp_path, text, sentence):
    path = written(tmp_path, "test", [[passage()], [passage()]])
    (tmp_path / "test" / "high" / "1.txt").write_text(text)
    with pytest.raises(UserError, match=f"test/high/1.txt.* {sentence}"):
        RACEDataset(path, Tokenizer(), 12, 0, 8, ("test",))


@pytest.mark.parametrize("missing", ["test", "test/middle", "test/high"])
def test_a_level_without_files_is_refused(tmp_path, missing):
    """Skipping it would give another accuracy."""
    path = written(tmp_path, "test", [[passage()], [passage()]])
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"is not RACE's folder: there is no .txt file in {tmp_path}/{missing}"):
        RACEDataset(path, Tokenizer(), 12, 0, 8, ("test",))


def test_sizes_without_room_for_a_passage_are_refused(tmp_path):
    """The passage gets a token at least."""
    path = written(tmp_path, "test", [[passage()], [passage()]])
    RACEDataset(path, Tokenizer(), 132, 0, parts=("test",))
    with pytest.raises(UserError, match="--seq-length is 131, but must be at least 132"):
        RACEDataset(path, Tokenizer(), 131, 0, parts=("test",))
    with pytest.raises(UserError, match="--max-qa-length is 0, but must be at least 1"):
        RACEDataset(path, Tokenizer(), 131, 0, 0)
