"""The transformer's MLP, sharded over all ranks: `mpirun -np 4 python -m shardlab.demos.mlp`.

It shows which rank owns which columns of A and which rows of B, what each computes, and the two all-reduces that make
the result whole: one forward, one backward (Shoeybi et al. 2019, section 3, figure 3a).
"""
from reference.config import ModelConfig
from reference.layers.mlp import mlp_tensors
from shardlab.demos.layer_case import LayerCase
from shardlab.demos.printing import shape
from shardlab.demos.runner import Demo, Size, program, run_demo

SAMPLES, POSITIONS = 2, 3
HIDDEN_SIZE = Size("--hidden-size", "mlp", "H", least=8)

INTRODUCTION = """\
The MLP of a transformer is two matrix products with a nonlinear function between them: Y = GeLU(X A) B. X has a row of
h numbers for every token; A is [h, 4h] and B is [4h, h]. In a large model A and B are too big for one device.

Split A by columns over {ranks} (processes, each with memory of its own). Then every rank computes columns of X A and
can apply GeLU to them without data of any other rank. (Split by rows, A would give sums X1 A1 + X2 A2 that must be
added up before GeLU, since GeLU(u + v) is not GeLU(u) + GeLU(v).) A rank now holds columns of GeLU(X A), and they
multiply exactly the same rows of B. So split B by rows. Every rank gets a matrix as large as Y, a partial sum, and the
sum over the ranks is Y.

Two operators mark the edges. f, before A: forward it does nothing, backward it sums dX over the ranks, since each used
the whole X. g, after B: forward it sums the partial results, backward it does nothing. An all-reduce is such a sum, of
which every rank gets the result.
"""


@program(HIDDEN_SIZE.parse)
def show(demo: Demo, h: int) -> None:
    demo.introduce(INTRODUCTION)
    c = ModelConfig(1, h, 1, 1, POSITIONS, init_method_std=0.5)
    case = LayerCase(demo, mlp_tensors(c), c, SAMPLES)
    whole, mine = case.whole, case.mine
    demo.say(f"Who owns what: h = {h}, X {shape(case.x)}, A {shape(whole.w_in)}, B {shape(whole.w_out)}")
    demo.say_each(f"{demo.share(4 * h, 'column')} of A {shape(mine.w_in)},",
                     f"{demo.share(4 * h, 'row')} of B {shape(mine.w_out)}")
    case.compare(*case.show())
    demo.say_all_reduces()


if __name__ == "__main__":
    run_demo(show)
