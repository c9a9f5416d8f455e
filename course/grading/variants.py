"""Variants of labs: other tasks of the same kind, with solutions, hidden tests and expected results of their own.

A lab's source is its public variant. For a seed, `course/variants/lab2.py` draws texts of that source and what replaces
each of them: an activation, an order, the terms of a loss, sizes in hidden tests. So a variant is a source like the
public one, and all that reads a lab's source reads it.
"""
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from course.grading.draws import generator

PUBLIC = ""                     # the seed of the public variant
FILE = "variant.txt"            # in the folder of a course: its seed


def source_of(lab: Path, variant: str = PUBLIC) -> str:
    """Return the source of a lab, in the variant of this seed."""
    text = lab.read_text()
    return replace_all(text, replacements(lab.stem, variant)) if variant != PUBLIC else text


def has_variants(lab: str) -> bool:
    """Report whether there is a module that draws variants of this lab."""
    return find_spec(module_of(lab)) is not None


def replacements(lab: str, variant: str) -> dict[str, str]:
    """Draw the texts of a lab that a variant replaces, and the new ones; none if the lab has no variants."""
    if not has_variants(lab):
        return {}
    return import_module(module_of(lab)).draw(generator("variant", variant, lab))


def replace_all(text: str, pairs: Mapping[str, str]) -> str:
    """Replace each text wherever it stands, all at the same time. Raises ValueError if one does not occur."""
    missing = set(pairs)

    def new(match: re.Match) -> str:
        missing.discard(match[0])
        return pairs[match[0]]

    longest_first = sorted(pairs, key=len, reverse=True)
    replaced = re.sub("|".join(map(re.escape, longest_first)), new, text) if pairs else text
    if missing:
        raise ValueError(f"the source does not contain {min(missing)!r}, which a variant would replace.")
    return replaced


def module_of(lab: str) -> str:
    return f"course.variants.{lab.partition('_')[0]}"
