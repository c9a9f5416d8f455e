"""Sentences: nothing is lost, and they end where a reader would say, most of the time."""
import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.sentences import split_sentences

WORDS = st.sampled_from(["Dr.", "p.", "5", "word", "Word", "end.", "End?", '"Quoted!"', "(x.)", "U.S.", "...", "é", "É",
                         "a" * 55, "# x", "\x1c", "\x85"])
GAPS = st.sampled_from([" ", "  ", "\n", " \n", "\n    ", "\r\n", "\n\n", "\n \n", "\t"])
TEXTS = st.lists(WORDS | GAPS).map("".join) | st.text() | st.text(" \nAa.\"!?")


@given(TEXTS)
def test_nothing_but_white_space_is_lost(text):
    """The sentences stand in the text one after another, as they are, with white space between."""
    rest = text
    for sentence in split_sentences(text):
        between, rest = rest[:rest.index(sentence)], rest[rest.index(sentence) + len(sentence):]
        assert not between.strip() and sentence and sentence == sentence.strip()
    assert not rest.strip()


@given(TEXTS, TEXTS, st.sampled_from(["\n\n", "\n \n", "\r\n\r\n"]))
def test_a_blank_line_always_ends_a_sentence(one, other, blank):
    """So the sentences of two paragraphs are those of the one and those of the other."""
    assert split_sentences(one + blank + other) == split_sentences(one) + split_sentences(other)


WRAPPED = """\
The first line of this paragraph was wrapped here,
and this one went on. A new sentence begins within the
3rd line, and it is over after "the fourth line."
Then comes the last."""

PROSE = [
    ["One.", "Two?", "Three!", "4 follows."],
    ['"Really?"', "She left (in a hurry.)", "“No.”", "«Si!»", "[Yes.]", "What?!", "Well...", "Er."],
    ["Dr. Smith and Mrs. J. R. Jones met Prof. X. Y. Lee vs. Sen. Bob in the U.S. Army in Jan. 1999.", "So it was."],
    ["See p. 5, Fig. 3 and No. 7, e.g. Bob, i.e. Jim.", "He said no.", "It is 3.14 at www.example.com or so."],
    ["This ends. without a capital letter, and so ... does this.", "Éclair.", "中 begins one."],
    ["Was it plan B?", "Or Apple Inc!", "It was."],
]


@pytest.mark.parametrize("sentences", PROSE)
def test_prose_is_parted_as_a_reader_would(sentences):
    """On one line, and over lines that were not wrapped."""
    for gap in " ", "  ", "\n", "\n  ":
        assert split_sentences(gap.join(sentences)) == sentences


def test_wrapped_prose_goes_on():
    """But only where its lines begin at one column, are long enough, and no longer than anybody wraps."""
    sentences = ["The first line of this paragraph was wrapped here,\nand this one went on.",
                 'A new sentence begins within the\n3rd line, and it is over after "the fourth line."',
                 "Then comes the last."]
    assert split_sentences(WRAPPED) == sentences
    indented = WRAPPED.replace("\n", "\n    ")
    assert split_sentences("    " + indented) == [sentence.replace("\n", "\n    ") for sentence in sentences]
    assert len(split_sentences(indented)) == 4                          # its first line stands out
    for length, count in ((49, 2), (50, 1), (100, 1), (101, 2)):
        assert len(split_sentences("a" * length + "\nb")) == count
    assert len(split_sentences("a" * 100 + "  \nb")) == 1 and len(split_sentences("a" * 49 + "  \nb")) == 2
    assert len(split_sentences("a" * 60 + "\n- an item\n* another")) == 3
    assert len(split_sentences(" " + "a" * 60 + "\n\nb")) == 2


def test_a_line_of_code_is_a_sentence():
    """Indented or not."""
    lines = ["def f(x):", "    if x.y and not z:", "        return x[0]", "    return None", "# A comment.", "a = 1"]
    assert split_sentences("\n".join(lines)) == [line.strip() for line in lines]


@pytest.mark.parametrize("text", [".", " ", "\n", ". ", "a", "'", ".'", "A. ", " \n", "a" * 60 + "\n", "Mr. "])
def test_the_time_it_takes_grows_with_the_text_and_no_faster(text):
    """Were it tried again from each character, this would take hours."""
    n = 100_000 // len(text)
    sentences = split_sentences(text * n)
    assert "".join("".join(sentences).split()) == "".join((text * n).split())
