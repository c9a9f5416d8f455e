"""WikiText-103: each token is asked for once, with the context that its window gives it."""
from math import ceil, exp

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.errors import UserError
from shardlab.evaluate.scored import ScoredBatch
from shardlab.evaluate.wikitext103 import WikiText103, detokenize
from tests.evaluate.little_gpt import LittleGPT, Words, batches

WORDS = ["the", "a", "boat", "@-@", "@.@", ",", ".", "<unk>", "(", ")", "'s", "= ="]


@st.composite
def files(draw):
    """Draw a text in the file's format: a heading, then lines."""
    lines = draw(st.lists(st.lists(st.sampled_from(WORDS), max_size=8), max_size=4))
    return "".join([" \n", " = A boat = \n", *(f" {' '.join(line)} \n" for line in lines)])


@st.composite
def evaluations(draw, path):
    """Draw a file's text, the data set read from it, and the sizes; the window moves by 1 token up to all of them."""
    text, s = draw(files()), draw(st.integers(1, 9))
    path.write_text(text, "utf-8", newline="")
    o, words = draw(st.integers(1, s)), Words()
    return text, WikiText103(str(path), words, s, o), words, s, o


@given(st.data())
def test_the_loss_is_that_of_each_token_in_its_window_once(tmp_path, data):
    """Target by target, in order, as a model says that is given nothing but the context; so is each perplexity."""
    text, dataset, words, s, o = data.draw(evaluations(tmp_path / "wiki.test.tokens"))
    stream = words.encode(detokenize(text))
    gpt = LittleGPT(len(words.ids), s, data.draw(st.integers(0, 99)))
    expected = []
    for j in range(1, len(stream)):
        start = max(ceil((j - s) / o), 0) * o                 # of the first window with this target
        expected.append(-gpt.log_probabilities(stream[start:j])[stream[j]])

    found, total = [], 0.0
    for batch in batches(dataset, ScoredBatch, "test", data.draw(st.integers(1, 4), "batch")):
        losses = gpt.losses(batch)
        found += list(losses[batch.weights == 1])
        total += (losses * batch.weights).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-10)

    total_o = len(text.strip().split(" "))
    perplexities = dataset.perplexities(total)
    assert np.isfinite(dataset.perplexities(1e9)).all()
    np.testing.assert_allclose(perplexities, [
        sum(expected) / len(expected), exp(sum(expected) / len(expected)), exp(sum(expected) / total_o),
        exp(sum(expected) / (total_o - 1))], rtol=1e-10)


@pytest.mark.parametrize(("text", "plain"), [
    (" = Heading = \n \n = = Lower = = \n = = = Lowest = = = \n", " = Heading =\n\n== Lower ==\n=== Lowest ===\n"),
    ("a well @-@ known 3 @.@ 5 of 1 @,@ 000", "a well-known 3.5 of 1,000"),
    ("so : he , she ; it . What ? No ! Yes", "so: he, she; it. What? No! Yes"),
    ("it ( was ( a ) [ note ] and { set }", "it (was ( a) [note] and {set}"),
    ('he said " it is " , and \' it is \' . \n', 'he said "it is", and \'it is\'.\n'),
    ("the boat 's <unk> at 52 ° N today", "the boat's <unk> at 52°N today"), ("the boats ' crew", "the boats' crew"),
    ("N or N or N", "N or 1 or N"),
    (' an odd " quotation \n \n goes on " here', ' an odd "quotation\n\ngoes on" here'),
])
def test_the_detokenizer_writes_as_people_do(text, plain):
    """What WikiText's own cutting into words has done is undone; oddities are as Megatron has them."""
    assert detokenize(text) == plain


class OneToken(Words):
    def encode(self, text):
        return [1]


@pytest.mark.parametrize("content, words, o, said", [
    (None, Words, 4, "no such file"), (b" \n \n", Words, 4, "is empty"), (b"\xff\xfe = A = \n", Words, 4, "not UTF-8"),
    (b"Some other text.\n", Words, 4, "has no heading"), (b" = A = \n", OneToken, 4, "1 token, but nothing"),
    (b" = A = \n", Words, 0, "--overlapping-eval is 0"), (b" = A = \n", Words, 9, "--overlapping-eval is 9")])
def test_other_files_and_windows_that_leave_out_tokens_are_refused(tmp_path, content, words, o, said):
    path = tmp_path / "wiki.test.tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        WikiText103(str(path), words(), 8, o)
