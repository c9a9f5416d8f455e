"""MNLI and QQP: what a row holds, what accuracy and F1 count, and which files are refused."""
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.batches import ClassBatch
from reference.errors import UserError
from shardlab.evaluate.glue import BROKEN, MNLI, QQP, PairsDataset
from tests.evaluate.test_race import CLS, PAD, SEP, TEXTS, Tokenizer

LINE = ("the cat", "a dog", "0")


def write(folder, task, files) -> str:
    """Write a task's folder: `files` are lists of two sentences and a class, in the order of the task's files."""
    names = [name for by_level in task.files.values() for name in by_level.values()]
    for name, rows in zip(names, files, strict=False):
        lines = ["\t".join((answer, "id", b, a)) for a, b, answer in [task.columns, *rows]]
        (folder / name).write_text("\r\n".join(lines) + "\r\n", newline="")
    return str(folder)


@st.composite
def folders(draw):
    """Draw a task, and the pairs of each of its files."""
    task = draw(st.sampled_from([MNLI, QQP]))
    pairs = st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from(task.classes)), min_size=1, max_size=9)
    return task, [draw(pairs) for _ in range(3 if task is MNLI else 2)]


@settings(max_examples=settings().max_examples // 2)
@given(folders(), st.integers(5, 20))
def test_rows_are_the_pairs_in_the_order_of_their_files(tmp_path, case, s):
    """The longer one of two sentences loses tokens, one at a time, until both fit; padding follows."""
    task, expected = case[0], sum(case[1][1:], [])
    dataset = PairsDataset(task, write(tmp_path, *case), Tokenizer(), s, 0)
    batch = ClassBatch.unpack(dataset.batch("validation", 0, len(expected) + 1))
    assert batch.weights.tolist() == [1] * len(expected) + [0]
    for tokens, _, length, answer, (*pair, name) in zip(*batch[:4], expected, strict=False):
        a, b = Tokenizer.encode_batch(pair)
        while len(a) + len(b) > s - 3:
            (a if len(a) > len(b) else b).pop()
        row = [CLS, *a, SEP, *b, SEP]
        assert tokens.tolist() == row + [PAD] * (s - len(row)) and length == len(row)
        assert task.classes[answer] == name


@settings(max_examples=settings().max_examples // 2)
@given(folders(), st.integers(0, 2**32 - 1))
def test_accuracy_and_f1_are_those_of_their_definitions(tmp_path, case, seed):
    """Counted one by one, over all pairs and over each file's; F1 is of the class "1" of two."""
    task, files = case
    dataset = PairsDataset(task, write(tmp_path, *case), Tokenizer(), 9, 0)
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(len(task.classes)), dataset.samples("validation"))
    found, said = dataset.measures("validation", probabilities), iter(probabilities.argmax(1).tolist())
    pairs = [[(next(said), task.classes.index(name)) for *_, name in each] for each in files[1:]]
    together = sum(pairs, [])
    expected = [sum(x == y for x, y in each) / len(each) for each in (together, *pairs)]
    if task is QQP:
        true, false, missed = (together.count(pair) for pair in ((1, 1), (1, 0), (0, 1)))
        expected[1] = 2 * true / (2 * true + false + missed) if true else 0
    names = ["F1"] if task is QQP else ["matched accuracy", "mismatched accuracy"]
    assert found == pytest.approx(dict(zip(["accuracy", *names], expected, strict=True)))


def refused(task, path, s, said) -> None:
    with pytest.raises(UserError, match=said):
        PairsDataset(task, path, Tokenizer(), s, 0)


def test_a_few_lines_may_lack_columns(tmp_path):
    """One line in a thousand may lack columns, as in QQP's published train.tsv, and is left out."""
    path = write(tmp_path, QQP, [[LINE] * BROKEN, [LINE]])
    with open(tmp_path / "train.tsv", "a") as file:
        file.write("half\n")
    assert PairsDataset(QQP, path, Tokenizer(), 9, 0).samples("train") == BROKEN


@pytest.mark.parametrize("old, new, said", [
    ("is_duplicate", "label", "has no column is_duplicate in its first line"), ("0\tid", "2\tid", "the class '2' in"),
    ("\tthe cat", "", "has 1 line, of which 0 have the 4 columns"), ("(?s).+", "", "is empty"),
    ("0\tid.*", "", "has 0 lines")])
def test_what_is_not_a_file_of_pairs_is_refused(tmp_path, old, new, said):
    path, file = write(tmp_path, QQP, [[LINE], [LINE]]), tmp_path / "dev.tsv"
    refused(QQP, path, 4, "--seq-length is 4")
    file.write_text(re.sub(old, new, file.read_text()))
    refused(QQP, path, 9, f"dev.tsv.* {said}")
