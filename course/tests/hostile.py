"""Wrong and hostile submissions, and what each of them gets: test_cheats.py hands them in.

A submission is the solution of a lab with some answers replaced. It loses exactly the checks that are named.
"""
from typing import NamedTuple

from course.grading.answers import answers_of
from course.grading.grade import Mark
from course.tests import cheats
from course.tests.submissions import (HIDDEN, LAB1, LAB2, LAB3, LAB4, LAB6, LAB7, LAB8, checks_of, lost_checks,
                                      marks_of, plant, solution)

ONE_FOR_EACH = "not as one for each parameter"


class Submission(NamedTuple):
    """A submission, and what it should get."""

    lab: str
    answers: dict[str, str]
    lost: str | None            # the checks, as in "pass_on all_gather"; None means all of them
    phrases: str                # "a|b": what the message of a lost check says; '' if none is lost

    def marks(self) -> dict[str, Mark]:
        return marks_of(self.lab, **self.answers)

    def fault(self, found: dict[str, Mark]) -> str:
        """Describe what the submission should not have got; '' if all is right."""
        expected = set(found) if self.lost is None else checks_of(self.lost)
        if lost_checks(found) != expected:
            return f"lost {sorted(lost_checks(found))}, not {sorted(expected)}"
        said = "\n".join(found[name].said for name in sorted(expected))
        return "" if any(phrase in said for phrase in self.phrases.split("|")) else f"said {said[:600]}"


def shown(lab: str, cell: str) -> str:
    """Return what students see of a locked cell, to be pasted into an answer."""
    source = next(one.source for one in solution(lab).cells if one.metadata.get("nbgrader", {}).get("grade_id") == cell)
    return HIDDEN.sub("", source[max(source.find("def "), 0):])


def function(head: str, body: str) -> str:
    """Return the source of an answer: a function with this head and body."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return f"import os, sys\nimport numpy as np\n\ndef {head}:\n{lines}"


def added(lab: str, answer: str, code: str, lost: str, phrases: str) -> Submission:
    """Make a submission in which this code follows an answer of the solution."""
    return Submission(lab, {answer: answers_of(solution(lab))[answer] + code}, lost, phrases)


def passes_on(body: str, phrases: str) -> Submission:
    """Make a submission whose pass_on has this body."""
    return Submission(LAB1, {"pass_on": function("pass_on(group, x)", body)}, "pass_on", phrases)


def gathers(body: str, lost: str, phrases: str) -> Submission:
    """Make a submission whose all_gather has this body."""
    return Submission(LAB1, {"all_gather": function("all_gather(group, chunk)", body)}, lost, phrases)


def blank(lab: str) -> Submission:
    """Make a submission in which nothing is written."""
    return Submission(lab, {name: "raise NotImplementedError()" for name in answers_of(solution(lab))}, None,
                      "not written yet")


SUBMISSIONS = {
    "the solution": Submission(LAB1, {}, "", ""),
    "nothing written": blank(LAB1),

    # ---- clumsy, and right but for the cost ----
    "two sums in lab 2": Submission(
        LAB2, plant(LAB2, "block", "g(group, partial)", "g(group, partial / 2) + g(group, partial / 2)"), "block_cost",
        "are enough"),
    "a slow loop in lab 2": Submission(
        LAB2, plant(LAB2, "inside", 'np.einsum("bsh,bsn->hn", n, dz)', "sum(np.array([[x * y for y in dz[i]] for x in "
                    "n[i]]) for i in np.ndindex(dz.shape[:2]))"), "", ""),
    "five sums in lab 4": Submission(LAB4, plant(
        LAB4, "loss_forward", "(wanted *", "(0 * wanted *", "axis=-1))\n", "axis=-1)) + sum(group.all_reduce((part * "
        "np.where(ids < V, logits, 0)).sum(axis=-1)) for part in (wanted / 2, wanted / 2))\n"), "cost", "are enough"),
    "a sum by a gather in lab 7": Submission(LAB7, plant(
        LAB7, "columns", "group.all_reduce(dy @ w.T)", "sum(group.all_gather((dy @ w.T)[None]))"), "", ""),

    # ---- wrong ----
    "one wrong line, on which others build": Submission(
        LAB1, plant(LAB1, "reduce_scatter", "range(1, group.size):", "range(1, group.size - 1):"),
        "reduce_scatter reduce_scatter_cost", "its chunk of the sum is not right"),
    "half of the bits": gathers(
        "chunks = {group.rank: chunk}\nfor step in range(1, group.size):\n"
        "    got = group.exchange(chunk.astype('float32'), (group.rank + step) % group.size, "
        "(group.rank - step) % group.size)\n    chunks[(group.rank - step) % group.size] = got\n"
        "return np.concatenate([chunks[rank] for rank in range(group.size)]).astype(float)",
        "all_gather all_gather_cost", "expected"),
    "everything sent twice": gathers(
        "for step in range(1, group.size):\n    group.exchange(chunk, (group.rank + step) % group.size, "
        "(group.rank - step) % group.size)\nchunks = {group.rank: chunk}\nfor step in range(1, group.size):\n"
        "    chunks[(group.rank - step) % group.size] = group.exchange(chunk, (group.rank + step) % group.size, "
        "(group.rank - step) % group.size)\nreturn np.concatenate([chunks[rank] for rank in range(group.size)])",
        "all_gather_cost", "are enough"),

    # ---- other ranks' data, without a message ----
    "from frames": Submission(LAB1, cheats.LAB1_FROM_FRAMES, None, "has no len|NoneType|None was returned|iterat"),
    "drawn again from the public seed": Submission(LAB1, cheats.LAB1_FROM_SEED, None, "expected|not right"),
    "kept from an earlier run": Submission(LAB1, cheats.LAB1_KEPT, "reduce_scatter_cost", "are enough"),

    # ---- hidden channels between ranks ----
    "shapes of empty arrays": Submission(LAB1, cheats.LAB1_IN_SHAPES, "all_gather all_gather_cost",
                                         "are enough|never ends"),
    "numbers of empty messages": Submission(LAB1, cheats.LAB1_IN_MESSAGES, "all_gather_cost",
                                            "cannot be done with less"),
    "a lock on a page of the C library": Submission(LAB1, cheats.LAB1_BY_FUTEX, "all_gather all_gather_cost",
                                                    "ctypes may not be imported"),
    "arrays of one element": Submission(LAB3, cheats.LAB3_ONE_BY_ONE, "attention_cost",
                                        "a rank has sent|are enough"),

    # ---- the count, the check and the grader ----
    "the lab's whole layer": Submission(
        LAB2, {"inside": shown(LAB2, "whole") + cheats.LAB2_WHOLE}, "inside inside_backward",
        "may not be imported|NameError"),
    "lab 3's layer, behind a gather": added(
        LAB3, "sequence", cheats.LAB3_WHOLE, "sequence_forward sequence_backward sequence_cost", "are enough"),
    "lab 4's loss, behind a gather": added(
        LAB4, "loss_forward", cheats.LAB4_WHOLE + shown(LAB4, "whole"), "loss extreme cost backward", "are enough"),
    "lab 7's product, behind a gather": Submission(LAB7, cheats.LAB7_WHOLE, "columns gathered", "are enough"),
    "complex steps in lab 2": added(
        LAB2, "inside", cheats.BY_STEPS + "SIZE, KEYS = [2], ('W_in', 'W_out')", "inside_backward", ONE_FOR_EACH),
    "complex steps in lab 3": added(
        LAB3, "inside", cheats.BY_STEPS + "SIZE, KEYS = [], 'CRQKVO'", "inside_backward", ONE_FOR_EACH),
    "a helper of the course's answer": Submission(LAB6, cheats.LAB6_HELPER, "zero1 zero1_cost zero2", "KeyError"),
    "one rank trains for all": Submission(
        LAB8, {**cheats.LAB8_ALONE, **plant(LAB8, "predict", "sent.append(in", "sent.append(0 * in"),
               **plant(LAB8, "train", "= step(", "= alone("),
               "step": cheats.LAB8_ALONE["step"] + shown(LAB8, "tools")},
        "sum_among_cost step sent train", "are enough"),
    "numbers kept as a text": Submission(LAB3, plant(LAB3, "sequence", *cheats.LAB3_KEPT_AS_TEXT), "sequence_cost",
                                         "are enough"),
    "a count set back": gathers(
        "group.sent = 0\nfor _ in range(9): group.exchange(chunk, (group.rank + 1) % group.size, "
        "(group.rank - 1) % group.size)\ngroup.sent = group._sent = 0\nreturn chunk",
        "all_gather all_gather_cost", "array of shape|expected"),
    "an array that equals everything": passes_on(
        "class Array(np.ndarray):\n    def __eq__(self, other): return True\nreturn np.zeros(len(x)).view(Array)",
        "expected"),
    "NumPy changed": passes_on("np.subtract = np.abs = np.any = lambda *_, **__: 0\nreturn x * 0", "expected"),
    "a broken function that is replaced": Submission(
        LAB7, cheats.LAB7_CHANGED_PROGRAM, "diagnose_columns",
        "With your inputs the broken function is right|KeyError|died|raised"),
    "the course's answer, read": Submission(LAB1, {"reduce_scatter": cheats.READS_THE_COURSES_ANSWER},
                                            "reduce_scatter reduce_scatter_cost", "its own: 1answer"),
}
