"""SQuAD: questions about passages of Wikipedia, answered by a piece of the passage (Rajpurkar et al. 2016); in version
2.0 some have no answer there (Rajpurkar et al. 2018).

A BERT reads `[CLS] question [SEP] window of the passage [SEP]` and gives each position two scores: that the answer
begins there, and that it ends there (Devlin et al. 2018, section 4.2). A long passage has several windows. In one
without the answer both positions are that of [CLS], in training as in predictions.

The folder holds a train-v*.json and a dev-v*.json, as published.
"""
import re
import string
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np

from mpi_impl.data.tokenizer import WordPieceTokenizer
from reference.batches import SpanBatch
from reference.config import require_positive
from reference.errors import UserError
from shardlab.evaluate.files import parse, read_text
from shardlab.evaluate.tuning_data import Sample, TuningDataset

PARTS = {"train": "train-v*.json", "validation": "dev-v*.json"}
LIKE = ('{"data": [{"paragraphs": [{"context": "...", "qas": [{"question": "...", "answers": '
        '[{"text": "...", "answer_start": 0}]}]}]}]}')
WORD = re.compile(r"\w+|[^\w\s]")       # word pieces never reach over the ends of these


class MarkedAnswer(TypedDict):
    text: str
    answer_start: int      # in characters


class QuestionAnswers(TypedDict):
    question: str
    answers: list[MarkedAnswer]
    is_impossible: NotRequired[bool]


class Paragraph(TypedDict):
    context: str
    qas: list[QuestionAnswers]


class Article(TypedDict):
    paragraphs: list[Paragraph]


class SQuAD(TypedDict):
    """A file, as published."""

    data: list[Article]


class TokenizedPassage(NamedTuple):
    """A passage in tokens, and the characters that each token's word has in the text."""

    text: str
    tokens: "array[int]"
    begins: list[int]
    ends: list[int]

    def tokens_of(self, answer: MarkedAnswer) -> tuple[int, int]:
        """Return the first and the last token of the words that an answer touches."""
        start = answer["answer_start"]
        return bisect_right(self.ends, start), bisect_left(self.begins, start + len(answer["text"])) - 1


class Question(NamedTuple):
    """A question of the validation part: its windows are samples that follow one another."""

    passage: TokenizedPassage
    answers: list[str]            # by several people; none if the passage has no answer
    begins: int                   # the position of the passage in each window
    windows: list[int]            # the tokens of the passage that they begin with


class SQuADDataset(TuningDataset):
    """The windows of all questions.

    A question is cut at `max_query_length` tokens; windows begin every `doc_stride` tokens of a passage, and a
    predicted answer has at most `max_answer_length`. Raises UserError for sizes that leave no room, and for other
    files.
    """

    batch_type = SpanBatch

    def __init__(self, data_path: str, tokenizer: WordPieceTokenizer, seq_length: int, seed: int,
                 max_query_length: int = 64, doc_stride: int = 128, max_answer_length: int = 30):
        for name, value in (("max_query_length", max_query_length), ("doc_stride", doc_stride),
                            ("max_answer_length", max_answer_length)):
            require_positive(name, value)
        if seq_length < max_query_length + 4:
            raise UserError(f"--seq-length is {seq_length}, but must be at least {max_query_length + 4}: a question "
                            "of --max-query-length tokens, [CLS], two [SEP] and something of the passage. Choose a "
                            "smaller --max-query-length, or a model that sees more.")
        self.max_query_length, self.doc_stride = max_query_length, doc_stride
        self.max_answer_length = max_answer_length
        self.questions: dict[str, list[Question]] = {part: [] for part in PARTS}
        super().__init__(tokenizer, seq_length, seed, {
            part: {"all": [sample for paragraph in paragraphs(data_path, pattern)
                           for sample in self.windows(paragraph, self.questions[part], tokenizer, seq_length)]}
            for part, pattern in PARTS.items()})
        self.all_have_answers = all(one.answers for each in self.questions.values() for one in each)

    def windows(self, paragraph: Paragraph, found: list[Question], tokenizer: WordPieceTokenizer,
                seq_length: int) -> Iterator[Sample]:
        """Yield the samples of a passage's questions, and add the questions to those that are `found`."""
        passage, asked = encode(paragraph["context"], tokenizer), paragraph["qas"]
        for one, ids in zip(asked, tokenizer.encode_batch([one["question"] for one in asked]), strict=True):
            question, n = array("i", ids[:self.max_query_length]), len(passage.tokens)
            answers = [] if one.get("is_impossible") else one["answers"]
            first, last = passage.tokens_of(answers[0]) if answers else (0, -1)
            begins, room = len(question) + 2, seq_length - len(question) - 3
            step = min(self.doc_stride, room)
            starts = list(range(0, max(n - room, 0) + step, step))
            found.append(Question(passage, [answer["text"] for answer in answers], begins, starts))
            for start in starts:
                inside = start <= first <= last < min(start + room, n)
                yield Sample([question], passage.tokens[start:start + room],
                             (begins + first - start, begins + last - start) if inside else (0, 0))

    def measures(self, part: str, probabilities: np.ndarray) -> dict[str, float]:
        """Return F1 and exact match (EM), each the mean over questions of the best over their answers."""
        scores, first = [], 0
        for question in self.questions[part]:
            end = first + len(question.windows)
            said = self.predicted(question, probabilities[first:end])
            right = [text for text in question.answers if normalized(text)] or [""]
            scores.append([max(measure(said, text) for text in right) for measure in (f1, exact)])
            first = end
        return dict(zip(("F1", "EM"), np.mean(scores, 0).tolist(), strict=True))

    def predicted(self, question: Question, probabilities: np.ndarray) -> str:
        """Return the most probable answer of all windows, of probabilities [windows, 2, s]; "" if none of them seems to
        have one, and some question of the data has none.
        """
        passage, begins, best = question.passage, question.begins, (-1.0, "")
        for start, (first, last) in zip(question.windows, probabilities, strict=True):
            n = min(len(passage.tokens) - start, len(first) - begins - 1)
            p = np.triu(np.outer(first[begins:begins + n], last[begins:begins + n]))
            p -= np.triu(p, self.max_answer_length)
            if n > 0 and p.max() > best[0]:
                i, j = np.unravel_index(p.argmax(), p.shape)
                best = p.max(), passage.text[passage.begins[start + i]:passage.ends[start + j]]
        nothing = probabilities[:, :, 0].prod(1).min()
        return best[1] if self.all_have_answers or best[0] > nothing else ""


def paragraphs(data_path: str, pattern: str) -> list[Paragraph]:
    """Return the passages of the one file with such a name, with their questions."""
    files = list(Path(data_path).glob(pattern))
    if len(files) != 1:
        raise UserError(f"--data-path {data_path} has {len(files)} files {pattern}, but needs one. Give a folder with "
                        "the two files of one version of SQuAD.")
    content = parse(read_text(files[0], "SQuAD's folder"), SQuAD, str(files[0]), LIKE)
    found = [paragraph for article in content["data"] for paragraph in article["paragraphs"] if paragraph["qas"]]
    if not found:
        raise UserError(f"{files[0]} has no question. Give the files of SQuAD as they were published.")
    return found


def encode(text: str, tokenizer: WordPieceTokenizer) -> TokenizedPassage:
    """Return a passage's tokens, word by word, which gives the same tokens."""
    words = list(WORD.finditer(text))
    pieces = tokenizer.encode_batch([word[0] for word in words])
    owners = [word for word, ids in zip(words, pieces, strict=True) for _ in ids]
    tokens = array("i", [token for ids in pieces for token in ids])
    return TokenizedPassage(text, tokens, [word.start() for word in owners], [word.end() for word in owners])


# ---- the official measures ------------------------------------------------------------------------------------------


def normalized(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def exact(said: str, right: str) -> float:
    """Return 1 if both are the same words, else 0."""
    return float(normalized(said) == normalized(right))


def f1(said: str, right: str) -> float:
    """Return the harmonic mean of precision and recall of the words, whatever their order."""
    ours, theirs = Counter(normalized(said)), Counter(normalized(right))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())
