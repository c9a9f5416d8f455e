"""Texts from a GPT, one token after another: the model gives each token a probability, and one is drawn.

Three ways to exclude unlikely tokens, which may be combined, are applied in this order:

    temperature   logits are divided by it: below 1 likely tokens become likelier; 0 takes the likeliest one
    top-k         only the k likeliest tokens may be drawn (Fan et al. 2018, section 5.4)
    top-p         only the nucleus may: the smallest set of tokens whose probability reaches p (Holtzman et al. 2020,
                  section 3.1), among those that top-k allows

A draw is a function of the logits, the seed, the text's number and the token's position: so a text is the same on any
number of ranks and in any batch, as far as the logits are.

Texts of a batch advance together, position by position, from the end of the shortest prompt: at each position a longer
prompt has its own token, and what is drawn there is not used (as in Megatron-LM). So nothing is padded, and each
weight is read once for all texts of the batch, not once for each.
"""
from dataclasses import dataclass

import numpy as np

from reference.config import require_not_negative, require_positive
from reference.errors import UserError
from reference.kv_cache import empty_kv_cache, forget
from reference.models.gpt import next_logits
from reference.ops import softmax
from reference.random import counter_rng


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
                            "all tokens in the nucleus together have.")

    def choose(self, logits, position: int, text: int = 0) -> int:
        """Draw the token at this position of the text with this number from logits [V]."""
        draw = counter_rng.uniform(counter_rng.key(self.seed, "sampling", text), np.array([position], np.uint64))
        return next_token(logits, draw[0], self.temperature, self.top_k, self.top_p)

    def choose_each(self, logits, position: int, first_text: int) -> list[int]:
        """Draw the token at this position of each text of a batch from logits [b, V]."""
        return [self.choose(each, position, text) for text, each in enumerate(logits, first_text)]


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


def generate(prompts, count, p, c, sampling, first_text=0):
    """Return the `count` tokens that follow each prompt, all lists of ids: p is a whole GPT, c its ModelConfig.

    The texts are numbered from `first_text`.
    """
    kv_cache = empty_kv_cache(c, p.blocks, positions_for(prompts, count, c), p.embedding.word, len(prompts))

    def follow(tokens, position):
        return sampling.choose_each(next_logits(np.array(tokens), p, c, kv_cache), position, first_text)

    found = zip(*continuation(prompts, count, c.max_position_embeddings, kv_cache, follow))
    return [[token for token in text if token is not None] for text in found]


def positions_for(prompts, count, c):
    """Return the number of positions to cache: the last token's keys and values are never read."""
    return min(max(map(len, prompts)) + count - 1, c.max_position_embeddings)


def continuation(prompts, count, longest, kv_cache, follow):
    """Yield the tokens of all texts at each position, None for a text whose prompt goes on, or that has its `count`.

    `follow(tokens, position)` returns each text's token at this position. Its `tokens` are the earlier ones of each
    text that `kv_cache`, which has room for `longest` positions, has not seen. When no position is left, the last half
    of the tokens are recomputed, from position 0, and so on: keys depend on their positions, and cannot be moved.
    """
    texts, lengths = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
    start = seen = 0         # positions in the texts: that of the first token in the cache, and of the first not in it
    for position in range(min(lengths), max(lengths) + count):
        if position - start > longest:
            forget(kv_cache)
            start = seen = position - max(1, longest // 2)
        found = follow([text[seen:position] for text in texts], position)
        seen = position
        for text, token in zip(texts, found):
            if len(text) == position:
                text.append(token)
        yield [text[position] if n <= position < n + count else None for text, n in zip(texts, lengths)]
