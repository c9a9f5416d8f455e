"""Experts, dealt out to all ranks: `mpirun -np 4 python -m mpi_impl.demos.experts`.

It shows which rank holds which experts, what each token's router chooses, how many copies of tokens travel from each
rank to each, and back, and whose gradient is complete already (Lepikhin et al. 2020, 2006.16668, section 3).
"""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.expert_parallel import rows_between_ranks
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.demos.printing import Check, count, first_elements, say, say_aligned, say_each, shape, span, traffic_table
from mpi_impl.launch.entry import ArgumentParser, run
from mpi_impl.layers.experts import experts_backward, experts_forward
from mpi_impl.parallel.sinks import ImmediateSink
from mpi_impl.runtime.tables import aligned
from reference.config import ExpertsConfig, ModelConfig, require_positive
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers import experts as textbook
from reference.params import deal, initialize, tree_map

POSITIONS, HIDDEN_SIZE, CHOSEN = 6, 8, 2

INTRODUCTION = """\
A mixture of experts has several MLPs in the place of one, here {E}, and a router that chooses {k} of them for each
token: {E} times the parameters, and {k} times the work. Here {ranks} share the experts, {each} each. Everything else,
the router too, is on every rank, and every rank has samples of its own, as in data parallelism.

So tokens travel. A rank makes a copy of a token for each of its experts, sorts the copies by expert, and sends each to
the rank of its expert: an all-to-all, in which the lengths of the messages depend on the data. Each expert multiplies
what has come from all ranks as one matrix, and the results go back the same way, to be added up with the router's
weights. Nothing is dropped: an expert has as many rows as come, or none.
"""


class Computed(NamedTuple):
    """The results on this rank."""

    y: Any
    dx: Any
    balance: float      # the load-balancing loss of all ranks
    grads: Any          # of this rank's experts, and of the router, summed over all ranks


def show(ranks: Group, argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="mpi_impl.demos.experts", description="Show how experts are dealt out to the ranks.")
    parser.add_argument("--experts-per-rank", type=int, default=2, metavar="N", help="(default: 2)")
    each = parser.parse_args(argv).experts_per_rank
    require_positive("experts_per_rank", each)
    E, n = each * ranks.size, ranks.size
    k = min(CHOSEN, E)
    c = ModelConfig(1, HIDDEN_SIZE, 1, 1, POSITIONS, init_method_std=0.5, experts=ExpertsConfig(
        E, k, moe_router_pre_softmax=E == 1, moe_ffn_hidden_size=2 * HIDDEN_SIZE, moe_aux_loss_coeff=0.01))
    say(ranks, INTRODUCTION.format(E=E, k=k, ranks=count(n), each=each))
    tensors = textbook.experts_tensors(c)
    whole = initialize(tensors, seed=1, dtype=np.float64)
    mine = deal(whole, tensors, n)[ranks.rank]
    x, dy = np.random.default_rng(1).normal(size=(2, n, 1, POSITIONS, HIDDEN_SIZE))       # of all ranks: a sample each
    alone = ranks.split(ranks.rank, "alone")       # no rank shares the layers of another
    inside = TensorParallelRegion(alone, ranks)
    say_owned(ranks, mine, each)

    own, grads = AuxiliaryLosses(n, n * POSITIONS), tree_map(np.zeros_like, mine)
    with ranks.ledger.phase("forward"):
        y, cache = experts_forward(x[ranks.rank], mine, c, inside, LayerContext(auxiliary=own))
    balance = sum(ranks.allgather_objects(own.total[0]))
    say_forward(ranks, cache, y, each, balance)
    with ranks.ledger.phase("backward"):
        dx = experts_backward(dy[ranks.rank].copy(), mine, cache, c, grads, ImmediateSink(), inside)
    say_backward(ranks, grads)
    with ranks.ledger.phase("reduction"):
        ranks.all_reduce(grads.router, "gradients")
    sent = Ledger()
    sent.totals |= {entry: total for entry, total in ranks.ledger.totals.items() if entry.group != alone.name}
    say(ranks, f"\nWhat rank 0 sent. How many copies travel depends on the data:\n{traffic_table(sent)}\n")
    alone.free()
    compare(ranks, c, whole, (x, dy), Computed(y, dx, balance, grads))


def say_owned(ranks: Group, mine, each: int) -> None:
    """Print which experts are on which rank."""
    first = ranks.rank * each
    say(ranks, f"Who owns what: h = {HIDDEN_SIZE}, a router {shape(mine.router)} on every rank, and")
    say_aligned(ranks, f"{span(first, first + each, 'expert')},", f"A {shape(mine.experts.w_in)},",
                f"B {shape(mine.experts.w_out)}")


def say_forward(ranks: Group, cache, y, each: int, balance: float) -> None:
    """Print the choices of the routers, the copies that travel, and how even the choices are."""
    say(ranks, "\nForward. The experts of each rank's tokens, the most probable first:")
    say_each(ranks, "  ".join(" ".join(map(str, ids)) for ids in cache.routing.ids[0].tolist()))
    say(ranks, "Copies that travel, from the rank of the row to the rank of the column:\n" +
        table_of(rows_between_ranks(cache.order.counts)))
    say(ranks, "So the matrices of the experts have these numbers of rows:")
    rows = cache.order.counts.sum(0)[ranks.rank * each:(ranks.rank + 1) * each]
    say_aligned(ranks, f"{' '.join(map(str, rows))},", f"and Y {shape(y)}: {first_elements(y)}")
    say(ranks, f"The load-balancing loss is {balance:.3f}, the mean over all sequences. With even choices it is 1.")


def say_backward(ranks: Group, grads) -> None:
    """Print the gradients of each rank, of which only the experts' are complete."""
    say(ranks, "\nBackward, from a random dY. An expert has seen all ranks' tokens, so its gradient is complete. A "
               "router\nhas seen its rank's, and its gradient is a part of a sum:")
    say_each(ranks, f"of the router {first_elements(grads.router)}; of A {first_elements(grads.experts.w_in)}")


def compare(ranks: Group, c: ModelConfig, whole, samples, computed: Computed) -> None:
    """Compare this rank's results with the textbook's."""
    (x, dy), n, check = samples, ranks.size, Check()
    together, mine = AuxiliaryLosses(n, n * POSITIONS), slice(ranks.rank, ranks.rank + 1)
    y, cache = textbook.experts_forward(x[:, 0], whole, c, LayerContext(auxiliary=together))
    dx, grads = textbook.experts_backward(dy[:, 0], whole, cache, c)
    check.equal("Y", computed.y, y[mine])
    check.equal("dX", computed.dx, dx[mine])
    check.equal("the load-balancing loss", computed.balance, together.total[0])
    for name, found in vars(computed.grads.experts).items():
        first = ranks.rank * len(found)
        check.equal("every expert's gradient", found, getattr(grads.experts, name)[first:first + len(found)])
    check.equal("the router's", computed.grads.router, grads.router)
    check.conclude(ranks)


def table_of(rows) -> str:
    """Return the numbers of copies, [from, to], as a table."""
    head = ["", *(f"to {rank}" for rank in range(len(rows)))]
    return aligned([head, *([f"  from {rank}", *map(str, row)] for rank, row in enumerate(rows.tolist()))], left=(0,))


if __name__ == "__main__":
    run(lambda: show(world()))
