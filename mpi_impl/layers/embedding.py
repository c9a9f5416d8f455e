"""Embedding and logits on one rank, V/t tokens of the vocabulary. The twin is reference/layers/embedding.py."""
import numpy as np

from mpi_impl import kernels
from mpi_impl.comm.reason import Reason
from mpi_impl.kernels import accumulate, linear, lookup, lookup_backward, total
from reference.layer_context import TRAINING
from reference.layers.embedding import OUTPUT, Embedding, local_ids, mask_padding

EMBEDDING_OUTPUT, LOGITS_INPUT = Reason("embedding", "output"), Reason("logits", "input")


def embedding_forward(tokens, p: Embedding, region, context=TRAINING, token_types=None):
    """Map tokens, token_types [b, s], identical on every rank -> x [b, s, h], outside the regions."""
    dropout = context.dropout
    ids, held = local_ids(tokens, region.rank * len(p.word), len(p.word))
    partial = lookup(ids, p.word) * held[..., None]          # zero for tokens that other ranks hold
    x = region.leave(partial, EMBEDDING_OUTPUT)              # g
    positions = region.positions(x)
    runs = context.runs(positions)
    if p.position is not None:
        x = x + np.concatenate([p.position[run] for run in runs])
    second = None
    if p.token_type is not None:
        second = token_types[:, positions] == 1
        x = x + lookup(second.astype(np.int64), p.token_type)
    x, mask = kernels.dropout(x, dropout and dropout.hidden(OUTPUT, positions))
    return x, (ids, held, second, runs, mask)


def embedding_backward(dx, cache, grads: Embedding, region):
    """Add the gradients for dx [b, s, h], outside the regions. Tokens have no gradient; the tables are not needed."""
    ids, held, second, runs, mask = cache
    dx = kernels.dropout_backward(dx, mask)
    if grads.position is not None:
        for run, dposition in zip(runs, np.split(total(dx), len(runs))):
            grads.position[run] += dposition
    if grads.token_type is not None:                         # a row for each type: one product gives both
        accumulate(grads.token_type, np.stack([~second, second], -1).astype(dx.dtype), dx)
    dx = region.leave_backward(dx, EMBEDDING_OUTPUT)         # g, backward
    lookup_backward(dx * held[..., None], ids, grads.word)


def logits_forward(x, word, vocab_size, region, at=None):
    """Map x [b, s, h], outside the region, word [V/t, h] -> logits [b, s, V/t], or [b, n, V/t] at some of the
    positions; minus infinity for padding.
    """
    entered = region.enter(x, LOGITS_INPUT)                  # f
    logits = linear(at.gather(entered) if at else entered, word.T)
    return mask_padding(logits, region.rank * len(word), vocab_size), region.keep(x, entered)


def logits_backward(dlogits, word, kept, grads, sink, region, at=None):
    """Return dx [b, s, h], outside the region, for dlogits, where there are any. `grads` is the word table's [V/t, h].
    """
    entered = region.enter_again(kept, LOGITS_INPUT)
    sink(grads, dlogits, at.gather(entered) if at else entered)      # forward: logits = f(x) @ word^T
    dx = linear(dlogits, word)
    return region.enter_backward(at.scatter(dx) if at else dx, LOGITS_INPUT)    # f, backward
