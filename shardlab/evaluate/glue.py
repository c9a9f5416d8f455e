"""MNLI and QQP, as GLUE distributes them: pairs of sentences and their classes (Wang et al. 2018).

MNLI asks whether the second sentence follows from the first, contradicts it, or neither (Williams et al. 2018); its
validation pairs are from the training set's kinds of text (matched), and from others (mismatched). QQP asks whether two
questions are the same. A BERT reads `[CLS] first [SEP] second [SEP]`. The classes of the test parts are not published.

A folder holds train.tsv and dev files: a line for each pair, its columns named by the first line.
"""
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpi_impl.data.tokenizer import WordPieceTokenizer
from mpi_impl.runtime.tables import count
from reference.errors import UserError
from shardlab.evaluate.files import read_text
from shardlab.evaluate.tuning_data import Sample, TuningDataset

CHUNK = 10_000      # lines whose tokens are lists at the same time
BROKEN = 1000       # one line of so many may lack columns, as a few of QQP do, and is left out


class Pairs(NamedTuple):
    """A task's files by part and level, its columns, and its classes."""

    files: dict[str, dict[str, str]]
    columns: tuple[str, str, str]       # the two sentences, and the class
    classes: tuple[str, ...]


TRAIN = {"all": "train.tsv"}
MNLI = Pairs({"train": TRAIN, "validation": {"matched": "dev_matched.tsv", "mismatched": "dev_mismatched.tsv"}},
             ("sentence1", "sentence2", "gold_label"), ("contradiction", "entailment", "neutral"))
QQP = Pairs({"train": TRAIN, "validation": {"all": "dev.tsv"}}, ("question1", "question2", "is_duplicate"), ("0", "1"))


class PairsDataset(TuningDataset):
    """The pairs of a task. Of two that are too long together, the longer one loses its end. Raises UserError for a file
    that is not the task's.
    """

    def __init__(self, task: Pairs, data_path: str, tokenizer: WordPieceTokenizer, seq_length: int, seed: int):
        if seq_length < 5:
            raise UserError(f"--seq-length is {seq_length}, but must be at least 5: [CLS], two [SEP], and a token of "
                            "each sentence.")
        self.task = task
        super().__init__(tokenizer, seq_length, seed, {
            part: {level: list(samples(Path(data_path, name), task, tokenizer, seq_length))
                   for level, name in files.items()} for part, files in task.files.items()})

    def measures(self, part: str, probabilities: np.ndarray) -> dict[str, float]:
        """Return the accuracy, and that of each level; of two classes also the second one's F1."""
        found = super().measures(part, probabilities)
        if len(self.task.classes) > 2:
            return found
        said, right = probabilities.argmax(1), np.array([sample.answer for sample in self.parts[part]])
        return found | {"F1": 2 * (said & right).sum() / max(1, said.sum() + right.sum())}


def samples(path: Path, task: Pairs, tokenizer: WordPieceTokenizer, seq_length: int) -> Iterator[Sample]:
    """Yield the tokens of a file's pairs."""
    pairs = read_pairs(path, task)
    for start in range(0, len(pairs), CHUNK):
        first, second, classes = zip(*pairs[start:start + CHUNK], strict=True)
        tokens = tokenizer.encode_batch([*first, *second])
        for a, b, name in zip(tokens, tokens[len(first):], classes, strict=False):
            n = min(len(a), max(seq_length - 3 - len(b), (seq_length - 2) // 2))       # b gets the rest of s - 3
            yield Sample([array("i", a[:n])], array("i", b), task.classes.index(name))


def read_pairs(path: Path, task: Pairs) -> list[tuple[str, ...]]:
    """Return the two sentences and the class of each line."""
    names, *rows = ([field.strip() for field in line.split("\t")]
                    for line in read_text(path, f"the folder with {path.name} in it").split("\n") if line.strip())
    if missing := set(task.columns) - set(names):
        raise UserError(f"{path} has no column {min(missing)} in its first line. Give the file as GLUE distributes it.")
    whole = [row for row in rows if len(row) == len(names)]
    if not whole or BROKEN * (len(rows) - len(whole)) > len(rows):
        raise UserError(f"{path} has {count(len(rows), 'line')}, of which {len(whole):,} have the {len(names)} columns "
                        "that its first line names. Give the file as GLUE distributes it.")
    places = [names.index(column) for column in task.columns]
    pairs = [tuple(row[place] for place in places) for row in whole]
    if unknown := {pair[2] for pair in pairs} - set(task.classes):
        raise UserError(f"{path} has a pair of the class {min(unknown)!r} in {task.columns[2]}, but the classes are "
                        f"{', '.join(task.classes)}.")
    return pairs
