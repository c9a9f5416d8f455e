"""Embeddings of tokens, positions and token types, and the logits: whole, and sharded by vocabulary (Shoeybi et al.
2019, section 3).

Rank i of t holds V/t rows of the word table, beginning at i V/t. It looks up the tokens that it holds and gives zero
for the rest, so that the sum over ranks is the lookup. The same table, read as columns, gives the logits: a
column-parallel linear layer whose output stays sharded for the parallel loss.

The table may be padded so that t divides it. Padded rows are never looked up, and their logits are minus infinity: no
probability, no gradient.
"""
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference import ops
from reference.layer_context import TRAINING
from reference.ops import linear, linear_backward, lookup, lookup_backward
from reference.params import weight

OUTPUT = "embedding output"      # the name of dropout's site
TOKEN_TYPES = 2                  # BERT's: a token belongs to the first or the second piece of text


@dataclass(frozen=True)
class Embedding:
    """Tensors of the embedding, or their gradients. Each may be None: rope needs no positions; see models/stage.py."""

    word: Any                # [V, h], split by rows
    position: Any            # [longest sequence, h], on every rank
    token_type: Any = None   # [2, h], BERT's, on every rank


def embedding_tensors(c):
    """Declare the tensors for a ModelConfig."""
    def table(rows):
        return weight((rows, c.hidden_size), c.init_method_std)

    return Embedding(word_tensor(c),
                     table(c.max_position_embeddings) if c.position_embedding_type == "learned_absolute" else None,
                     table(TOKEN_TYPES) if c.architecture == "bert" else None)


def word_tensor(c):
    """Declare a word table, for the embedding or for an untied output layer."""
    return weight((c.vocab_size, c.hidden_size), c.init_method_std, split=0, pad_to=c.make_vocab_size_divisible_by)


# ---- from tokens to vectors -----------------------------------------------------------------------------------------


def embedding_forward(tokens, p, context=TRAINING, token_types=None):
    """Map tokens, token_types [b, s] -> x [b, s, h]. `context` is the microbatch's LayerContext."""
    dropout, runs = context.dropout, context.runs(slice(0, tokens.shape[1]))
    x = lookup(tokens, p.word)
    if p.position is not None:
        x = x + np.concatenate([p.position[run] for run in runs])
    if p.token_type is not None:
        x = x + lookup(token_types, p.token_type)
    x, mask = ops.dropout(x, dropout and dropout.hidden(OUTPUT))
    return x, (tokens, token_types, runs, mask)


def embedding_backward(dx, p, cache):
    """Return the gradients, as an Embedding, for dx [b, s, h]. Tokens have no gradient."""
    tokens, token_types, runs, mask = cache
    dx = ops.dropout_backward(dx, mask)
    return Embedding(lookup_backward(dx, tokens, np.zeros_like(p.word)), position_gradient(dx, p.position, runs),
                     token_type_gradient(dx, p.token_type, token_types))


def position_gradient(dx, position, runs):
    """Return dposition for dx [b, n, h] at these runs of positions, whose rows were added to every sample's tokens."""
    if position is None:
        return None
    dposition = np.zeros_like(position)
    for run, rows in zip(runs, np.split(dx.sum(0), len(runs))):
        dposition[run] = rows
    return dposition


def token_type_gradient(dx, token_type, token_types):
    """Return dtoken_type for dx [b, n, h], token_types [b, n]: each row was added to the tokens of that type."""
    return None if token_type is None else lookup_backward(dx, token_types, np.zeros_like(token_type))


def sharded_embedding_forward(tokens, shards, region, context=TRAINING, token_types=None):
    """Map tokens, token_types [b, s], identical on every rank -> each rank's x [b, s, h], outside the region."""
    dropout, partial, held = context.dropout, [], []
    for rank, p in enumerate(shards):
        ids, here = local_ids(tokens, rank * len(p.word), len(p.word))
        partial.append(lookup(ids, p.word) * here[..., None])         # zero for tokens that other ranks hold
        held.append((ids, here))
    xs, masks = region.leave(partial), []
    for rank, (p, positions) in enumerate(zip(shards, region.positions(xs))):
        x = xs[rank] if p.position is None else xs[rank] + p.position[positions]
        if p.token_type is not None:
            x = x + lookup(token_types[:, positions], p.token_type)
        xs[rank], mask = ops.dropout(x, dropout and dropout.hidden(OUTPUT, positions))
        masks.append(mask)
    return xs, (held, token_types, masks)


def sharded_embedding_backward(dxs, shards, cache, region):
    """Return each rank's gradients for its dx [b, s, h], in the layout outside the region."""
    held, token_types, masks = cache
    dxs = [ops.dropout_backward(dx, mask) for dx, mask in zip(dxs, masks)]
    outside = [(position_gradient(dx, p.position, [positions]),
                token_type_gradient(dx, p.token_type, None if token_types is None else token_types[:, positions]))
               for dx, p, positions in zip(dxs, shards, region.positions(dxs))]
    dwords = [lookup_backward(dx * here[..., None], ids, np.zeros_like(p.word))
              for dx, p, (ids, here) in zip(region.leave_backward(dxs), shards, held)]
    return [Embedding(dword, *others) for dword, others in zip(dwords, outside)]


def local_ids(tokens, vocab_start_index, count):
    """Return each token's row in a table of `count` rows from vocab_start_index, and `held`, whether it is there.

    A token that is not there gets row 0, which must be multiplied by `held`, which is then False.
    """
    ids = tokens - vocab_start_index
    held = (ids >= 0) & (ids < count)
    return np.where(held, ids, 0), held


# ---- from vectors to logits -----------------------------------------------------------------------------------------


def logits_forward(x, word, vocab_size):
    """Map x [b, s, h], word [V, h] -> logits [b, s, V]; those of padded rows are minus infinity."""
    return mask_padding(linear(x, word.T), 0, vocab_size), x


def logits_backward(dlogits, word, x):
    """Return dx [b, s, h], dword [V, h] for dlogits [b, s, V]."""
    dx, dword, _ = linear_backward(dlogits, x, word.T)                   # forward: logits = x @ word^T
    return dx, dword.T


def sharded_logits_forward(xs, words, vocab_size, region, at=None):
    """Map each rank's x [b, s, h], in the layout outside the region -> its logits [b, s, V/t]; or [b, n, V/t] at some
    of the positions.
    """
    entered = region.enter(xs)
    return [mask_padding(linear(at.gather(x) if at else x, word.T), rank * len(word), vocab_size)
            for rank, (x, word) in enumerate(zip(entered, words))], region.keep(xs, entered)


def sharded_logits_backward(dlogits, words, kept, region, at=None):
    """Return each rank's dx [b, s, h], outside the region, and dword [V/t, h] for its dlogits, where it has them."""
    entered = [at.gather(x) if at else x for x in region.enter_again(kept)]
    partial, dwords = zip(*[logits_backward(*one) for one in zip(dlogits, words, entered)])
    return region.enter_backward([at.scatter(dx) if at else dx for dx in partial]), list(dwords)


def mask_padding(logits, vocab_start_index, vocab_size):
    """Set the logits [b, s, n] of a shard's padded rows to minus infinity, in place."""
    real = min(max(vocab_size - vocab_start_index, 0), logits.shape[-1])
    logits[..., real:] = -np.inf
    return logits
