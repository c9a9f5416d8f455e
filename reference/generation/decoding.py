"""Text from a GPT, one word after another: the model says how likely each word is to come next, and one is drawn.

Three ways to keep unlikely words out, which may be combined, in this order:

    temperature   logits are divided by it: below 1 the likely words become likelier; at 0 the likeliest one is taken
    top-k         only the k likeliest words may come (Fan et al. 2018, section 5.4)
    top-p         only the nucleus may: the smallest set of words whose probability reaches p (Holtzman et al. 2020,
                  section 3.1); of those that top-k has left

What is drawn is a function of the logits, the seed, the text's number and the word's position: so a text is the same
on any number of ranks, as far as the logits are.
"""
from dataclasses import dataclass

import numpy as np

from reference import counter_rng
from reference.config import require_not_negative, require_positive
from reference.errors import UserError
from reference.kv_cache import empty_kv_cache, forget
from reference.models.gpt import next_logits
from reference.ops import softmax


@dataclass(frozen=True)
class Sampling:
    """How the next word is chosen. Raises UserError for what is no way to choose."""

    temperature: float = 1.0
    top_k: int | None = None     # None: all words
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self):
        require_not_negative("temperature", self.temperature)
        if self.top_k is not None:
            require_positive("top_k", self.top_k)
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, but must be above 0 and at most 1: it is the probability that "
                            "the words among which one is drawn have together.")

    def choose(self, logits, position: int, text: int = 0) -> int:
        """From logits [V] the word at this position of the text with this number."""
        draw = counter_rng.uniform(counter_rng.key(self.seed, "sampling", text), np.array([position], np.uint64))
        return next_word(logits, draw[0], self.temperature, self.top_k, self.top_p)


def next_word(logits, draw: float, temperature=1.0, top_k=None, top_p=1.0) -> int:
    """logits [V], a number `draw` in (0, 1) -> a word. Of words that are equally likely the one with the lowest id.

    It is where the sum of probabilities, in the order of ids, comes to `draw`. (In the order of size, two words that
    are almost equally likely could change places by rounding, and with them a share of all draws.)
    """
    if temperature == 0:
        return int(np.argmax(logits))
    logits = logits.astype(np.float64)
    with np.errstate(over="ignore"):         # far below the likeliest: exp(-infinity) is 0
        probs = softmax((logits - logits.max()) / temperature)
    sums = np.cumsum(np.where(allowed(probs, top_k, top_p), probs, 0))
    return int(np.searchsorted(sums, draw * sums[-1]))


def allowed(probs, top_k=None, top_p=1.0):
    """Which words may come: probs [V] -> bool [V]."""
    if top_k is None and top_p == 1:
        return np.ones_like(probs, dtype=bool)
    order = np.argsort(-probs, kind="stable")[:top_k]      # the likeliest first; of equals, that of the lowest id
    if top_p < 1:
        sums = np.cumsum(probs[order])
        order = order[:np.searchsorted(sums, top_p * sums[-1]) + 1]
    found = np.zeros_like(probs, dtype=bool)
    found[order] = True
    return found


# ---- one word after another -----------------------------------------------------------------------------------------


def generate(prompt, count, p, c, sampling, text=0):
    """`count` words that follow the prompt, both lists of ids: p is a whole GPT, c its ModelConfig."""
    kv_cache = empty_kv_cache(c, p.blocks, positions_for(prompt, count, c), p.embedding.word)

    def follow(words, position):
        return sampling.choose(next_logits(np.array([words]), p, c, kv_cache)[0], position, text)

    return list(continuation(prompt, count, c.max_position_embeddings, kv_cache, follow))


def positions_for(prompt, count, c):
    """For how many positions keys and values are kept: the last word's are of use to no one."""
    return min(len(prompt) + count - 1, c.max_position_embeddings)


def continuation(prompt, count, longest, kv_cache, follow):
    """Yields the words after the prompt, `count` of them. `follow(words, position)` -> the word at this position, where
    `words` are those before it that `kv_cache`, which has room for `longest` positions, has not seen.

    When there is no position left, the last half of the words are read anew, from position 0, and so on: keys know
    where they are, and could not be moved.
    """
    text, new, seen = list(prompt), list(prompt), 0
    for position in range(len(prompt), len(prompt) + count):
        if seen + len(new) > longest:
            forget(kv_cache)
            new, seen = text[-max(1, longest // 2):], 0
        word = follow(new, position)
        text.append(word)
        new, seen = [word], seen + len(new)
        yield word
