"""Experts, dealt out to all ranks: `mpirun -np 4 python -m shardlab.demos.experts`.

It shows which rank holds which experts, what each token's router chooses, how many copies of tokens travel from each
rank to each, and back, and whose gradient is complete already (Lepikhin et al. 2020, 2006.16668, section 3).
"""
from mpi_impl.comm.expert_parallel import rows_between_ranks
from mpi_impl.comm.regions import TensorParallelRegion
from reference.config import ExpertsConfig, ModelConfig
from reference.layer_context import AuxiliaryLosses, LayerContext
from reference.layers.experts import experts_tensors
from reference.params import deal
from shardlab.demos.layer_case import LayerCase
from shardlab.demos.printing import first_elements, preview, shape
from shardlab.demos.runner import Demo, Size, program, run_demo

POSITIONS, HIDDEN_SIZE, CHOSEN = 6, 8, 2
PER_RANK = Size("--experts-per-rank", "experts", "N", least=2, sharded=False)

INTRODUCTION = """\
A mixture of experts has several MLPs in place of one, here {E}, and a router that chooses {k} of them for each
token: {E} times the parameters, and {k} times the work. Here {ranks} share the experts, {each} each. Everything else,
the router too, is on every rank, and every rank has samples of its own, as in data parallelism.

So tokens travel. A rank makes a copy of a token for each of its experts, sorts the copies by expert, and sends each to
the rank of its expert: an all-to-all, in which the lengths of the messages depend on the data. Each expert multiplies
what has come from all ranks as one matrix, and the results go back the same way, to be added up with the router's
weights. Nothing is dropped: an expert has as many rows as come, or none.
"""


@program(PER_RANK.parse)
def show(demo: Demo, each: int) -> None:
    n, E = demo.n, each * demo.n
    k = min(CHOSEN, E)
    demo.introduce(INTRODUCTION, E=E, k=k, each=each)
    c = ModelConfig(1, HIDDEN_SIZE, 1, 1, POSITIONS, init_method_std=0.5, experts=ExpertsConfig(
        E, k, moe_router_pre_softmax=E == 1, moe_ffn_hidden_size=2 * HIDDEN_SIZE, moe_aux_loss_coeff=0.01))
    case = LayerCase(demo, experts_tensors(c), c, n, divide=deal)       # a sample for each rank
    mine, own, together = case.mine, AuxiliaryLosses(n, n * POSITIONS), AuxiliaryLosses(n, n * POSITIONS)
    alone, sample = demo.ranks.split(demo.rank, "alone"), demo.own(n)      # no rank shares a layer
    found = case.on_rank(TensorParallelRegion(alone, demo.ranks), sample, LayerContext(auxiliary=own))
    alone.free()
    balance, router = sum(demo.ranks.allgather_objects(own.total[0])), first_elements(found.grads.router)
    with demo.phase("reduction"):
        demo.ranks.all_reduce(found.grads.router, "gradients")

    demo.say(f"Who owns what: h = {HIDDEN_SIZE}, a router {shape(mine.router)} on every rank, and")
    demo.say_each(f"{demo.share(E, 'expert')},", f"A {shape(mine.experts.w_in)},", f"B {shape(mine.experts.w_out)}")
    ids, counts = found.cache.routing.ids, found.cache.order.counts
    demo.say("\nForward. The experts of each rank's tokens, the most probable first:")
    demo.say_each("  ".join(" ".join(map(str, chosen)) for chosen in ids[0].tolist()))
    demo.say("How many copies travel from each rank to ranks 0, 1, ...; and how many rows the matrices of a rank's "
             "experts have then:")
    demo.say_each(*map(str, rows_between_ranks(counts)[demo.rank].tolist()), "and rows:",
                  " ".join(map(str, counts.sum(0)[demo.own(E)])), f"Y {preview(found.y)}")
    demo.say(f"The load-balancing loss is {balance:.3f}, the mean over all sequences. With even choices it is 1.\n\n"
             "Backward, from a random dY. An expert has seen all ranks' tokens, so its gradient is complete. A "
             "router\nhas seen its rank's, and its gradient is a part of a sum:")
    demo.say_each(f"of the router {router}; of A {first_elements(found.grads.experts.w_in)}")
    demo.say_traffic("These are rank 0's, since how many copies travel depends on the data:", group=demo.ranks.name)
    case.compare(found, case.in_textbook(LayerContext(auxiliary=together)), sample)
    demo.equal("the load-balancing loss", balance, together.total[0])


if __name__ == "__main__":
    run_demo(show)
