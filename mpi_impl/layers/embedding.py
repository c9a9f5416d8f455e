"""Embedding and logits on one rank, V/t words of the vocabulary. Its textbook twin is reference/layers/embedding.py."""
from mpi_impl.kernels import linear, lookup, lookup_backward
from reference.layers.embedding import Embedding, local_ids, mask_padding


def embedding_forward(tokens, p: Embedding, region):
    """tokens [b, s], alike on all ranks -> x [b, s, h], alike on all ranks."""
    ids, held = local_ids(tokens, region.rank * len(p.word), len(p.word))
    partial = lookup(ids, p.word) * held[..., None]          # zero for words that other ranks hold
    x = region.leave(partial, "embedding output")            # g: all-reduce forward
    return (x if p.position is None else x + p.position[:tokens.shape[1]]), (ids, held)


def embedding_backward(dx, p: Embedding, cache, grads: Embedding, region):
    """dx [b, s, h], alike on all ranks. Tokens have no gradient."""
    ids, held = cache
    if grads.position is not None:
        grads.position[:dx.shape[1]] += dx.sum(0)
    dx = region.leave_backward(dx, "embedding output")       # g: identity backward
    lookup_backward(dx * held[..., None], ids, grads.word)


def logits_forward(x, word, vocab_size, region):
    """x [b, s, h], alike on all ranks, word [V/t, h] -> logits [b, s, V/t]; minus infinity for padding."""
    x = region.enter(x, "logits input")                      # f: identity forward
    return mask_padding(linear(x, word.T), region.rank * len(word), vocab_size), x


def logits_backward(dlogits, word, x, grads, sink, region):
    """dlogits [b, s, V/t] -> dx [b, s, h], alike on all ranks. `grads` is the word table's [V/t, h]."""
    sink(grads, dlogits, x)                                  # forward: logits = f(x) @ word^T
    return region.enter_backward(linear(dlogits, word), "logits input")   # f: all-reduce backward
