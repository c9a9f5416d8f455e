"""RACE: what a row holds, which questions a batch has, and when an answer is right."""
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.data.dataset import order_of_training
from reference.batches import ChoiceBatch
from reference.errors import UserError
from shardlab.evaluate.race import LEVELS, PARTS, RACEDataset

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
        (folder / "._0.txt").write_bytes(b"\x00")       # hidden, and none of RACE's
    return str(root)


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


@settings(max_examples=settings().max_examples // 2)
@given(st.data(), st.sampled_from([*PARTS]), st.integers(0, 40), st.integers(1, 9))
def test_rows_are_the_questions_in_the_order_of_their_part(tmp_path, data, part, first, count):
    """With the options in their blanks or after the question, cut where they are too long, then as much of the passage
    as fits. Training shuffles; the other parts are asked once, as they lie, and beyond the end for nothing.
    """
    by_level = [data.draw(st.lists(passages(), min_size=1, max_size=2)) for _ in LEVELS]
    longest, seed = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 9))
    s = longest + data.draw(st.integers(4, 9))
    dataset = RACEDataset(written(tmp_path, PARTS[part], by_level), Tokenizer(), s, seed, longest, (part,))
    expected = list(plain_rows([passage for level in by_level for passage in level], s, longest))
    n, samples = len(expected), np.arange(first, first + count)
    assert dataset.samples(part) == n
    rows = dataset.batch(part, first, count)
    batch = ChoiceBatch.unpack(rows)
    assert rows.dtype == np.int64 and rows.shape == (count, ChoiceBatch.width(s))
    assert batch.weights.tolist() == [int(part == "train" or sample < n) for sample in samples]
    pairs = np.stack([batch.tokens, batch.token_types], -1).reshape(count, 4, s, 2).tolist()
    places = order_of_training(n, seed, first, count) if part == "train" else samples % n
    for four, lengths, answer, place in zip(pairs, batch.lengths.reshape(count, 4), batch.answers, places):
        sequences = [(list(map(tuple, x)), length) for x, length in zip(four, lengths)]
        assert (sequences, answer) == expected[place]


def passage(article="the cat", n=1):
    return {"article": article, "questions": ["who ?"] * n, "options": [["a", "dog", "cat", "it"]] * n,
            "answers": ["C"] * n}


@pytest.mark.parametrize("content, said", [
    (passage() | {"answers": ["E"]}, "'E', at `\\$.answers"), (passage() | {"options": [["a", "b", "c"]]}, "length 4"),
    (passage() | {"questions": [], "options": [], "answers": []}, "has no question"),
    (passage() | {"answers": []}, "1 options, 0 answers"), ([], "It should read like")])
def test_what_is_not_a_passage_is_refused(tmp_path, content, said):
    """In a sentence that names the file."""
    path = written(tmp_path, "test", [[passage()], [passage(), content]])
    with pytest.raises(UserError, match=f"test/high/1.txt.* {said}"):
        RACEDataset(path, Tokenizer(), 12, 0, 8, ("test",))


@pytest.mark.parametrize("missing", ["test", "test/high"])
def test_a_level_without_files_is_refused(tmp_path, missing):
    """Skipping it would give another accuracy."""
    path = written(tmp_path, "test", [[passage()], [passage()]])
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is not RACE's folder"):
        RACEDataset(path, Tokenizer(), 12, 0, 8, ("test",))


def test_sizes_without_room_for_a_passage_are_refused(tmp_path):
    """The passage gets a token at least."""
    path = written(tmp_path, "test", [[passage()], [passage()]])
    RACEDataset(path, Tokenizer(), 132, 0, parts=("test",))
    with pytest.raises(UserError, match="--seq-length is 131"):
        RACEDataset(path, Tokenizer(), 131, 0, parts=("test",))
