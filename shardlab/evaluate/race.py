"""RACE: questions about passages from English examinations, with four answers to choose from (Lai et al. 2017).

A BERT reads `[CLS] question and answer [SEP] passage [SEP]` for each of the four answers and gives it a score; it is
tuned on the part "train". The question comes first, as in Megatron, and the end of a long passage is cut off.

The folder holds a file for each passage, such as `test/high/18.txt`: a JSON object with an article, questions, and for
each question four options and the letter of the right one.
"""
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypedDict

from mpi_impl.data.tokenizer import WordPieceTokenizer
from reference.batches import ChoiceBatch
from reference.config import require_positive
from reference.errors import UserError
from shardlab.evaluate.files import parse, read_text
from shardlab.evaluate.tuning_data import Sample, TuningDataset

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


class RACEDataset(TuningDataset):
    """The questions of RACE, part by part: the files in the order of their names, those of middle schools first.

    `max_qa_length` is the longest that a question and an option may be
    together, in tokens; the rest is cut off. Raises UserError for sizes that leave no room for the passage, a part
    without files, and a file that is not a passage.
    """

    batch_type = ChoiceBatch

    def __init__(self, data_path: str, tokenizer: WordPieceTokenizer, seq_length: int, seed: int,
                 max_qa_length: int = 128, parts: Iterable[str] = PARTS):
        require_positive("max_qa_length", max_qa_length)
        if seq_length < max_qa_length + 4:
            raise UserError(f"--seq-length is {seq_length}, but must be at least {max_qa_length + 4}: a question and "
                            f"an answer take up to {max_qa_length} tokens (--max-qa-length), [CLS] and two [SEP] "
                            "three, and something must be left for the passage. Choose a smaller --max-qa-length, or a "
                            "model that sees more.")
        super().__init__(tokenizer, seq_length, seed, {
            part: {level: [question for file in passage_files(data_path, PARTS[part], level)
                           for question in questions(read_passage(file), tokenizer, max_qa_length)]
                   for level in LEVELS} for part in parts})


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


def questions(passage: Examination, tokenizer: WordPieceTokenizer, max_qa_length: int) -> list[Sample]:
    """Return the tokens of a passage, its questions and their options."""
    pairs = list(zip(passage["questions"], passage["options"], passage["answers"], strict=True))
    texts = [fill_in(question, option) for question, options, _ in pairs for option in options]
    article, *choices = (array("i", ids) for ids in tokenizer.encode_batch([passage["article"], *texts]))
    cut, n = [ids[:max_qa_length] for ids in choices], len(LETTERS)
    return [Sample(cut[n * i:n * i + n], article, LETTERS.index(answer)) for i, (*_, answer) in enumerate(pairs)]


def fill_in(question: str, option: str) -> str:
    """Put the option into the question's blanks, which are written `_`, or after a question that has none."""
    return question.replace("_", option) if "_" in question else f"{question} {option}"
