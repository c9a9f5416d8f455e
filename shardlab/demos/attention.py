"""Self-attention, sharded by heads over all ranks: `mpirun -np 4 python -m shardlab.demos.attention`.

It shows which rank owns which heads, that a head's pattern needs no other rank, and the two all-reduces: one forward,
one backward (Shoeybi et al. 2019, section 3, figure 3b).
"""
from reference.config import ModelConfig
from reference.layers.attention import attention_tensors
from shardlab.demos.layer_case import LayerCase
from shardlab.demos.printing import shape
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, POSITIONS, HEAD_SIZE = 2, 4, 4
SHOWN = 4       # heads of a rank
NUM_HEADS = Size("--num-attention-heads", "attention", "A", least=4)

INTRODUCTION = """\
In attention every position of a text looks at others, and takes from each what it needs. X has a row of h numbers
for each of s positions. A matrix [h, 3h] makes three rows of each: a query Q (what am I looking for?), a key K (what
do I offer?) and a value V (what do I pass on?). The better a query fits a key, as measured by q k^T, the more of the
value is taken: softmax turns a position's scores into weights that add up to 1.

That is done a times, by a heads. Each has d = h/a columns of Q, of K and of V, and its own scores and weights. Heads
do not interact until a last matrix [h, h], the projection, mixes them. So distribute the heads over {ranks}
(processes, each with memory of its own): a rank gets its heads' columns of Q, K and V, and the rows of the projection
that read them. (If you split the [h, 3h] straight through, a rank has queries, but no keys. If you split a head in
two, each half has a part of the sum q k^T, which must be sent before softmax: s^2 numbers for each head and text.)

A rank's heads times its rows of the projection are a partial sum, as large as Y. Two operators mark the edges. g, at
the end, is an all-reduce forward: a sum over the ranks, of which every rank gets the result. f, before Q, K and V,
does nothing forward; backward it sums dX, since every rank used the whole X.
"""


@program(NUM_HEADS.parse)
def show(demo: Demo, a: int) -> None:
    demo.introduce(INTRODUCTION)
    d = HEAD_SIZE
    c = ModelConfig(1, a * d, a, 1, POSITIONS, init_method_std=0.3)
    case = LayerCase(demo, attention_tensors(c), c, SAMPLES)
    mine = case.mine
    demo.say(f"Who owns what: a = {a} heads, each with d = {d} of h = {a * d} columns; X {shape(case.x)}")
    demo.say_each(f"{demo.share(a, 'head')}:", f"{demo.share(a * d, 'column')} of Q, K and V "
                     f"{shape(mine.w_qkv)},", f"{demo.share(a * d, 'row')} of the projection {shape(mine.w_out)}")
    found, expected = case.show()
    demo.say(f"The weights with which the last of {POSITIONS} positions reads each, in {SHOWN} heads of each rank; "
             "no rank\nneeds another's:")
    probs, own = found.cache.core.probs, demo.own(a)
    demo.say_each("\n".join(f"head {own.start + i}: " + " ".join(f"{share:4.0%}" for share in shares)
                            for i, shares in enumerate(probs[0, :SHOWN, -1])))
    demo.say_all_reduces()
    case.compare(found, expected)
    demo.equal("the attention of every head", probs, expected.cache.core.probs[:, own])


if __name__ == "__main__":
    run_demo(show)
