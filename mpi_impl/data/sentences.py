"""A splitter of texts into sentences, by rules for English prose that also work for code.

A sentence ends

  - with . ! or ?, and quotation marks and brackets that close after it, before white space and a capital letter or a
    digit, perhaps in opening quotation marks and brackets. A full stop after a title, an initial, or letters as in
    "U.S." does not end one, nor does one after an abbreviation as in "p. 5" before a digit;
  - at a blank line;
  - at the end of a line, since text from the web has a paragraph in each line, and so do code, lists and headings. But
    wrapped prose goes on: from a line as long as WRAPPED says to one that begins at the same column with a letter or a
    digit, perhaps in quotation marks and brackets.

The rules err where a person would not. It does little harm here: a text that was split in the wrong place is still
followed by the text after it, and BERT learns to tell what follows.
"""
import re

CANDIDATE = re.compile(r"""(?P<mark>[.!?])["'”’»)\]]*\s+|\n\s*""")  # where a sentence may end
BEGINNING = re.compile(r"""["'“‘«(\[]*(?P<first>\w)""")
LAST_WORD = re.compile(r"\w[\w.]*$")
LONGEST = 20              # characters of a word that is looked up
WRAPPED = range(50, 101)  # characters; shorter lines end where their author wants, longer ones are not wrapped
INITIALS = re.compile(r"[A-Z]|([A-Za-z]\.)+[A-Za-z]")
TITLES = frozenset("""mr mrs ms messrs dr prof hon rev st mt jr sr gen col maj capt lt sgt gov sen rep
    jan feb mar apr jun jul aug sep sept oct nov dec inc ltd co corp dept univ vs cf viz al ca approx""".split())
BEFORE_DIGITS = frozenset("no nos fig figs eq eqs sec sect ch chap vol p pp art ver ref".split())


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, in order, with only white space between, before and after them.

    None of them is empty, begins or ends with white space, or has a blank line within.
    """
    sentences, start = [], 0
    for candidate in CANDIDATE.finditer(text):
        if ends_line(text, candidate) or ends_sentence(text, candidate):
            sentences.append(text[start:candidate.end()])
            start = candidate.end()
    sentences.append(text[start:])
    return [plain for sentence in sentences if (plain := sentence.strip())]


def ends_line(text: str, candidate: re.Match[str]) -> bool:
    """Report whether a line ends here that does not go on in the next."""
    line_end = text.find("\n", candidate.start(), candidate.end())
    if line_end < 0:
        return False
    line = text[text.rfind("\n", 0, line_end) + 1:line_end].rstrip()
    column, next_column = len(line) - len(line.lstrip()), candidate.end() - line_end - 1
    blank_lines = text.find("\n", line_end + 1, candidate.end()) >= 0
    goes_on = len(line) in WRAPPED and not blank_lines and column == next_column
    return not goes_on or not BEGINNING.match(text, candidate.end())


def ends_sentence(text: str, candidate: re.Match[str]) -> bool:
    """Report whether there is a mark that ends a sentence, and not an abbreviation, before a possible beginning."""
    beginning = BEGINNING.match(text, candidate.end())
    if not candidate["mark"] or not beginning or beginning["first"].islower():
        return False
    last = LAST_WORD.search(text[max(0, candidate.start() - LONGEST):candidate.start()])
    if candidate["mark"] != "." or not last:
        return True
    word = last[0].lower()
    numbered = word in BEFORE_DIGITS and beginning["first"].isdigit()
    return not (word in TITLES or numbered or INITIALS.fullmatch(last[0]))
