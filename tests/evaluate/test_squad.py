"""SQuAD: the windows of a passage and the answer's positions in them, which answer is the most probable, and its F1."""
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.batches import SpanBatch
from reference.errors import UserError
from shardlab.evaluate.squad import SQuADDataset, exact, f1
from tests.evaluate.test_race import CLS, PAD, SEP, VOCABULARY, Tokenizer

WORDS = [word for word in VOCABULARY if word.isalpha()]
PASSAGES = st.lists(st.sampled_from([*WORDS, "cat.", "old?"]), min_size=1, max_size=12).map(" ".join)


@st.composite
def paragraphs(draw, impossible=True):
    """Draw a passage with questions: each has some answers, pieces of it that need not end where a word does."""
    context, asked = draw(PASSAGES), []
    for _ in range(draw(st.integers(1, 3))):
        pieces = draw(st.lists(st.tuples(*[st.integers(0, len(context) - 1)] * 2).map(sorted), min_size=1, max_size=3))
        answers = [{"text": context[i:j + 1], "answer_start": i} for i, j in pieces if context[i:j + 1].strip()]
        none = not answers or (impossible and draw(st.booleans()))
        asked.append({"question": draw(PASSAGES), "id": "5", "is_impossible": none, "answers": [] if none else answers})
    return {"context": context, "qas": asked}


def write(folder, train, dev) -> str:
    """Write SQuAD's folder, of version 2.0."""
    for name, found in (("train-v2.0.json", train), ("dev-v2.0.json", dev)):
        (folder / name).write_text(json.dumps({"version": "v2.0", "data": [{"title": "T", "paragraphs": found}]}))
    return str(folder)


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(paragraphs(), min_size=1, max_size=2), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))
def test_windows_cover_each_passage_and_know_where_the_answer_is(tmp_path, found, longest, room, stride):
    """The words at the answer's positions are those that its characters touch. A window without the whole of it has
    both positions at [CLS]; each token of a passage is in some window.
    """
    s = longest + 3 + room
    dataset = SQuADDataset(write(tmp_path, found, found), Tokenizer(), s, 0, longest, stride)
    batch, row = SpanBatch.unpack(dataset.batch("validation", 0, dataset.samples("validation"))), 0
    for paragraph, asked in [(one, asked) for one in found for asked in one["qas"]]:
        (passage, question), context = Tokenizer.encode_batch([paragraph["context"], asked["question"]]), []
        words = [word.span() for word in re.finditer(r"\w+|[.?]", paragraph["context"])]
        question, touched = question[:longest], []
        if asked["answers"]:
            start = asked["answers"][0]["answer_start"]
            end = start + len(asked["answers"][0]["text"])
            touched = [i for i, (a, b) in enumerate(words) if a < end and b > start]
        step = 0
        while len(context) < len(passage):
            tokens, length, begins = batch.tokens[row].tolist(), int(batch.lengths[row]), len(question) + 2
            window = tokens[begins:length - 1]
            first = step * min(stride, s - 3 - len(question))
            assert tokens == [CLS, *question, SEP, *window, SEP] + [PAD] * (s - length)
            assert window == passage[first:first + s - 3 - len(question)] and first <= len(context)
            context[first:] = window
            inside = [i - first + begins for i in touched]
            whole = inside and inside[0] >= begins and inside[-1] < length - 1
            assert batch.answers[row].tolist() == ([inside[0], inside[-1]] if whole else [0, 0])
            row, step = row + 1, step + 1
    assert row == len(batch.tokens)


def plain(text: str) -> list[str]:
    """Return the words that count, in lower case."""
    return [word for word in re.sub(r"[^\w\s]|_", "", text.lower()).split() if word not in ("a", "an", "the")]


def plain_f1(said: list[str], right: list[str]) -> float:
    rest, same = right.copy(), 0
    for word in said:
        if word in rest:
            rest.remove(word)
            same += 1
    if not said or not right:
        return float(said == right)
    precision, recall = same / len(said), same / len(right)
    return 2 * precision * recall / (precision + recall) if same else 0.0


@settings(max_examples=settings().max_examples // 2)
@given(paragraphs(), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_most_probable_answer_counts(tmp_path, paragraph, room, longest, all_answered, seed):
    """Searched one by one, over all windows; [CLS] wins only in data with unanswerable questions. EM and F1 are the
    best over the answers that people gave, and the means over questions.
    """
    if all_answered:
        paragraph["qas"] = [one for one in paragraph["qas"] if one["answers"]] or [
            {"question": "who", "answers": [{"text": paragraph["context"], "answer_start": 0}]}]
    s = 2 + 3 + room
    dataset = SQuADDataset(write(tmp_path, [paragraph], [paragraph]), Tokenizer(), s, 0, 2, 2, longest)
    batch = SpanBatch.unpack(dataset.batch("validation", 0, dataset.samples("validation")))
    p = np.random.default_rng(seed).dirichlet(np.ones(s), (len(batch.tokens), 2))
    words = [word.span() for word in re.finditer(r"\w+|[.?]", paragraph["context"])]
    row, scores = 0, []
    for asked in paragraph["qas"]:
        begins = 2 + len(Tokenizer.encode_batch([asked["question"]])[0][:2])
        best, nothing, first, end = (-1.0, ""), 1.0, 0, 0
        while first == 0 or end < len(words):
            end = first + int(batch.lengths[row]) - begins - 1
            for i in range(first, end):
                for j in range(i, min(end, i + longest)):
                    probability = p[row, 0, begins + i - first] * p[row, 1, begins + j - first]
                    best = max(best, (probability, paragraph["context"][words[i][0]:words[j][1]]))
            nothing = min(nothing, p[row, 0, 0] * p[row, 1, 0])
            first, row = first + min(2, s - 1 - begins), row + 1
        impossible = not all(one["answers"] for one in paragraph["qas"])
        said = plain("" if impossible and nothing >= best[0] else best[1])
        right = [plain(one["text"]) for one in asked["answers"] if plain(one["text"])] or [[]]
        scores.append((max(plain_f1(said, one) for one in right), max(said == one for one in right)))
    found = dataset.measures("validation", p)
    assert (found["F1"], found["EM"]) == pytest.approx(tuple(np.mean(scores, 0)))


@pytest.mark.parametrize("said, right, em, score", [
    ("The  Broncos!", "broncos", 1, 1), ("a", "", 1, 1), ("", "cat", 0, 0), ("Denver Broncos", "the Broncos", 0, 2 / 3),
    ("co-op", "coop", 1, 1), ("theatre", "atre", 0, 0), ("cat cat", "cat", 0, 2 / 3)])
def test_measures_are_the_official_ones(said, right, em, score):
    """Case, punctuation, articles and blanks do not count."""
    assert (exact(said, right), f1(said, right)) == pytest.approx((em, score))


def passage(**changes):
    answers = [{"text": "cat", "answer_start": 4}]
    return {"context": "the cat", "qas": [{"question": "who", "answers": answers}]} | changes


@pytest.mark.parametrize("content, said", [
    (passage(context=3), "It should read like"), (passage(qas=[]), "has no question"),
    (passage(qas=[{"question": "who"}]), "does not hold")])
def test_what_is_not_squad_is_refused(tmp_path, content, said):
    with pytest.raises(UserError, match=f"dev-v2.0.json.* {said}"):
        SQuADDataset(write(tmp_path, [passage()], [content]), Tokenizer(), 12, 0, 8)


def test_sizes_and_folders_that_do_not_fit_are_refused(tmp_path):
    path = write(tmp_path, [passage()], [passage()])
    assert SQuADDataset(path, Tokenizer(), 68, 0).samples("train") == 1
    with pytest.raises(UserError, match="--seq-length is 67"):
        SQuADDataset(path, Tokenizer(), 67, 0)
    (tmp_path / "dev-v1.1.json").write_text("{}")
    with pytest.raises(UserError, match=r"has 2 files dev-v\*.json, but needs one"):
        SQuADDataset(path, Tokenizer(), 68, 0)
