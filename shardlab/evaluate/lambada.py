"""LAMBADA: the accuracy of a GPT on the last word of a passage, which cannot be guessed from its last sentence alone
(Paperno et al. 2016).

The strict form, as Megatron's `--strict-lambada`: all tokens of the last word must be the model's first choice, each
after the passage and the word's own tokens before it ("teacher forcing"). Greedy decoding would write the word then,
and only then: up to the first wrong token the two see the same text. The word's tokens are those that the passage has
more than the passage without its last word; the blank before the word is theirs.
"""
from typing import TypedDict

import numpy as np

from mpi_impl.data.tokenizer import Tokenizer
from reference.errors import UserError
from shardlab.evaluate.files import parse, read_text
from shardlab.evaluate.scored import Excerpt, ScoredDataset

WANTED = "LAMBADA's lambada_test.jsonl"
LIKE = '{"text": "a passage"}'


class Passage(TypedDict):
    """A line of the file."""

    text: str


class LAMBADA(ScoredDataset):
    """The passages of JSON lines, each with its last word as the target.

    A passage of more than s + 1 tokens loses its beginning. Raises UserError, with the number of the line, for a line
    that is not a passage.
    """

    name = "passages"

    def __init__(self, data_path: str, tokenizer: Tokenizer, seq_length: int):
        excerpts = []
        for number, line in enumerate(read_text(data_path, WANTED).split("\n"), start=1):
            if line.strip():
                where = f"{data_path}, line {number},"
                excerpts.append(excerpt(parse(line, Passage, where, LIKE)["text"], tokenizer, seq_length, where))
        super().__init__(excerpts, seq_length, tokenizer.eod)

    def measures(self, total: float) -> tuple[str, dict[str, float]]:
        right, n = round(total), self.samples("test")
        return (f"accuracy {right / n:.2%}: of {n:,} last words {right:,} are right",
                {"accuracy": right / n, "right": right, "samples": n})


def excerpt(text: str, tokenizer: Tokenizer, seq_length: int, where: str) -> Excerpt:
    """Return the last tokens of a passage that fit, with the number of those of its last word."""
    words = text.rsplit(maxsplit=1)
    if len(words) < 2:
        raise UserError(f"{where} has fewer than two words, so the last one has no context. Correct the line.")
    context, word = words
    context_tokens, tokens = tokenizer.encode(context.strip()), tokenizer.encode(f"{context.strip()} {word}")
    asked = max(1, len(tokens) - len(context_tokens))
    if asked > seq_length:
        raise UserError(f"{where} ends with a word of {asked} tokens, but --seq-length is {seq_length}. Give at "
                        f"least {asked}.")
    return Excerpt(np.array([*tokenizer.prefix, *tokens][-seq_length - 1:], np.int64), asked)


def words_right(correct, weights):
    """Count the samples that are right: `correct` [n, s] is whether the target is the model's first choice.

    The weights [n, s] are the batch's. A sample that only fills the batch has no targets, and does not count as right.
    """
    return ((correct | (weights == 0)).all(1) & (weights != 0).any(1)).sum()
