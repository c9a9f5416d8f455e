"""Text from a GPT, one token after another: the model gives each token a probability, and one is drawn.

Three ways to exclude unlikely tokens, which may be combined, are applied in this order:

    temperature   logits are divided by it: below 1 likely tokens become likelier; 0 takes the likeliest one
    top-k         only the k likeliest tokens may be drawn (Fan et al. 2018, section 5.4)
    top-p         only the nucleus may: the smallest set of tokens whose probability reaches p (Holtzman et al. 2020,
                  section 3.1), among those that top-k allows

A draw is a function of the logits, the seed, the text's number and the token's position: so a text is the same on any
number of ranks, as far as the logits are.
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
    """Parameters for the choice of the next token. Raises UserError for values outside their ranges."""

    temperature: float = 1.0
    top_k: int | None = None     # None: all tokens
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self):
        require_not_negative("temperature", self.temperature)
        if self.top_k is not None:
            require_positive("top_k", self.top_k)
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, but must be above 0 and at most 1: it is the probability that "
                            "all tokens in the nucleus together.")

    def choose(self, logits, position: int, text: int = 0) -> int:
        """Draw the token at this position of the text with this number from logits [V]."""
        draw = counter_rng.uniform(counter_rng.key(self.seed, "sampling", text), np.array([position], np.uint64))
        return next_token(logits, draw[0], self.temperature, self.top_k, self.top_p)


def next_token(logits, draw: float, temperature=1.0, top_k=None, top_p=1.0) -> int:
    """Map logits [V] and a number `draw` in (0, 1) to a token. The lowest id wins ties.

    It is the token at which the cumulative probability, in the order of ids, reaches `draw`. (In the order of
    probability, two almost equally likely tokens could change places by rounding, and with them a share of all draws.)
    """
    if temperature == 0:
        return int(np.argmax(logits))
    logits = logits.astype(np.float64)
    with np.errstate(over="ignore"):         # far below the maximum: exp(-infinity) is 0
        probs = softmax((logits - logits.max()) / temperature)
    sums = np.cumsum(np.where(allowed_tokens(probs, top_k, top_p), probs, 0))
    return int(np.searchsorted(sums, draw * sums[-1]))


def allowed_tokens(probs, top_k=None, top_p=1.0):
    """Return the tokens that may be drawn: probs [V] -> bool [V]."""
    if top_k is None and top_p == 1:
        return np.ones_like(probs, dtype=bool)
    order = np.argsort(-probs, kind="stable")[:top_k]      # the likeliest first; the lowest id wins ties
    if top_p < 1:
        sums = np.cumsum(probs[order])
        order = order[:np.searchsorted(sums, top_p * sums[-1]) + 1]
    found = np.zeros_like(probs, dtype=bool)
    found[order] = True
    return found


# ---- one token after another ----------------------------------------------------------------------------------------


def generate(prompt, count, p, c, sampling, text=0):
    """Return `count` tokens that follow the prompt, both lists of ids: p is a whole GPT, c its ModelConfig."""
    kv_cache = empty_kv_cache(c, p.blocks, positions_for(prompt, count, c), p.embedding.word)

    def follow(tokens, position):
        return sampling.choose(next_logits(np.array([tokens]), p, c, kv_cache)[0], position, text)

    return list(continuation(prompt, count, c.max_position_embeddings, kv_cache, follow))


def positions_for(prompt, count, c):
    """Return the number of positions to cache: the last token's keys and values are never read."""
    return min(len(prompt) + count - 1, c.max_position_embeddings)


def continuation(prompt, count, longest, kv_cache, follow):
    """Yield `count` tokens after the prompt. `follow(tokens, position)` returns the token at this position.

    Its `tokens` are the earlier ones that `kv_cache`, which has room for `longest` positions, has not seen. When no
    position is left, the last half of the tokens are read anew, from position 0, and so on: keys depend on their
    positions, and cannot be moved.
    """
    text, new, seen = list(prompt), list(prompt), 0
    for position in range(len(prompt), len(prompt) + count):
        if seen + len(new) > longest:
            forget(kv_cache)
            new, seen = text[-max(1, longest // 2):], 0
        token = follow(new, position)
        text.append(token)
        new, seen = [token], seen + len(new)
        yield token
