"""Attention over c context-parallel ranks is attention in one go: in the textbook, and on real ranks."""
from dataclasses import dataclass, replace

import numpy as np

from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.layer_context import LayerContext
from reference.layers.context_attention import WAYS, lockstep
from reference.models.model import model_backward, model_forward
from reference.ops import CoreInputs, attention_core, attention_core_backward
from reference.positions import SequencePart, collect, deal, take, zigzag
from reference.random.dropout import Dropout
from tests.cases import Case, close, random_numbers, trees_close
from tests.textbook_theorems import whole_model


@dataclass(frozen=True)
class ContextCase:
    """The sizes of attention on c ranks, with a seed for the numbers."""

    c: int
    b: int
    chunk: int           # positions: s = 2 c chunk
    heads: int           # of keys and values
    queries: int         # heads of queries for each of those
    d: int
    causal: bool
    dropout: float
    padded: bool
    seed: int
    exact: bool = False

    @property
    def s(self) -> int:
        return 2 * self.c * self.chunk

    @property
    def chunks(self) -> list[list[slice]]:
        return zigzag(self.c, self.s)

    def exactly(self) -> "ContextCase":
        return replace(self, exact=True)

    def array(self, what: str, heads: int):
        return random_numbers(self.seed, what, (self.b, self.s, heads, self.d), self.exact)

    @property
    def inputs(self) -> CoreInputs:
        """Draw the inputs of the whole core. The masks are those of some heads and samples of a larger model."""
        a = self.heads * self.queries
        model = ModelConfig(1, 2 * (a + 1), a + 1, 3, self.s + 1, attention_dropout=self.dropout)
        site = Dropout(model, self.seed, step=2, sample=3, layer=0).attention(first_head=1)
        lengths = np.random.default_rng(self.seed).integers(1, self.s + 1, self.b) if self.padded else None
        return CoreInputs(self.array("q", a), self.array("k", self.heads), self.array("v", self.heads), self.causal,
                          site, lengths)


def one_go(case: ContextCase):
    """Return the inputs, the upstream gradient, the result and the gradients of attention on one rank."""
    inputs, dy = case.inputs, case.array("dy", case.heads * case.queries)
    y, core = attention_core(*inputs)
    return inputs, dy, y, attention_core_backward(dy, core)


def attention_over_ranks_equals_one_go(case: ContextCase, way: str):
    """Check one of the three ways: the results, and dQ, dK and dV, for any upstream gradient."""
    inputs, dy, y, gradients = one_go(case)
    forward, backward = WAYS[way]
    ys, caches = forward(dealt(inputs, case.chunks), case.chunks)
    close(collect(ys, case.chunks), y)
    parts = backward(deal(dy, case.chunks), caches, case.chunks)
    for mine, expected in zip(zip(*parts), gradients, strict=True):
        close(collect(mine, case.chunks), expected)


def dealt(inputs: CoreInputs, chunks) -> list[CoreInputs]:
    """Return each rank's inputs."""
    return [inputs._replace(q=q, k=k, v=v) for q, k, v in zip(*(deal(x, chunks) for x in inputs[:3]))]


def model_over_ranks_equals_whole(case: Case, c: int, way: str):
    """Check a whole model on c ranks in lockstep: the losses at all positions, and every gradient, with dropout on.

    Each rank has its positions' tokens, targets, rows of the position table or angles of rope, and masks.
    """
    model, (p, batch, losses, dlosses, grads) = case.model, whole_model(case)
    part = lockstep(c, case.s, way)
    context = LayerContext(replace(case.dropout, part=part), part=part)
    found, cache = model_forward(None, p, model, batch.at(part), context)
    for one, loss in zip(found, losses, strict=True):
        close(one, at_positions(loss, part))
    _, over_ranks = model_backward([at_positions(dloss, part) for dloss in dlosses], p, cache, model)
    trees_close(over_ranks, grads, 1e-10)


def at_positions(x, part: SequencePart):
    """Return the part's positions of x [b, s]; x [b] has none."""
    return x if x.ndim == 1 else take(x, part.chunks)


def targets_are_the_next_tokens(case: ContextCase):
    """Check that the target of each token that a rank gets is the token after it in the text."""
    text = np.arange(case.b * (case.s + 1)).reshape(case.b, -1)
    batch = GPTBatch.unpack(text)
    for rank in range(case.c):
        mine = batch.at(SequencePart(rank, case.chunks))
        assert (mine.targets == mine.tokens + 1).all()
    close(collect([batch.at(SequencePart(rank, case.chunks)).tokens for rank in range(case.c)], case.chunks),
          batch.tokens)
