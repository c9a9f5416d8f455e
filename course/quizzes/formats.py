"""A quiz as a file: GIFT for Moodle, text2qti's plain text for Canvas, and a notebook."""
import base64
import json
import re
import textwrap
from collections.abc import Sequence
from string import ascii_lowercase

import nbformat

from course.quizzes.bank import Question

SETUP = '''# Run this cell first. It holds the answers, encoded so that nobody reads them by accident.
import base64, json
KEYS = json.loads(base64.b64decode("{keys}"))

def check(number, answer):
    """Say whether an answer is right, and what is behind a wrong one."""
    right, within, said = KEYS[number - 1]
    if answer is ...:
        print("Write your answer in place of the dots, and run the cell again.")
    elif isinstance(right, str) != isinstance(answer, str):
        print("Answer with", "a letter in quotes, such as 'a'." if isinstance(right, str) else "a number.")
    elif isinstance(right, str):
        print(said.get(answer, "Answer with a letter in quotes, such as 'a'."))
    else:
        print("Right." if abs(answer - right) <= within else "That is not right.", said)
'''


def gift(title: str, questions: Sequence[Question]) -> str:
    """Return a quiz in GIFT, the text format that Moodle imports."""
    return f"$CATEGORY: Shardlab/{title}\n\n" + "\n".join(map(gift_question, questions))


def gift_question(question: Question) -> str:
    if question.choices:
        answers = "".join(f"\n{'=' if choice == question.right else '~'}{escaped(choice)}#{escaped(said)}"
                          for choice, said in question.choices.items())
    else:
        answers = f"#{question.right}:{question.within}\n####{escaped(question.because)}"
    return f"::{escaped(question.name)}::[markdown]{escaped(question.stem)} {{{answers}\n}}\n"


def escaped(text: str) -> str:
    """Escape GIFT's control characters and line breaks: a blank line would end the question."""
    return re.sub(r"[\\~=#{}:]", r"\\\g<0>", text).replace("\n", r"\n")


def text2qti(title: str, questions: Sequence[Question]) -> str:
    """Return a quiz in the plain text that text2qti converts to QTI 1.2, which Canvas imports."""
    return f"Quiz title: Shardlab: {title}\nShuffle answers: true\n\n" + "\n".join(
        text2qti_question(number, question) for number, question in enumerate(questions, 1))


def text2qti_question(number: int, question: Question) -> str:
    parts = [("Title: ", question.name), (f"{number}.", question.stem)]
    for letter, (choice, said) in zip(ascii_lowercase, question.choices.items()):
        parts += [(f"{'*' * (choice == question.right)}{letter})", choice), ("...", said)]
    if not question.choices:
        right = f"{question.right} +- {question.within}" if question.within else str(question.right)
        parts += [("...", question.because), ("=", right)]
    return "".join(f"{mark:<4}{textwrap.indent(text, '    ').lstrip()}\n" for mark, text in parts)


def notebook(title: str, questions: Sequence[Question]) -> str:
    """Return a quiz as a notebook that needs only Python, and explains the misconception behind a wrong answer."""
    keys, cells = [], []
    for number, question in enumerate(questions, 1):
        letters = dict(zip(ascii_lowercase, question.choices))
        right = next((letter for letter, choice in letters.items() if choice == question.right), question.right)
        keys.append((right, 0 if letters else question.within,
                     {letter: question.choices[choice] for letter, choice in letters.items()} or question.because))
        listed = "".join(f"\n\n{letter}) {choice}" for letter, choice in letters.items())
        cells += [nbformat.v4.new_markdown_cell(f"**{number}.** {question.stem}{listed}"),
                  nbformat.v4.new_code_cell(f"answer = ...\ncheck({number}, answer)")]
    packed = base64.b64encode(json.dumps(keys).encode()).decode()
    cells = [nbformat.v4.new_markdown_cell(f"# {title}"),
             nbformat.v4.new_code_cell(SETUP.replace("{keys}", packed)), *cells]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"      # and not a random one: a quiz is the same file each time
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells)) + "\n"
