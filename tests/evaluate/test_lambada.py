"""LAMBADA: a word is right where greedy decoding would write it."""
import json
from itertools import product

import pytest
from hypothesis import given, strategies as st

from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from reference.errors import UserError
from shardlab.evaluate.lambada import LAMBADA, words_right
from shardlab.evaluate.scored import ScoredBatch
from tests.evaluate.little_gpt import Letters, LittleGPT, batches

WORDS = ["".join(letters) for n in (1, 2) for letters in product("ab", repeat=n)]
CONTEXTS = st.lists(st.sampled_from([*WORDS, "aba"]), min_size=1, max_size=6).map(" ".join)


def written(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return str(path)


def accuracy(gpt, dataset, count):
    """Compute the accuracy as an evaluation does, from sums over batches."""
    right = 0
    for batch in batches(dataset, ScoredBatch, "test", count):
        right += words_right(gpt.logits(batch.tokens).argmax(-1) == batch.targets, batch.weights)
    return right / dataset.samples("test")


def decoded_right(gpt, context, word, s):
    """Report whether the model, given as much of the context as fits, writes the word greedily."""
    target = Letters().encode(" " + word)
    text = Letters().encode(context)
    text = text[max(len(text) + len(target) - s - 1, 0):]
    for token in target:
        if gpt.log_probabilities(text).argmax() != token:
            return False
        text.append(token)
    return True


@given(st.lists(CONTEXTS, min_size=1, max_size=3), st.integers(2, 9), st.integers(0, 99), st.integers(1, 7))
def test_accuracy_is_that_of_greedy_decoding(tmp_path, contexts, s, seed, count):
    """Words of one token and of two, every one of them after each context, so that some are right; long contexts."""
    gpt, passages = LittleGPT(5, s, seed), list(product(contexts, WORDS))
    path = written(tmp_path / "lambada.jsonl", [f"{context} {word}" for context, word in passages])
    expected = sum(decoded_right(gpt, context, word, s) for context, word in passages) / len(passages)
    assert accuracy(gpt, LAMBADA(path, Letters(), s), count) == expected


def test_a_word_is_encoded_with_the_blank_before_it(tmp_path):
    """So that its tokens are those that it has within a text. The same word earlier in the passage is context."""
    text = "the boat was the only boat and so he took the boat"
    bpe = ByteLevelBPETokenizer.train([text] * 5, 300)
    batch = ScoredBatch.unpack(LAMBADA(written(tmp_path / "lambada.jsonl", [text]), bpe, 64).batch("test", 0, 1))
    n = len(bpe.encode(text)) - 1
    assert [*batch.tokens[0, :1], *batch.targets[0, :n]] == bpe.encode(text)
    assert bpe.decode(batch.targets[0][batch.weights[0] == 1]) == " boat"


@pytest.mark.parametrize("line, said", [
    ("A passage.", "is not JSON"), ('{"passage": "a b"}', "`text`"),
    ('{"text": " a "}', "has fewer than two words"), ('{"text": "a abababab"}', "8 tokens, but --seq-length is 7")])
def test_a_bad_line_is_named_by_its_number(tmp_path, line, said):
    """Blank lines are skipped, and counted."""
    path = tmp_path / "lambada.jsonl"
    path.write_text(f'{{"text": "a b"}}\n\n{line}\n')
    with pytest.raises(UserError, match=f"lambada.jsonl, line 3,.* {said}"):
        LAMBADA(str(path), Letters(), 7)


def test_a_passage_begins_as_the_models_texts_do(tmp_path):
    """BOS is before it, but no part of the last word."""
    letters = Letters()
    letters.prefix = [3]
    excerpt, = LAMBADA(written(tmp_path / "test", ["a b ab"]), letters, 8).parts["test"]
    assert excerpt.tokens.tolist() == [3, *letters.encode("a b ab")] and excerpt.asked == 2
