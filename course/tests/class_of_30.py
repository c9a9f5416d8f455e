"""The seconds that it takes to grade a class of 30 in each lab: `python -m course.tests.class_of_30 [LAB ...]`.

Twelve have solved the lab, twelve have one wrong answer each, three have written nothing; one loops without end, one
prints without end, and one ends its process. (A shell's `time` counts the seconds of a processor.)
"""
import sys
import time

from course.grading import checks
from course.grading.answers import answers_of
from course.grading.grade import grade
from course.tests.notebooks import answer_cell, notebook
from course.tests.submissions import LAB_NAMES, solution


def submissions(lab: str) -> list[dict[str, str]]:
    """Return the answers of 30 students."""
    right = answers_of(solution(lab))
    last = list(right)[-1]
    wrong = [{**right, name: "raise ValueError('wrong')"} for name in (list(right) * 12)[:12]]
    blank = dict.fromkeys(right, "raise NotImplementedError()")
    endless = right[last].replace("    ### BEGIN SOLUTION", "    while True: pass\n    ### BEGIN SOLUTION")
    return [right] * 12 + wrong + [blank] * 3 + [{**right, last: text} for text in (
        endless, "while True: print('x' * 100)", "import os\nos._exit(0)")]


def main() -> None:
    for lab in sys.argv[1:] or LAB_NAMES:
        students, source = submissions(lab), solution(lab)
        start = time.monotonic()
        points = [sum(mark.points for mark in grade(source, notebook(*(
            answer_cell(name, text) for name, text in answers.items())), "seed")) for answers in students]
        checks.close()
        print(f"{lab}: {time.monotonic() - start:.0f} s; points {', '.join(f'{one:g}' for one in points)}", flush=True)


if __name__ == "__main__":
    main()
