"""The normalization of a text before it is tokenized: little, and the same for every language.

  - Control characters and byte-order marks are removed.
  - Every line end (of Unix, Windows, old Macs, pages, records, Unicode) becomes a newline, without blanks before it.
  - Empty lines at the beginning and at the end are removed.
  - Characters with several spellings in Unicode get the composed one, NFC: e and an accent become one character.

So the tokens no longer decode to the bytes that were read. Blanks at the beginning of a line and empty lines between
paragraphs stay: programs and poems need them. Text that was decoded wrongly before is not repaired, since that takes
guesses.
"""
import re
import unicodedata

CONTROLS = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff]")  # but for tabs and what ends a line


def normalize(text: str) -> str:
    """Return the normalized text; a normalized one comes back as it is."""
    text = CONTROLS.sub("", text).replace("\x1f", "\n")  # the one separator that splitlines overlooks
    lines = (line.rstrip() for line in text.splitlines())
    return unicodedata.normalize("NFC", "\n".join(lines)).strip("\n")
