"""A writer of a text as its tokens come, until a token or a stop word ends it."""
from collections.abc import Callable, Sequence
from os.path import commonprefix

from mpi_impl.data.tokenizer import LibraryTokenizer, Tokenizer

CUT_OFF = "\N{REPLACEMENT CHARACTER}"     # a tokenizer's text for bytes that are no character, or not yet
RECENT = 16                               # tokens, at least, with which the next ones are decoded


class Stream:
    """A writer of the text of tokens.

    It has written the text of all its tokens as the tokenizer decodes them together, up to the first of `stops` in the
    generated part. It writes each character as soon as no later token can change it: a token may end
    within a character, and where characters fall back to bytes, one bad byte makes all those before it unreadable.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object], ends: Sequence[int] = (),
                 stops: Sequence[str] = ()):
        self.tokenizer, self.write, self.ends, self.stops = tokenizer, write, ends, stops
        self.tokens: list[int] = []     # the last tokens, on which the next text depends
        self.taken = 0                  # characters of their text that no later token can change
        self.held = ""                  # generated text that may be the beginning of a stop word
        self.ended = False
        library = tokenizer.library if isinstance(tokenizer, LibraryTokenizer) else None
        self.bad_byte = library and library.token_to_id("<0xFF>")       # makes bytes before it unreadable, too

    def begin(self, prompt: Sequence[int]) -> None:
        """Write the prompt, which no stop word ends."""
        self.tokens += prompt
        self.write(self.new_text())

    def add(self, token: int) -> None:
        """Write the text of one more token, unless it ends the text: then write the rest."""
        if token in self.ends:
            self.end()
        else:
            self.tokens.append(token)
            self.pass_on(self.new_text())

    def end(self) -> None:
        """Write the rest: no token follows that could complete a character, or a stop word."""
        if not self.ended:
            self.pass_on(self.tokenizer.decode(self.tokens)[self.taken:])
            self.write("" if self.ended else self.held)
        self.ended = True

    def new_text(self) -> str:
        """Return the text that has become certain, and forget tokens on which nothing depends any longer."""
        text, taken = self.tokenizer.decode(self.tokens), self.taken
        certain = text.rstrip(CUT_OFF)
        if self.bad_byte is not None:
            certain = commonprefix([certain, self.tokenizer.decode([*self.tokens, self.bad_byte])])
        self.taken = len(certain)
        if certain == text and len(self.tokens) > 2 * RECENT:
            recent = self.tokens[-RECENT:]
            kept = self.tokenizer.decode(recent)
            if kept and text.endswith(kept):    # they have a text, and do not begin within a character
                self.tokens, self.taken = recent, len(kept)
        return certain[taken:]

    def pass_on(self, text: str) -> None:
        """Write generated text up to the stop word that ends first, or as far as none can begin in it."""
        text = self.held + text
        places = [(place + len(stop), place) for stop in self.stops if (place := text.find(stop)) >= 0]
        held = max(map(len, self.stops), default=1) - 1
        end = min(places)[1] if places else max(0, len(text) - held)
        self.write(text[:end])
        self.held, self.ended = text[end:], bool(places)
