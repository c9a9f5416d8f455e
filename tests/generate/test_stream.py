"""A text that is written as it comes: nothing is lost, nothing is taken back, and a stop word ends it."""
from functools import cache

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer as Library, decoders, models, pre_tokenizers

from mpi_impl.data.tokenizer import BertWordPieceLowerCase, ByteLevelBPETokenizer, NullTokenizer
from shardlab.generate.stream import Stream
from tests.generate.test_saved_tokenizer import a_models

TEXTS = ["the cat sat on the mat. " * 20, "Grüße aus Köln, 東京 und 🙂! don't \N{REPLACEMENT CHARACTER}" * 20]
BYTES = ByteLevelBPETokenizer.train(TEXTS, 270)      # so small that most characters beyond ASCII are several tokens
TOKENIZERS = {
    "byte level": lambda: BYTES, "word pieces": lambda: BertWordPieceLowerCase.train(TEXTS, 120),
    "numbers": lambda: NullTokenizer(30), "a model's byte level": lambda: a_models(BYTES.library, 300),
    "bytes as a fallback": lambda: a_models(library_of(
        [*"▁abcehtu", *(f"<0x{i:02X}>" for i in range(256))], pre_tokenizers.Metaspace(split=False),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                           decoders.Strip(" ", 1, 0)]), byte_fallback=True), 270, "a"),
    "ends of words": lambda: a_models(library_of(["a", "b</w>", "</w>"], pre_tokenizers.Whitespace(),
                                                 decoders.BPEDecoder(), end_of_word_suffix="</w>"), 9, "a")}


def library_of(tokens, pre_tokenizer, decoder, **options) -> Library:
    library = Library(models.BPE({token: i for i, token in enumerate(tokens)}, [], **options))
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoder
    return library


@cache
def made(kind: str):
    return TOKENIZERS[kind]()


def text_after_each_token(tokenizer, tokens, first=0, **ends):
    """Return the text written at first, after each token, and at the end."""
    said: list[str] = []
    stream = Stream(tokenizer, said.append, **ends)
    stream.begin(tokens[:first])
    states = ["".join(said)]
    for token in tokens[first:]:
        if not stream.ended:
            stream.add(token)
        states.append("".join(said))
    stream.end()
    return [*states, "".join(said)]


def random_ids(tokenizer, data):
    """Draw ids: any, once or so often that what stands before is forgotten, or of text, as bytes that are several."""
    ids = st.builds(lambda i, n: [i] * n, st.integers(0, tokenizer.vocab_size - 1), st.sampled_from([1, 1, 40]))
    pieces = ids if isinstance(tokenizer, NullTokenizer) else ids | st.text(max_size=2).map(tokenizer.encode)
    return sum(data.draw(st.lists(pieces, max_size=12)), [])


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_streamed_text_is_the_text_decoded_whole(kind, data):
    """Whatever the tokens, those that make no text too; and each character is written as soon as it is whole, unless
    a bad byte may follow. The first tokens of a long text are forgotten while it is written.
    """
    tokenizer = made(kind)
    tokens, first = random_ids(tokenizer, data), data.draw(st.integers(0, 3), "prompt")
    states = text_after_each_token(tokenizer, tokens, first)
    assert states[-1] == tokenizer.decode(tokens)
    for n, text in enumerate(states[:-1], min(first, len(tokens))):
        whole = tokenizer.decode(tokens[:n]).rstrip("\ufffd")
        assert whole.startswith(text) if kind == "bytes as a fallback" else whole == text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_is_decoded_in_parts(kind):
    """The work for a token does not grow with the text, unless the text is one character that never ends."""
    stream = Stream(made(kind), len)
    for token in ([3, 4, 5, 3] if kind == "numbers" else made(kind).encode("ab the cat ")) * 50:
        stream.add(token)
        assert len(stream.tokens) <= 64


@pytest.mark.parametrize("before", range(16))
def test_a_text_is_not_forgotten_within_a_character(before):
    """Tokens without a text follow it, so that the last ones that are kept may begin at any of its bytes."""
    tokenizer = made("a model's byte level")
    tokens = [*tokenizer.encode("a") * before, *tokenizer.encode("\U00010000" * 3), *[270] * 40]
    assert text_after_each_token(tokenizer, tokens)[-1] == tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_a_stop_word_ends_a_text_which_does_not_contain_it(kind, data):
    """The text is what stands before the stop word that is complete first, as if it came letter by letter."""
    tokenizer = made(kind)
    tokens = random_ids(tokenizer, data)
    text = expected = tokenizer.decode(tokens)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 4))
    stops = [text[i:i + n] or "a" for i, n in data.draw(st.lists(places, min_size=1, max_size=3), "stops")]
    for n in range(len(text)):
        if text[:n + 1].endswith(tuple(stops)):
            expected = min((text[:n + 1].removesuffix(stop) for stop in stops), key=len)
            break
    assert text_after_each_token(tokenizer, tokens, stops=stops)[-1] == expected


@given(st.lists(st.integers(0, 9), max_size=9), st.sets(st.integers(0, 9), max_size=4), st.integers(0, 2))
def test_any_of_the_tokens_that_end_a_text_ends_it(tokens, ends, first):
    """The text is what stands before it; the prompt's tokens and words end nothing."""
    n = next((i for i, token in enumerate(tokens) if i >= first and token in ends), len(tokens))
    text = NullTokenizer(30).decode(tokens[:n])
    assert text_after_each_token(NullTokenizer(30), tokens, first, ends=ends)[-1] == text
    assert text_after_each_token(NullTokenizer(30), tokens[:n], n, ends=ends, stops=["1"])[-1] == text
