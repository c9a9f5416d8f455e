"""The loss, from logits that are sharded by vocabulary: `mpirun -np 4 python -m mpi_impl.demos.cross_entropy`.

It shows the three small all-reduces that replace gathering all logits, and a gradient that needs no message (Shoeybi et
al. 2019, section 3).
"""
import numpy as np

from mpi_impl.demos.printing import first_elements, indent, preview, shape
from mpi_impl.demos.runner import Demo, Size, program, run_demo
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from reference.layers import cross_entropy as textbook

SAMPLES, POSITIONS = 2, 3
GPT2_TOKENS = 50_257      # its V
VOCAB_SIZE = Size("--vocab-size", "cross_entropy", "V", least=16, times=1, help="tokens;",
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
    with demo.phase("instead"):
        gathered = demo.ranks.all_gather(mine, -1, "loss: all logits")

    demo.say(f"Who owns what: logits {shape(whole)} of V = {V} tokens, {shape(mine)} on a rank. At the first "
             "position:")
    demo.say_aligned(tokens, first_elements(mine[0, 0]))
    demo.say(f"\nForward. What each rank finds there; the target is token {targets[0, 0]}. Sum and target are "
             "computed after\nthe largest logit of all has been subtracted:")
    by_hand = say_how(demo, mine[0, 0], targets[0, 0] - own.start)
    demo.say("The layer does so at all positions together, and every rank has all losses:")
    demo.say_each(f"loss {preview(loss)}")
    demo.say("\nBackward. The logits' gradients at the first position; all of them together add up to 0:")
    demo.say_aligned(tokens, first_elements(dlogits[0, 0]))
    demo.say_traffic(f"Of b s elements an all-reduce sends 2 b s (t-1)/t, t = {demo.n}; backward nothing. To "
                     "gather all\nlogits instead sends b s V (t-1)/t, V/6 times as much as the three: "
                     f"{V / 6:.3g} times here, {GPT2_TOKENS / 6:,.0f} times in GPT-2.")

    whole_loss, whole_cache = textbook.cross_entropy_forward(whole, targets)
    demo.equal("every loss", loss, whole_loss)
    demo.equal("the first one by hand", by_hand, whole_loss[0, 0])
    demo.equal("every logit's gradient", dlogits, textbook.cross_entropy_backward(dloss, whole_cache)[..., own])
    demo.equal("what is gathered", gathered, whole)


def say_how(demo: Demo, logits, target: int) -> float:
    """Print the three steps at one position, from this rank's logits [V/t], and return the loss. `target` is an index
    relative to the rank's first token.
    """
    highest = max(demo.ranks.allgather_objects(logits.max()))
    here = 0 <= target < len(logits)
    part, picked = np.exp(logits - highest).sum(), logits[target] - highest if here else 0.0
    demo.say_aligned(f"largest logit {logits.max():+.3f},", f"sum of exp {part:.3f},",
                     f"target {picked:+.3f}" if here else "target not here: 0")
    total, picked = sum(demo.ranks.allgather_objects(part)), sum(demo.ranks.allgather_objects(picked))
    loss = np.log(total) - picked
    demo.say(indent("all:".ljust(len(f"rank {demo.n - 1}: ")),
                    f"largest logit {highest:+.3f},  sum of exp {total:.3f},  target {picked:+.3f}; so the loss is "
                    f"log {total:.3f} - ({picked:+.3f}) = {loss:.3f}"))
    return loss


if __name__ == "__main__":
    run_demo(show)
