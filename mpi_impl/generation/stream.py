"""Words as text, written as they come."""
from collections.abc import Callable

from mpi_impl.data.tokenizer import Tokenizer

CUT_OFF = "\N{REPLACEMENT CHARACTER}"     # what a tokenizer makes of bytes that are no character, or not yet


class Stream:
    """Writes the text of its tokens, each character as soon as it is whole: a token may end within one."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]):
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []     # those that the next text depends on
        self.written = 0                # characters of theirs

    def add(self, *tokens: int) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens)
        self.write_up_to(text.rstrip(CUT_OFF))
        if not text.endswith(CUT_OFF):      # of what is whole the last token is kept: a blank may depend on it
            self.tokens = self.tokens[-1:]
            self.written = len(self.tokenizer.decode(self.tokens))

    def end(self) -> None:
        """No token follows, so that what is not whole will not become so."""
        self.write_up_to(self.tokenizer.decode(self.tokens))

    def write_up_to(self, text: str) -> None:
        if len(text) > self.written:
            self.write(text[self.written:])
            self.written = len(text)
