"""Embeddings of words and positions, and the logits: whole, and split by vocabulary (Shoeybi et al. 2019, section 3).

Rank i of t holds V/t rows of the word table, beginning at i V/t. It looks up the words that it holds and answers
zero for the rest, so that the sum over ranks is the lookup. The same table, read as columns, gives the logits: a
column-parallel linear layer whose output stays split for the parallel loss.

The table may be padded so that it divides by t. Padded rows are never looked up, and their logits are minus
infinity: no probability, no gradient.
"""
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.collectives import f, f_backward, g, g_backward
from reference.ops import linear, linear_backward, lookup, lookup_backward
from reference.params import weight


@dataclass(frozen=True)
class Embedding:
    """Tensors of the embedding, or their gradients. Either may be None: rope needs no positions; see models/gpt.py."""

    word: Any       # [V, h], split by rows
    position: Any   # [longest sequence, h], on every rank


def embedding_tensors(c):
    """Declares the tensors for a ModelConfig."""
    learned = c.position_embedding_type == "learned_absolute"
    return Embedding(word_tensor(c), weight((c.max_position_embeddings, c.hidden_size), c.init_method_std)
                     if learned else None)


def word_tensor(c):
    """A table of words, for the embedding or for an untied output layer."""
    return weight((c.vocab_size, c.hidden_size), c.init_method_std, split=0, pad_to=c.make_vocab_size_divisible_by)


# ---- from words to vectors ------------------------------------------------------------------------------------------


def embedding_forward(tokens, p):
    """tokens [b, s] -> x [b, s, h]."""
    x = lookup(tokens, p.word)
    return (x if p.position is None else x + p.position[:tokens.shape[1]]), tokens


def embedding_backward(dx, p, cache):
    """dx [b, s, h] -> the gradients, as an Embedding. Tokens, which are the cache, have no gradient."""
    return Embedding(lookup_backward(dx, cache, np.zeros_like(p.word)), position_gradient(dx, p.position))


def position_gradient(dx, position):
    """Position n was added to every sample's n-th word."""
    if position is None:
        return None
    dposition = np.zeros_like(position)
    dposition[:dx.shape[1]] = dx.sum(0)
    return dposition


def sharded_embedding_forward(tokens, shards):
    """tokens [b, s], alike on all ranks -> x [b, s, h], alike on all ranks."""
    partial, caches = [], []
    for rank, p in enumerate(shards):
        ids, held = local_ids(tokens, rank * len(p.word), len(p.word))
        partial.append(lookup(ids, p.word) * held[..., None])         # zero for words that other ranks hold
        caches.append((ids, held))
    x, position = g(partial), shards[0].position
    return (x if position is None else x + position[:tokens.shape[1]]), caches


def sharded_embedding_backward(dx, shards, caches):
    """dx [b, s, h], alike on all ranks -> each rank's gradients."""
    grads = []
    for dx_i, p, (ids, held) in zip(g_backward(dx, len(shards)), shards, caches):
        dword = lookup_backward(dx_i * held[..., None], ids, np.zeros_like(p.word))
        grads.append(Embedding(dword, position_gradient(dx_i, p.position)))
    return grads


def local_ids(tokens, vocab_start_index, count):
    """Where each word lies in a table of `count` rows that begins at vocab_start_index, and whether it does at all.

    A word that is not there gets row 0, to be multiplied by `held`, which is then False.
    """
    ids = tokens - vocab_start_index
    held = (ids >= 0) & (ids < count)
    return np.where(held, ids, 0), held


# ---- from vectors to logits -----------------------------------------------------------------------------------------


def logits_forward(x, word, vocab_size):
    """x [b, s, h], word [V, h] -> logits [b, s, V]; those of padded words are minus infinity."""
    return mask_padding(linear(x, word.T), 0, vocab_size), x


def logits_backward(dlogits, word, x):
    """dlogits [b, s, V] -> dx [b, s, h], dword [V, h]."""
    dx, dword, _ = linear_backward(dlogits, x, word.T)                   # forward: logits = x @ word^T
    return dx, dword.T


def sharded_logits_forward(x, words, vocab_size):
    """x [b, s, h], alike on all ranks -> each rank's logits [b, s, V/t]."""
    return [mask_padding(linear(x_i, word.T), rank * len(word), vocab_size)
            for rank, (x_i, word) in enumerate(zip(f(x, len(words)), words))], x


def sharded_logits_backward(dlogits, words, x):
    """Each rank's dlogits [b, s, V/t] -> dx [b, s, h], alike on all ranks, and each rank's dword [V/t, h]."""
    partial, dwords = [], []
    for dlogits_i, word in zip(dlogits, words):
        dx, dword = logits_backward(dlogits_i, word, x)
        partial.append(dx)
        dwords.append(dword)
    return f_backward(partial), dwords


def mask_padding(logits, vocab_start_index, vocab_size):
    """Minus infinity for the words at the end of a shard's logits [b, s, n] that do not exist. In place."""
    real = min(max(vocab_size - vocab_start_index, 0), logits.shape[-1])
    logits[..., real:] = -np.inf
    return logits
