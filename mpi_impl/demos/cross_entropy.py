"""The loss, from logits that are sharded by vocabulary: `mpirun -np 4 python -m mpi_impl.demos.cross_entropy`.

It shows the three small all-reduces that replace gathering all logits, and a gradient that needs no message (Shoeybi et
al. 2019, section 3).
"""
from collections.abc import Sequence

import numpy as np

from mpi_impl.comm.group import Group, world
from mpi_impl.demos.printing import (Check, count, first_elements, indent, say, say_aligned, say_each, shape, span,
                                     traffic_table)
from mpi_impl.demos.sizes import ShardedSize
from mpi_impl.launch.entry import run
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from reference.layers import cross_entropy as textbook

SAMPLES, POSITIONS = 2, 3
GPT2_TOKENS = 50_257      # its V
VOCAB_SIZE = ShardedSize(
    "cross_entropy", "Show the loss from sharded logits.", "vocab_size", "V", least=16,
    help="tokens, a multiple of the number of ranks (default: the first from 16 on)",
    why="Every rank has an equal number of logits.",
    numbers=lambda n, V: n * 4 * SAMPLES * POSITIONS * V)      # logits and what is computed from them

INTRODUCTION = """\
At its end a language model predicts the next token: at each of s positions of b texts it has a number for every one of
V tokens, the logits. The loss compares them with the token that does come next, the target:

    loss = log(sum over all tokens of exp(logit)) - logit of the target

It is small if the target has nearly all of that sum. The logits are sharded by vocabulary over {ranks} (processes,
each with memory of its own): each of t ranks has those of its V/t tokens. To gather them all would be simple, but they
are one of the largest arrays of the model, b s V. And only three numbers are needed for a position:

  1. The largest logit. It is subtracted from all, since exp(1000) overflows; the loss stays the same. It is the
     largest of the ranks' largest.
  2. The sum of exp: the sum of the ranks' sums.
  3. The target's logit: one rank has it and the others contribute 0, so this is a sum, too.

So three all-reduces of b s elements are enough. (An all-reduce gives every rank the sum, or the maximum, of what all
ranks have.) Backward, a logit's gradient is its token's probability, exp(logit) / sum, minus 1 for the target. Each
rank can compute that alone, and sends nothing.
"""


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    V = VOCAB_SIZE.parse(argv, ranks.size)
    say(ranks, INTRODUCTION.format(ranks=count(ranks.size)))
    random = np.random.default_rng(1)
    whole, dloss = 3 * random.normal(size=(SAMPLES, POSITIONS, V)), random.normal(size=(SAMPLES, POSITIONS))
    targets = random.integers(V, size=(SAMPLES, POSITIONS))      # these three are identical on every rank
    dloss[0, 0] = 1      # so that the first position shows its gradient unscaled
    n = V // ranks.size
    first = ranks.rank * n
    mine = whole[..., first:first + n]

    say(ranks, f"Who owns what: logits {shape(whole)} of V = {V} tokens, {shape(mine)} on a rank. At the first "
               "position:")
    say_aligned(ranks, f"{span(first, first + n, 'token')}:", first_elements(mine[0, 0]))
    with ranks.ledger.phase("forward"):
        loss, cache = cross_entropy_forward(mine.copy(), targets, ranks)
    say(ranks, f"\nForward. What each rank finds there; the target is token {targets[0, 0]}. Sum and target are "
               "computed after\nthe largest logit of all has been subtracted:")
    by_hand = say_how(ranks, mine[0, 0], targets[0, 0] - first)
    say(ranks, "The layer does so at all positions together, and every rank has all losses:")
    say_each(ranks, f"loss {shape(loss)}: {first_elements(loss)}")

    with ranks.ledger.phase("backward"):
        dlogits = cross_entropy_backward(dloss, cache)
    say(ranks, "\nBackward. The logits' gradients at the first position; all of them together add up to 0:")
    say_aligned(ranks, f"{span(first, first + n, 'token')}:", first_elements(dlogits[0, 0]))

    with ranks.ledger.phase("instead"):
        gathered = ranks.all_gather(mine, -1, "loss: all logits")
    say(ranks, f"\nWhat moved, on each rank, t = {ranks.size}. Of b s elements an all-reduce sends 2 b s (t-1)/t; "
               "backward nothing. To gather all\nlogits instead sends b s V (t-1)/t, V/6 times as much as the three: "
               f"{V / 6:.3g} times here, {GPT2_TOKENS / 6:,.0f} times in GPT-2."
               f"\n{traffic_table(ranks.ledger)}\n")

    check = Check()
    whole_loss, whole_cache = textbook.cross_entropy_forward(whole, targets)
    check.equal("every loss", loss, whole_loss)
    check.equal("the first one by hand", by_hand, whole_loss[0, 0])
    check.equal("every logit's gradient", dlogits,
                textbook.cross_entropy_backward(dloss, whole_cache)[..., first:first + n])
    check.equal("what is gathered", gathered, whole)
    check.conclude(ranks)


def say_how(ranks: Group, logits, target: int) -> float:
    """Print the three steps at one position, from this rank's logits [V/t], and return the loss. `target` is an index
    relative to the rank's first token.
    """
    highest = max(ranks.allgather_objects(logits.max()))
    here = 0 <= target < len(logits)
    part, picked = np.exp(logits - highest).sum(), logits[target] - highest if here else 0.0
    say_aligned(ranks, f"largest logit {logits.max():+.3f},", f"sum of exp {part:.3f},",
                f"target {picked:+.3f}" if here else "target not here: 0")
    total, picked = sum(ranks.allgather_objects(part)), sum(ranks.allgather_objects(picked))
    loss = np.log(total) - picked
    say(ranks, indent("all:".ljust(len(f"rank {ranks.size - 1}: ")),
                      f"largest logit {highest:+.3f},  sum of exp {total:.3f},  target {picked:+.3f}; so the loss is "
                      f"log {total:.3f} - ({picked:+.3f}) = {loss:.3f}"))
    return loss


if __name__ == "__main__":
    run(lambda: show(world()))
