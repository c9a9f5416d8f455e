"""The loss, from logits that are sharded by vocabulary: `mpirun -np 4 python -m shardlab.demos.cross_entropy`.

It shows the three small all-reduces that replace gathering all logits, and a gradient that needs no message (Shoeybi et
al. 2019, section 3); and the three ways of reference/layers/cross_entropy.py beside each other.
"""
from functools import partial
from statistics import median
from timeit import repeat

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mpi_impl.runtime.tables import aligned
from reference import ops
from reference.layers import cross_entropy as textbook
from reference.layers.embedding import local_ids
from shardlab.demos.printing import first_elements, shape
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, POSITIONS = 2, 3
TIMED, REPEATS = (64, 1024), 5      # positions, and tokens of each rank; of the repeats the median counts
VOCAB_SIZE = Size("--vocab-size", "cross_entropy", "V", least=16, help="tokens", most=1_000_000)

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

TABLE = """\
Three ways to the loss. Times are of {positions} positions and {tokens:,} tokens, here:
{rows}
Gathering sends V/6 times as much as the third way: {times:.3g} times here, 8,376 times in GPT-2. exp of a number above
709 is infinite (in float32, above 88), so the second way fails for large logits. It also knows the sum of the losses
only, no position's own.
"""


@program(VOCAB_SIZE.parse)
def show(demo: Demo, V: int) -> None:
    demo.introduce(INTRODUCTION)
    random = np.random.default_rng(1)
    whole, dloss = 3 * random.normal(size=(SAMPLES, POSITIONS, V)), random.normal(size=(SAMPLES, POSITIONS))
    targets = random.integers(V, size=(SAMPLES, POSITIONS))      # these three are identical on every rank
    dloss[0, 0] = 1      # so that the first position shows its gradient unscaled
    own, tokens = demo.own(V), f"{demo.share(V, 'token')}:"
    mine = whole[..., own]
    with demo.phase("forward"):
        loss, cache = cross_entropy_forward(mine.copy(), targets, demo.ranks)
    with demo.phase("backward"):
        dlogits = cross_entropy_backward(dloss, cache)

    demo.say(f"Who owns what: logits {shape(whole)} of V = {V} tokens, {shape(mine)} on a rank. At the first "
             "position:")
    demo.say_each(tokens, first_elements(mine[0, 0]))
    demo.say(f"\nForward. What each rank finds there; the target is token {targets[0, 0]}. Sum and target are "
             "computed after\nthe largest logit of all has been subtracted:")
    by_hand = say_how(demo, mine[0, 0], targets[0, 0] - own.start)
    demo.say("The layer does so at all positions together. The loss, and the gradients of the first position's logits:")
    demo.say_each(f"loss {first_elements(loss)}", f"dlogits {first_elements(dlogits[0, 0])}")
    demo.say_traffic(f"Of b s elements an all-reduce sends 2 b s (t-1)/t, t = {demo.n}; backward nothing:")

    whole_loss, whole_cache = textbook.cross_entropy_forward(whole, targets)
    demo.equal("every loss", loss, whole_loss)
    demo.equal("the first one by hand", by_hand, whole_loss[0, 0])
    demo.equal("every logit's gradient", dlogits, textbook.cross_entropy_backward(dloss, whole_cache)[..., own])
    compare_ways(demo, mine, targets, whole_loss.mean())


def gathered_loss(logits, targets, group: Group):
    """Return the mean loss from gathered logits, the first way."""
    return ops.cross_entropy(group.all_gather(logits, -1, "first way: logits"), targets)[0].mean()


def summed_loss(logits, targets, group: Group):
    """Return the mean loss, the second way: sums of exp, then each rank's sum of the losses of its own targets."""
    total = group.all_reduce(np.exp(logits).sum(-1), "second way: sum of exp")
    ids, held = local_ids(targets, group.rank * logits.shape[-1], logits.shape[-1])
    picked = np.take_along_axis(logits, ids[..., None], -1)[..., 0]
    own = np.where(held, np.log(total) - picked, 0).sum(keepdims=True)
    return group.all_reduce(own, "second way: sum of losses").item() / targets.size


def safe_loss(logits, targets, group: Group):
    """Return the mean loss by the layer above, the third way."""
    return cross_entropy_forward(logits.copy(), targets, group)[0].mean()


WAYS = {"1. gather all logits": (gathered_loss, "b s V"), "2. sums of exp, sum of losses": (summed_loss, "b s + 1"),
        "3. maximum, sum of exp, target": (safe_loss, "3 b s")}


def compare_ways(demo: Demo, logits, targets, expected: float) -> None:
    """Print a row for each way: what is sent, how long it takes, and what it makes of large logits."""
    b_s, per_rank = TIMED
    many, which = np.random.default_rng(demo.rank).normal(size=(1, b_s, per_rank)), np.zeros((1, b_s), np.int64)
    rows = [("", "all-reduced or gathered", "loss", "of logits x 1,000", "time")]
    for name, (way, formula) in WAYS.items():
        before = demo.ranks.ledger.elements()
        loss = way(logits, targets, demo.ranks)
        sent = demo.ranks.ledger.elements() - before
        demo.equal("the loss of each way", loss, expected)
        with np.errstate(over="ignore", invalid="ignore"):
            large = way(1000 * logits, targets, demo.ranks)
        times = repeat(partial(way, many, which, demo.ranks), number=1, repeat=REPEATS)
        rows.append((name, f"{formula} = {sent:,}", f"{loss:.4f}", f"{large:,.1f}", f"{1e3 * median(times):.2f} ms"))
    demo.say(TABLE.format(positions=b_s, tokens=demo.n * per_rank, rows=aligned(rows, left=(0, 1)),
                          times=demo.n * logits.shape[-1] / 6))


def say_how(demo: Demo, logits, target: int) -> float:
    """Print the three steps at one position, from this rank's logits [V/t], and return the loss. `target` is an index
    relative to the rank's first token.
    """
    highest = max(demo.ranks.allgather_objects(logits.max()))
    here = 0 <= target < len(logits)
    part, picked = np.exp(logits - highest).sum(), logits[target] - highest if here else 0.0
    demo.say_each(f"largest logit {logits.max():+.3f},", f"sum of exp {part:.3f},",
                  f"target {picked:+.3f}" if here else "target not here: 0")
    total, picked = map(sum, zip(*demo.ranks.allgather_objects((part, picked))))
    loss = np.log(total) - picked
    demo.say(f"  all:    largest logit {highest:+.3f},  sum of exp {total:.3f},  target {picked:+.3f}; so the loss is "
             f"log {total:.3f} - ({picked:+.3f}) = {loss:.3f}")
    return loss


if __name__ == "__main__":
    run_demo(show)
