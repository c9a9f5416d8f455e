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

from course.quizzes import exam
from course.quizzes.__main__ import main
from course.quizzes.bank import FOLDER, QUIZZES, Question, read_quiz
from course.quizzes.formats import gift, notebook, text2qti
from reference import ops
from reference.comm.collectives import all_reduce
from reference.comm.ring import ring_all_reduce
from reference.costs.flops import iteration_flops
from reference.costs.memory import most_in_flight
from reference.costs.volumes import data_parallel_traffic
from reference.positions import in_order
from reference.precision import FORMATS, rounded
from reference.schedules.generators import make
from reference.schedules.simulate import Times, activations_in_flight, simulate

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
            assert set(about) == {"see", "stem", "because", "numbers", "formula"}, name
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
        key, expected = getattr(exam, name)(**numbers), eval(about["formula"], numbers.copy())
        assert isclose(key, expected, rel_tol=1e-3 if "range" in about["formula"] else 1e-12), numbers
        assert type(key) in (int, float)
        assert not re.search("[{}]|nan|inf\\b", (about["stem"] + about["because"]).format(answer=key, **numbers))


# ---- what the inventory claims, executed --------------------------------------------------------------------------

A, B = np.random.default_rng(1).normal(size=(2, 4, 6))


def claim(name: str) -> str:
    """Return the right choice of a concept, which a test has shown."""
    return ENTRIES["concepts"][name]["right"]


def test_what_the_inventory_says_about_sums():
    gelu = lambda z: ops.gelu(z)[0]                     # noqa: E731
    assert np.abs(gelu(A) + gelu(B) - gelu(A + B)).max() > 0.1 and "after" in claim("gelu_of_parts")
    bias = np.ones(6)
    assert np.allclose(all_reduce([A / 4 + bias] * 4)[0], A + 4 * bias) and claim("bias_on_every_rank") == "x W + 4 b"
    means = np.array([1 / 6, 1 / 6, 1 / 6, 1]) / 4      # of a token's loss, by replica
    assert np.isclose(means[3] / means[0], 6) and "six times" in claim("replicas_mean")


def test_what_the_inventory_says_about_softmax():
    whole, parts = A[0], np.split(A[0], 2)
    def normalizer(shifts):
        return np.log(sum(np.exp(part - shift).sum() for part, shift in zip(parts, shifts))) + max(shifts)
    right = np.log(np.exp(whole).sum())
    assert np.isclose(normalizer([whole.max()] * 2), right) and claim("own_maximum").startswith("No")
    assert abs(normalizer([part.max() for part in parts]) - right) > 0.01
    sums = np.array([np.exp(part).sum() for part in parts])
    means = [np.exp(part) @ v / total for part, v, total in zip(parts, np.split(B[0], 2), sums)]
    exact = np.exp(whole) @ B[0] / sums.sum()
    assert np.isclose(means @ sums / sums.sum(), exact) and "weighted" in claim("softmax_in_parts")
    assert abs(np.mean(means) - exact) > 0.01


def test_what_the_inventory_says_about_costs():
    assert 1.7 < ring_all_reduce(1, 8) < ring_all_reduce(1, 64) < 2 and "below 2 N" in claim("ring_cost")
    assert data_parallel_traffic(1, 8, 1) == data_parallel_traffic(1, 8) and "same" in claim("zero_one")
    gpt = exam.gpt(24, 4096, 32, V=1)
    assert abs(iteration_flops(gpt, 1, 8, "full") / iteration_flops(gpt, 1, 8) - 4 / 3) < 1e-3
    assert claim("recompute") == "A third"
    gpipe, pipe = (make(name, 4, 16) for name in ("gpipe", "1f1b"))
    assert simulate(gpipe, Times()).makespan == simulate(pipe, Times()).makespan
    assert (max(activations_in_flight(gpipe)), max(activations_in_flight(pipe))) == (16, 4) == (
        most_in_flight("gpipe", 4, 16, 0), most_in_flight("1f1b", 4, 16, 0)) and "Memory" in claim("one_f_one_b")
    fractions = [simulate(make("1f1b", p, m), Times()).bubble_fraction for p, m in ((4, 10), (8, 10), (4, 20), (4, 5))]
    assert min(fractions) == fractions[2] and claim("bubble").startswith("More microbatches")
    work = [sum(i + 1 for i in range(s.start, s.stop)) for (s,) in in_order(4, 4096)]
    assert work[3] / np.mean(work) == pytest.approx(7 / 4, rel=1e-2) and "nearly twice" in claim("causal_order")


def test_what_the_inventory_says_about_small_updates():
    weight = np.float32(1)
    for _ in range(1000):
        weight = rounded(weight - np.float32(0.001), FORMATS["bfloat16"])
    assert weight == 1 and "still 1.0" in claim("small_updates")


# ---- the formats ----------------------------------------------------------------------------------------------------

ESCAPED = {"\\": "\1", "~": "\2", "=": "\3", "#": "\4", "{": "\5", "}": "\6", ":": "\7", "n": "\n"}


def parsed_gift(text: str) -> list[tuple]:
    """Read GIFT as Moodle's importer does: (name, stem, answers, feedback); an answer is (mark, text, feedback)."""
    def plain(part):
        for escape, placeholder in ESCAPED.items():
            part = part.replace(placeholder, "\n" if escape == "n" else escape)
        return part.strip()
    found = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.startswith("$CATEGORY"):
            continue
        block = re.sub(r"\\([\\~=#{}:n])", lambda one: ESCAPED[one[1]] if one[1] != "n" else "\n", block)
        name, stem, inside = re.fullmatch(r"::([^:]*)::\[markdown\]([^{}~=#]*) \{([^{}]*)\}", block, re.DOTALL).groups()
        inside, _, general = inside.partition("####")
        if inside.strip().startswith("#"):
            answers = [("#", inside.strip()[1:], "")]
        else:
            answers = [(mark, *map(plain, body.split("#"))) for mark, body in re.findall(r"([=~])([^=~]*)", inside)]
        found.append((plain(name), plain(stem), answers, plain(general)))
    return found


@pytest.mark.parametrize("quiz", QUIZZES)
def test_gift_says_what_the_bank_says(quiz):
    expect_gift(read_quiz(quiz))


def expect_gift(questions):
    parsed = parsed_gift(gift("Title", questions))
    assert len(parsed) == len(questions)
    for question, (name, stem, answers, general) in zip(questions, parsed):
        assert (name, stem) == (question.name, question.stem)
        if question.choices:
            assert answers == [("=" if one == question.right else "~", one, said)
                               for one, said in question.choices.items()] and not general
        else:
            key, within = map(float, answers[0][1].split(":", 1)) if len(answers) == 1 else ()
            assert (key, within, general) == (question.right, question.within, question.because)


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
