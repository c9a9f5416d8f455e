"""WikiText-103: the perplexity of a GPT on the text of articles (Merity et al. 2016).

The file `wiki.test.tokens` is text split into words, with blanks between them: ` = Robert Boulter = ` is a heading,
`@-@` the hyphen of a compound, and the end of a line is a word of its own. A GPT has not learnt to write like that. So
it gets the text as people write it, in its own tokens, T in all; and the loss, summed over all of them, is divided by
T_o, the number of words in the file. Such perplexities can be compared between models whose tokens differ (Shoeybi et
al. 2019, appendix E.1).
"""
import re
from math import exp
from typing import NamedTuple

import numpy as np

from mpi_impl.data.tokenizer import Tokenizer, encode_whole
from mpi_impl.runtime.tables import count
from reference.errors import UserError
from shardlab.evaluate.files import read_text
from shardlab.evaluate.scored import Excerpt, ScoredDataset

WANTED = "WikiText-103's wiki.test.tokens"
HEADING = re.compile(r"^ ?= .+ = ?$", re.MULTILINE)

# Megatron's replacements, one after another, in the whole file. Comparable perplexities need the same text, so its
# oddities are kept: quotation marks pair up across lines, and the N of north becomes 1.
BEFORE_PAIRS = {
    "s '": "s'",
    " @-@ ": "-", " @,@ ": ",", " @.@ ": ".",
    " : ": ": ", " ; ": "; ", " . ": ". ", " ! ": "! ", " ? ": "? ", " , ": ", ",
}
PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]
AFTER_PAIRS = {
    "= = = =": "====", "= = =": "===", "= =": "==",
    " ° ": "°", " \n": "\n", "\n ": "\n", " N ": " 1 ", " 's": "'s",
}


class Perplexities(NamedTuple):
    """Perplexities over T tokens, of which all but the first are predicted. T_o is the number of words in the file."""

    loss: float                   # nats for each predicted token: sum / (T - 1)
    token_perplexity: float       # exp(sum / (T - 1))
    perplexity: float             # exp(sum / T_o), the paper's
    adjusted_perplexity: float    # exp(sum / (T_o - 1)), what Megatron's program prints


class WikiText103(ScoredDataset):
    """The windows of the file, with every token but the first scored once.

    Raises UserError for a file that is not WikiText's or is too short, and for windows that leave out tokens.
    """

    name = "windows"

    def __init__(self, data_path: str, tokenizer: Tokenizer, seq_length: int, overlapping_eval: int = 32):
        check_windows(seq_length, overlapping_eval)
        text = read_text(data_path, WANTED)
        if not HEADING.search(text):
            raise UserError(f"{data_path} has no heading, a line like ' = Robert Boulter = ': it is not in WikiText's "
                            f"format. Give the path of {WANTED}.")
        stream = np.array(encode_whole(tokenizer, detokenize(text)), np.int64)
        self.original_tokens = original_tokens(text)    # T_o
        self.tokens = len(stream)                       # T
        if min(self.original_tokens, self.tokens) < 2:
            raise UserError(f"{data_path} has {count(self.original_tokens, 'word')} and "
                            f"{count(self.tokens, 'token')}, but nothing can be predicted with fewer than "
                            f"two. Give the path of {WANTED}.")
        super().__init__(windows(stream, seq_length, overlapping_eval), seq_length, tokenizer.eod)

    def perplexities(self, summed_loss: float) -> Perplexities:
        """Compute perplexities from the summed losses of all targets, in nats."""
        loss = summed_loss / (self.tokens - 1)
        exponents = loss, summed_loss / self.original_tokens, summed_loss / (self.original_tokens - 1)
        return Perplexities(loss, *(exp(min(x, 700.0)) for x in exponents))    # exp(710) is infinite

    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        found, t, t_o = self.perplexities(total), self.tokens, self.original_tokens
        return (f"perplexity {found.perplexity:.4f}, for each of T_o = {t_o:,} words\n"
                f"perplexity {found.token_perplexity:.4f}, for each of T = {t:,} tokens: a loss of {found.loss:.4f} "
                f"nats\nperplexity {found.adjusted_perplexity:.4f}, as Megatron's program has it (T_o - 1)"
                ), found._asdict() | {"tokens": t, "original_tokens": t_o}


def original_tokens(text: str) -> int:
    """Count T_o, the words between blanks, ends of lines included. WikiText-103's test file has 245,566."""
    return len(text.strip().split(" "))


def detokenize(text: str) -> str:
    """Return the text as people write it: 'a well @-@ known word ( it was )' -> 'a well-known word (it was)'.

    With it the test file has T = 270,329 of GPT-2's tokens.
    """
    for old, new in BEFORE_PAIRS.items():
        text = text.replace(old, new)
    for left, right in PAIRS:
        text = remove_inner_blanks(text, left, right)
    for old, new in AFTER_PAIRS.items():
        text = text.replace(old, new)
    return text


def remove_inner_blanks(text: str, left: str, right: str) -> str:
    """Remove blanks inside brackets: '( it was )' -> '(it was)'."""
    inside = f"{re.escape(left)}([^{re.escape(right)}]*){re.escape(right)}"
    return re.sub(inside, lambda found: left + found[1].strip() + right, text)


def check_windows(seq_length: int, overlapping_eval: int) -> None:
    if not 1 <= overlapping_eval <= seq_length:
        raise UserError(f"--overlapping-eval is {overlapping_eval}, but must be from 1 to --seq-length, which is "
                        f"{seq_length}: the window moves by this many tokens, and has to contain all of them.")


def windows(stream: np.ndarray, seq_length: int, overlapping_eval: int) -> list[Excerpt]:
    """Return windows of s + 1 tokens of int64 [T]; the first scores all of its targets, the others their last o.

    The paper's "overlap" o is the step of the window: every target has at least s - o tokens of context from the window
    before. A small o makes the perplexity better and the work s / o times larger.
    """
    s, o = seq_length, overlapping_eval
    excerpts = []
    for start in range(0, max(len(stream) - 1 - s, 0) + o, o):
        tokens = stream[start:start + s + 1]                  # the last may be shorter
        seen = s - o if start else 0                          # targets of the windows before
        excerpts.append(Excerpt(tokens, len(tokens) - 1 - seen))
    return excerpts
