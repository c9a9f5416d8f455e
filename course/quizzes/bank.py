"""The question bank: concepts.toml and prerequisites.toml, with choices, and exam.toml, whose answers are numbers.

A question of a TOML file has a name, and

    see             the walkthrough, or another text, that teaches it
    stem            the question, in Markdown without formulas in TeX, which Canvas and Moodle would read differently
    right, because  the right choice, and why it is right
    [NAME.wrong]    each wrong choice, and the misconception behind it

or in the exam `numbers`, of each of which a variant draws one for the stem, for `because`, and for the `key`, an
expression of what exam.py names.
"""
import tomllib
from pathlib import Path
from random import Random
from typing import NamedTuple

from course.quizzes.exam import key_of

FOLDER = Path(__file__).parent
QUIZZES = {"prerequisites": "Prerequisites", "concepts": "Concept inventory", "exam": "Exam questions"}
PUBLIC = "public"       # the variant that everybody can read


class Question(NamedTuple):
    """A question of one variant."""

    name: str
    stem: str
    right: str | float      # one of the choices, or a number
    because: str
    choices: dict[str, str]     # with what to tell who has chosen it; none: the answer is a number

    @property
    def within(self) -> float:
        """Return how far from the key a number may be: 1 %, but an integer must be met."""
        return 0 if isinstance(self.right, int) else round(0.01 * abs(float(self.right)), 6)


def read_quiz(quiz: str, variant: str = PUBLIC) -> list[Question]:
    """Return the questions of a quiz. The variant, any text, draws numbers and the order of the choices."""
    return [question_of(name, about, Random(f"{variant} {name}"))
            for name, about in tomllib.loads((FOLDER / f"{quiz}.toml").read_text()).items()]


def question_of(name: str, about: dict, random: Random) -> Question:
    """Return a question from its entry in a TOML file."""
    stem, because, see = about["stem"].strip(), about["because"].strip(), f"See {about['see']}."
    if "numbers" in about:
        numbers = {letter: random.choice(values) for letter, values in about["numbers"].items()}
        right = key_of(about["key"], numbers)
        return Question(name, stem.format(**numbers), right, f"{because.format(answer=right, **numbers)} {see}", {})
    choices = [(about["right"], f"Right. {because}"),
               *((wrong, f"{why.strip()} {see}") for wrong, why in about["wrong"].items())]
    return Question(name, stem, about["right"], because, dict(random.sample(choices, len(choices))))
