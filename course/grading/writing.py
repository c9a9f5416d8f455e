"""Answers in words, which a person grades: cells of text below a lab's questions, `# %% [markdown] writing="name"`."""
import re

from course.grading.answers import about

STUB = "YOUR ANSWER HERE"       # nbgrader's, in the released notebook
LONGEST = 20_000                # characters of a text that is shown


def is_writing(cell) -> bool:
    """Report whether a cell is such a text, by nbgrader's metadata."""
    return cell.cell_type != "code" and bool(about(cell).get("grade") and about(cell).get("solution"))


def names_of_texts(source) -> list[str]:
    """Return the names of the texts that the instructor's notebook asks for."""
    return [about(cell)["grade_id"] for cell in source.cells if is_writing(cell)]


def texts_of(source, submitted) -> dict[str, str]:
    """Return what a submission says in each of the texts that `source` asks for; '' if there is nothing.

    Of two cells with one name the last one with a text counts.
    """
    found = dict.fromkeys(names_of_texts(source), "")
    for cell in submitted.cells:
        name, text = about(cell).get("grade_id"), cell.source.strip()
        if cell.cell_type != "code" and name in found and text and text != STUB:
            found[name] = text
    return found


def quote(text: str) -> str:
    """Return Markdown that shows a student's text as it is, and cannot contain a page of theirs, or a script."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}\n[... {len(text) - LONGEST:,} characters are left out.]"
    text = re.sub("(BEGIN|END) (HIDDEN TESTS|SOLUTION)", r"\1-\2", text)      # nbgrader's words
    fence = "~" * max(3, 1 + max(map(len, re.findall("~+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
