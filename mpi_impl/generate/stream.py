"""Tokens as text, written as they come."""
from collections.abc import Callable

from mpi_impl.data.tokenizer import Tokenizer

CUT_OFF = "\N{REPLACEMENT CHARACTER}"     # a tokenizer's text for bytes that are no character, or not yet


class Stream:
    """A writer of the text of tokens. It writes each character as soon as it is whole: a token may end within one."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]):
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []     # the tokens on which the next text depends
        self.written = 0                # their characters that are written

    def add(self, *tokens: int) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens)
        self.write_up_to(text.rstrip(CUT_OFF))
        if not text.endswith(CUT_OFF):      # keep the last whole token: a blank may depend on it
            self.tokens = self.tokens[-1:]
            self.written = len(self.tokenizer.decode(self.tokens))

    def end(self) -> None:
        """Write the rest: no token follows that could complete a character."""
        self.write_up_to(self.tokenizer.decode(self.tokens))

    def write_up_to(self, text: str) -> None:
        if len(text) > self.written:
            self.write(text[self.written:])
            self.written = len(text)
