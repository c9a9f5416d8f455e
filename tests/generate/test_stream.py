"""A text that is written as it comes: nothing is lost, and no character is written before it is whole."""
from hypothesis import example, given, strategies as st

from mpi_impl.data.tokenizer import BertWordPieceLowerCase, ByteLevelBPETokenizer, NullTokenizer
from mpi_impl.generate.stream import Stream

TEXTS = ["the cat sat on the mat. " * 20, "Grüße aus Köln, 東京 und 🙂! " * 20]
BYTES = ByteLevelBPETokenizer.train(TEXTS, 270)      # so small that most characters beyond ASCII are several tokens
WORDS = BertWordPieceLowerCase.train(TEXTS, 120)


def text_after_each_token(tokenizer, tokens, first=0):
    """Return the text written at first, after each token, and at the end."""
    said: list[str] = []
    stream = Stream(tokenizer, said.append)
    stream.add(*tokens[:first])
    states = ["".join(said)]
    for token in tokens[first:]:
        stream.add(token)
        states.append("".join(said))
    stream.end()
    return [*states, "".join(said)]


@given(st.text(max_size=12), st.integers(0, 5))
@example("a🙂東", 0)
def test_characters_are_written_when_they_are_whole(text, first):
    """All of those that the tokens so far make up, and no byte of another."""
    tokens = BYTES.encode(text)
    for n, so_far in enumerate(text_after_each_token(BYTES, tokens, first)[:-1], min(first, len(tokens))):
        whole = b"".join(BYTES_OF[token] for token in tokens[:n]).decode("utf-8", "ignore")
        assert so_far == whole.rstrip("\ufffd")
    assert text_after_each_token(BYTES, tokens)[-1] == text


@given(st.sampled_from([BYTES, WORDS, NullTokenizer(30)]), st.data())
def test_any_tokens_come_out_as_they_are_decoded(tokenizer, data):
    """Those that make no text too; what was written is never taken back."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=15))
    states = text_after_each_token(tokenizer, tokens)
    assert states[-1] == tokenizer.decode(tokens)
    assert all(later.startswith(before) for before, later in zip(states, states[1:]))


def bytes_of(token: int) -> bytes:
    """Return a token's bytes, from its name, in which each byte has a printable character."""
    pieces = BYTES.library.id_to_token(token)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]          # GPT-2's names of bytes
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(names[character] for character in pieces)


BYTES_OF = {token: bytes_of(token) for token in range(BYTES.vocab_size) if token != BYTES.eod}
