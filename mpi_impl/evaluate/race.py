"""RACE: questions about passages from English examinations, with four answers to choose from (Lai et al. 2017).

A BERT reads `[CLS] question and answer [SEP] passage [SEP]` for each of the four answers and gives it a score; it is
tuned on the part "train". The question comes first, as in Megatron, and the end of a long passage is cut off.

The folder holds a file for each passage, such as `test/high/18.txt`: a JSON object with an article, questions, and for
each question four options and the letter of the right one.
"""
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from mpi_impl.data.dataset import order_of_training
from mpi_impl.data.tokenizer import WordPieceTokenizer
from mpi_impl.evaluate.files import parse, read_text
from reference.batches import ChoiceBatch
from reference.config import require_positive
from reference.errors import UserError

PARTS = {"train": "train", "validation": "dev", "test": "test"}    # and their folders
LEVELS = ("middle", "high")    # schools
LETTERS = "ABCD"
LIKE = '{"article": "...", "questions": ["..."], "options": [["...", "...", "...", "..."]], "answers": ["A"]}'


class Examination(TypedDict):
    """A passage with its questions, as published."""

    article: str
    questions: list[str]
    options: list[tuple[str, str, str, str]]
    answers: list[Literal["A", "B", "C", "D"]]


class Question(NamedTuple):
    """The tokens of a question. Rows are made of them on demand: those of all questions would fill gigabytes."""

    article: "array[int]"            # shared with the other questions about it
    choices: "list[array[int]]"      # the question with each of its four options
    answer: int                      # the index of the right one


class RACEDataset:
    """The questions of RACE, part by part: the files in the order of their names, those of middle schools first.

    Each level of a part is one, too: "test high". `max_qa_length` is the longest that a question and an option may be
    together, in tokens; the rest is cut off. Raises UserError for sizes that leave no room for the passage, a part
    without files, and a file that is not a passage.
    """

    def __init__(self, data_path: str, tokenizer: WordPieceTokenizer, seq_length: int, seed: int,
                 max_qa_length: int = 128, parts: Iterable[str] = PARTS):
        require_positive("max_qa_length", max_qa_length)
        if seq_length < max_qa_length + 4:
            raise UserError(f"--seq-length is {seq_length}, but must be at least {max_qa_length + 4}: a question and "
                            f"an answer take up to {max_qa_length} tokens (--max-qa-length), [CLS] and two [SEP] "
                            "three, and something must be left for the passage. Choose a smaller --max-qa-length, or a "
                            "model that sees more.")
        self.tokenizer, self.seq_length, self.seed = tokenizer, seq_length, seed
        self.parts: dict[str, list[Question]] = {}
        for part in parts:
            by_level = {f"{part} {level}": [question for file in passage_files(data_path, PARTS[part], level)
                                            for question in questions(read_passage(file), tokenizer, max_qa_length)]
                        for level in LEVELS}
            self.parts |= by_level | {part: [question for level in by_level.values() for question in level]}

    def samples(self, part: str) -> int:
        """Return the number of questions."""
        return len(self.parts[part])

    def batch(self, part: str, first_sample: int, count: int) -> np.ndarray:
        """Return samples first_sample, ..., first_sample + count - 1: int64 [count, width], rows of a ChoiceBatch.

        Training passes through its part again and again, in another order each epoch, which depends only on the seed.
        The other parts are passed through once, in their stored order: beyond their ends they begin again, with weights
        0.
        """
        n, samples = self.samples(part), np.arange(first_sample, first_sample + count)
        weights = np.where(samples < n, 1, int(part == "train"))
        places = order_of_training(n, self.seed, first_sample, count) if part == "train" else samples % n
        asked = [self.parts[part][place] for place in places]
        rows = [sequence(choice, q.article, self.seq_length, self.tokenizer) for q in asked for choice in q.choices]
        tokens, token_types, lengths = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        answers = np.array([question.answer for question in asked], np.int64)
        return ChoiceBatch(tokens, token_types, lengths, answers, weights).pack()


def passage_files(data_path: str, part_folder: str, level: str) -> list[Path]:
    """Return a part's files of a level. Raise UserError if there are none: only half the part would be measured."""
    folder = Path(data_path, part_folder, level)
    files = sorted(folder.glob("[!.]*.txt"))
    if not files:
        raise UserError(f"--data-path {data_path} is not RACE's folder: there is no .txt file in {folder}. Give "
                        "the folder that has train, dev and test in it, each with middle and high.")
    return files


def read_passage(file: Path) -> Examination:
    """Return the contents of a file, with all its fields checked. Raise UserError for anything else."""
    passage = parse(read_text(file, "RACE's folder"), Examination, str(file), LIKE)
    lengths = {name: len(passage[name]) for name in ("questions", "options", "answers")}
    if not passage["questions"]:
        raise UserError(f"{file} has no question. Give the files of RACE as they were published.")
    if len(set(lengths.values())) > 1:
        numbers = ", ".join(f"{n} {name}" for name, n in lengths.items())
        raise UserError(f"{file} has {numbers}, but needs the same number of each.")
    return passage


def questions(passage: Examination, tokenizer: WordPieceTokenizer, max_qa_length: int) -> list[Question]:
    """Return the tokens of a passage, its questions and their options."""
    pairs = list(zip(passage["questions"], passage["options"], passage["answers"], strict=True))
    texts = [fill_in(question, option) for question, options, _ in pairs for option in options]
    article, *choices = (array("i", ids) for ids in tokenizer.encode_batch([passage["article"], *texts]))
    cut, n = [ids[:max_qa_length] for ids in choices], len(LETTERS)
    return [Question(article, cut[n * i:n * i + n], LETTERS.index(answer)) for i, (*_, answer) in enumerate(pairs)]


def fill_in(question: str, option: str) -> str:
    """Put the option into the question's blanks, which are written `_`, or after a question that has none."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"


def sequence(choice: "array[int]", article: "array[int]", seq_length: int,
             tokenizer: WordPieceTokenizer) -> tuple[list[int], list[int], int]:
    """Return `[CLS] choice [SEP] article [SEP]`, padded: tokens [s]; types [s], 1 from the article on; the length."""
    first = [tokenizer.cls, *choice, tokenizer.sep]
    second = [*article[:seq_length - len(first) - 1], tokenizer.sep]
    length = len(first) + len(second)
    rest = seq_length - length
    return [*first, *second, *[tokenizer.pad] * rest], [0] * len(first) + [1] * len(second) + [0] * rest, length


def answers_right(scores, batch: ChoiceBatch):
    """Count the questions that have their highest score, of scores [b, 4], at the right answer."""
    return ((scores.argmax(1) == batch.answers) * batch.weights).sum()
