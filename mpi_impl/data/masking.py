"""The choice of the tokens that BERT predicts, and their replacements in its input.

Whole words are masked, with all of their pieces, and n-grams of one to three words: n with a weight of 1 / n. Then each
token on its own is replaced: in 80 % of the cases by [MASK], in 10 % by any token of the vocabulary, and in 10 % by
itself, since a model that only knew [MASK] could say nothing about text without it. Sources: Devlin et al. 2019,
section 3.1; for n-grams Lan et al. 2020, section 4.1; and the order of it all, Megatron's create_masked_lm_predictions.
"""
from collections.abc import Callable

import numpy as np

from mpi_impl.data.tokenizer import WordPieceTokenizer

WEIGHTS = 1 / np.arange(1, 4)                       # of n-grams of 1, 2, 3 words
BOUNDS = np.cumsum(WEIGHTS / WEIGHTS.sum())[:-1]    # divide the numbers from 0 to 1 in these proportions

Uniform = Callable[[str, np.ndarray], np.ndarray]   # (purpose, index) -> numbers between 0 and 1


def choose_positions(begins, text, budgets, uniform: Uniform, index) -> np.ndarray:
    """Choose the positions to predict: bool [b, s].

        begins   bool [b, s]     whether a word begins here
        text     bool [b, s]     whether this is text; special tokens belong to no word
        budgets  int64 [b]       the largest number of tokens to mask in each sample
        index    int64 [b, s]    of the random numbers for each position

    The words of a sample take turns in random order. On its turn a word is the first of an n-gram, which is shortened
    until it fits into the rest of the budget and the sample. All of its words are masked, if none of them is yet. An
    n-gram may go on in B after A's last word. Some of the budget may be left over, if words are few or long.
    """
    rows = np.nonzero(begins)[0]                                      # [words]: the sample of each
    word = np.cumsum(begins).reshape(begins.shape) - 1                # [b, s]: the word at each position of the text
    ends = np.cumsum(np.bincount(word[text], minlength=len(rows)))    # [words]: text tokens up to the end of each
    lengths = 1 + np.searchsorted(BOUNDS, uniform("n-gram", index[begins]))
    order = np.lexsort((uniform("turn", index[begins]), rows))        # sample by sample
    bounds = np.searchsorted(rows, np.arange(len(begins) + 1)).tolist()
    tokens_before, turns, lengths = [0, *ends.tolist()], order.tolist(), lengths.tolist()
    masked = bytearray(len(rows) + 1)                                 # the last is for positions before any word
    for first, stop, budget in zip(bounds, bounds[1:], budgets.tolist()):
        mask_words(masked, turns[first:stop], lengths, tokens_before, stop, budget)
    return np.frombuffer(masked, bool)[word] & text


def mask_words(masked: bytearray, turns: list[int], lengths: list[int], tokens_before: list[int], stop: int,
               budget: int) -> None:
    """Mask words of one sample, which ends before word `stop`; lists and `masked` cover all words of the batch."""
    for word in turns:
        if budget == 0:
            break
        n = min(lengths[word], stop - word)
        while tokens_before[word + n] - tokens_before[word] > budget:
            n -= 1
        if not any(masked[word:word + n]):
            masked[word:word + n] = bytes([1]) * n
            budget -= tokens_before[word + n] - tokens_before[word]


def replace_masked(tokens, masked, tokenizer: WordPieceTokenizer, uniform: Uniform, index) -> np.ndarray:
    """Return the model's input: int64 [b, s], the tokens with the masked ones replaced."""
    chance = uniform("replace", index[masked])
    some_token = (uniform("token", index[masked]) * tokenizer.vocab_size).astype(np.int64)
    seen = tokens.copy()
    seen[masked] = np.where(chance < 0.8, tokenizer.mask, np.where(chance < 0.9, some_token, tokens[masked]))
    return seen
