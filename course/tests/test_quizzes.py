"""The quizzes: every key is derived twice, and every format says what the bank says."""
import re
import sys
import tomllib
import zipfile
from itertools import product
from math import isclose
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest
from hypothesis import given, strategies as st

from course.quizzes.__main__ import main
from course.quizzes.bank import FOLDER, QUIZZES, Question, read_quiz
from course.quizzes.exam import key_of
from course.quizzes.formats import gift, notebook, text2qti

ENTRIES = {quiz: tomllib.loads((FOLDER / f"{quiz}.toml").read_text()) for quiz in QUIZZES}
EXAM = ENTRIES["exam"]
WALKTHROUGHS = re.findall(r"\| \[(.+?)\]", (FOLDER.parents[1] / "notebooks/README.md").read_text())
SIZES = {"prerequisites": 12, "concepts": 25, "exam": 30}


# ---- the bank -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("quiz", QUIZZES)
def test_a_quiz_has_its_number_of_questions_each_with_all_that_it_needs(quiz):
    assert len(ENTRIES[quiz]) == SIZES[quiz] and len({one["stem"] for one in ENTRIES[quiz].values()}) == SIZES[quiz]
    for name, about in ENTRIES[quiz].items():
        if quiz == "exam":
            assert set(about) == {"see", "stem", "because", "numbers", "formula", "key"}, name
        else:
            assert set(about) == {"see", "stem", "because", "right", "wrong"}, name
            reasons = list(about["wrong"].values())
            assert len(set(reasons)) == 3 and about["right"] not in about["wrong"] and all(map(str.strip, reasons))
        assert "$" not in str(about), "Canvas and Moodle would read formulas in TeX differently"
        named = re.fullmatch(r'the walkthrough "(.+)"', about["see"])
        assert named[1] in WALKTHROUGHS if named else quiz == "prerequisites"


def test_the_longest_choice_of_the_inventory_is_right_no_more_often_than_by_chance():
    longest = [len(about["right"]) > max(map(len, about["wrong"])) for about in ENTRIES["concepts"].values()]
    assert sum(longest) <= len(longest) / 4


def test_the_inventory_names_nothing_that_the_course_names():
    named = re.compile(r"all-reduce|reduce-scatter|all-gather|KV cache|1F1B|GPipe|ZeRO|\bring\b")
    for about in ENTRIES["concepts"].values():
        assert not named.search(" ".join([about["stem"], about["right"], *about["wrong"]])), about["stem"]


def test_a_variant_is_the_same_each_time_and_another_one_has_other_numbers():
    first, again, other = (read_quiz("exam", variant) for variant in ("a", "a", "b"))
    assert first == again and [one.name for one in first] == [one.name for one in other]
    assert sum(one.right != two.right for one, two in zip(first, other)) > 15

    assert {list(one.choices).index(one.right) for one in read_quiz("concepts")} == {0, 1, 2, 3}


@pytest.mark.parametrize("name", EXAM)
def test_every_variant_has_the_key_that_the_formula_gives(name):
    about = EXAM[name]
    for values in product(*about["numbers"].values()):
        numbers = dict(zip(about["numbers"], values))
        key, expected = key_of(about["key"], numbers), eval(about["formula"], numbers.copy())
        assert isclose(key, expected, rel_tol=1e-3 if "range" in about["formula"] else 1e-12), numbers
        assert type(key) in (int, float)
        assert not re.search("[{}]|nan|inf\\b", (about["stem"] + about["because"]).format(answer=key, **numbers))


# ---- the formats ----------------------------------------------------------------------------------------------------

TEXT = r"((?:[^\\~=#{}:\n]|\\.)*)"       # without control characters that are not escaped
GIFT = re.compile(rf"::{TEXT}::\[markdown\]{TEXT} \{{(?:#([\d.e-]+):([\d.e-]+)\n####{TEXT}|"
                  rf"((?:\n[=~]{TEXT}#{TEXT})*))\n\}}\n")


def plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def expect_gift(questions):
    """Read GIFT as Moodle's importer does, and compare."""
    category, *blocks = re.split(r"\n\n|(?<=\n\}\n)\n", gift("Title", questions))
    assert category == "$CATEGORY: Shardlab/Title" and len(blocks) == len(questions)
    for question, block in zip(questions, blocks):
        name, stem, key, within, because, choices, *_ = GIFT.fullmatch(block.rstrip("\n") + "\n").groups()
        assert (plain(name), plain(stem)) == (question.name, question.stem)
        if question.choices:
            assert [(mark, plain(choice), plain(said)) for mark, choice, said in re.findall(
                rf"\n([=~]){TEXT}#{TEXT}", choices)] == [
                ("=" if choice == question.right else "~", choice, said) for choice, said in question.choices.items()]
        else:
            assert (float(key), float(within), plain(because)) == (question.right, question.within, question.because)


@pytest.mark.parametrize("quiz", QUIZZES)
def test_gift_says_what_the_bank_says(quiz):
    expect_gift(read_quiz(quiz))


TEXTS = st.text("~=#{}:\\n\n ax", min_size=1).map(lambda text: f"a{text}a")


@given(st.lists(TEXTS, min_size=4, max_size=4, unique=True), TEXTS, TEXTS)
def test_no_text_breaks_gift(choices, stem, said):
    expect_gift([Question("one", stem, choices[0], said, dict.fromkeys(choices, said)),
                 Question("two", stem, 3, said, {})])


@pytest.mark.parametrize("quiz", QUIZZES)
def test_the_notebook_tells_right_answers_and_the_misconception_behind_wrong_ones(quiz, capsys):
    questions, names = read_quiz(quiz), {}
    cells = nbformat.reads(notebook("Title", questions), as_version=4).cells
    exec(cells[1].source, names)
    assert len(cells) == 2 + 2 * len(questions)
    for number, (question, cell) in enumerate(zip(questions, cells[3::2]), 1):
        exec(cell.source, names)
        assert "in place of the dots" in capsys.readouterr().out
        for letter, (choice, said) in zip("abcd", question.choices.items()):
            assert f"{letter}) {choice}" in cells[2 * number].source
            names["check"](number, letter)
            assert capsys.readouterr().out.strip() == said and said.startswith("Right.") == (choice == question.right)
        if not question.choices:
            for off, right in (0, True), (0.99 * question.within, True), (1.01 * question.within + 1, False):
                names["check"](number, question.right + off)
                assert capsys.readouterr().out.startswith("Right.") == right


@pytest.mark.parametrize("quiz", QUIZZES)
def test_text2qti_makes_qti_of_it_with_the_right_keys(quiz, monkeypatch, tmp_path):
    pytest.importorskip("text2qti")
    monkeypatch.setattr(sys, "argv", ["quizzes", "--format", "qti", str(tmp_path)])
    main()
    with zipfile.ZipFile(tmp_path / f"{quiz}.zip") as archive:
        trees = [ElementTree.fromstring(archive.read(name)) for name in archive.namelist() if name.endswith(".xml")]
    space = "{http://www.imsglobal.org/xsd/ims_qtiasiv1p2}"
    items = [item for tree in trees for item in tree.iter(f"{space}item")]
    questions = read_quiz(quiz)
    assert [item.get("title") for item in items] == [one.name for one in questions]
    for item, question in zip(items, questions):
        keys, least, most = ([one.text for one in item.iter(space + kind)] for kind in ("varequal", "vargte", "varlte"))
        labels = [one.get("ident") for one in item.iter(f"{space}response_label")]
        if question.choices:
            assert len(labels) == 4 and labels[list(question.choices).index(question.right)] in keys
        else:
            bounds = question.right, question.right - question.within, question.right + question.within
            assert np.allclose([float(one[0]) for one in (keys, least, most)], bounds, rtol=0, atol=1e-4)


def test_the_command_writes_every_quiz_and_says_what_is_missing(monkeypatch, tmp_path, capsys):
    for options in ["--format", "notebook"], ["--variant", "a secret"]:
        monkeypatch.setattr(sys, "argv", ["quizzes", *options, str(tmp_path)])
        main()
    assert {one.name for one in tmp_path.iterdir()} == {quiz + kind for quiz in QUIZZES for kind in (".gift", ".ipynb")}
    assert (tmp_path / "exam.gift").read_text() == gift(QUIZZES["exam"], read_quiz("exam", "a secret"))
    monkeypatch.setitem(sys.modules, "text2qti.config", None)
    for options, words in (["--format", "qti"], "not installed"), (["--variant", " "], "--variant is empty"):
        monkeypatch.setattr(sys, "argv", ["quizzes", *options, str(tmp_path)])
        with pytest.raises(Exception, match=words):
            main()
    assert text2qti("Title", read_quiz("exam")).count("\nTitle: ") == 30
