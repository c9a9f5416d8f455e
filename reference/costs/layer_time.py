"""The time of a layer, forward and backward, for one microbatch on one rank. The whole step's: step_time.py.

Letters as in reference/config; c is the number of context-parallel ranks, e that of expert-parallel ones.
"""
from functools import cache
from typing import NamedTuple

from reference.costs.hardware import Hardware, RankGroup, collective_time, slowest_link
from reference.costs.plans import Plan


class Parts(NamedTuple):
    """Seconds of a rank's work on one microbatch, or of several."""

    products: float = 0.0
    kernels: float = 0.0      # and everything else but messages
    messages: float = 0.0     # between tensor-parallel ranks
    context: float = 0.0      # between context-parallel ranks, as far as no block of attention hides them
    experts: float = 0.0      # of the copies of tokens between experts

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, other: "Parts", times: float = 1) -> "Parts":
        return Parts(*(a + times * b for a, b in zip(self, other, strict=True)))


class StageTime(NamedTuple):
    """The time of a stage for one microbatch."""

    forward: Parts
    input_gradient: Parts     # with recompute
    weight_gradient: Parts

    @property
    def total(self) -> Parts:
        return self.forward.plus(self.input_gradient).plus(self.weight_gradient)

    def plus(self, other: "StageTime", times: float = 1) -> "StageTime":
        return StageTime(*(a.plus(b, times) for a, b in zip(self, other, strict=True)))


NOTHING = StageTime(Parts(), Parts(), Parts())


# ---- sizes ----------------------------------------------------------------------------------------------------------


class ExpertSizes(NamedTuple):
    """The experts in the MLP's place, if the routers choose evenly."""

    number: int         # E
    k: int              # that compute a token
    ffn: int            # columns of one, on a rank
    shared: int         # and of the one that computes all tokens
    group: RankGroup    # of the e ranks that deal them out


class Sizes(NamedTuple):
    """The sizes that determine the time of a layer, so that plans which share them compute it once."""

    b: int
    s: int              # positions on a rank: of the sequence's s, a c-th
    h: int
    a: int
    t: int
    heads: int          # columns of all heads of queries on a rank: h/t in a GPT,
    keys: int           # of those of keys, or of values: the same,
    ffn: int            # and of the MLP: 4h/t
    gated: bool
    sequence_parallel: bool
    keep_gathered_inputs: bool
    recompute: str
    tensor: RankGroup   # of the t ranks that share a layer
    context: RankGroup  # of the c ranks that share a sequence
    way: str            # in which they attend
    experts: ExpertSizes | None


def sizes_of(plan: Plan, experts: bool = False) -> Sizes:
    """Return the sizes of a layer, perhaps with experts."""
    c, p, groups = plan.model, plan.parallel, groups_of(plan)
    t = p.tensor_model_parallel_size
    return Sizes(plan.b, plan.positions, c.hidden_size, c.num_attention_heads, t,
                 c.num_attention_heads // t * c.head_size, max(1, c.groups // t) * c.head_size, c.ffn_size // t,
                 c.swiglu, p.sequence_parallel, p.keep_gathered_inputs, p.recompute.granularity, groups.tensor,
                 groups.context, p.cp_comm_type, expert_sizes(plan, groups.experts) if experts else None)


def expert_sizes(plan: Plan, group: RankGroup) -> ExpertSizes:
    assert plan.model.experts
    c, t = plan.model.experts, plan.parallel.tensor_model_parallel_size
    return ExpertSizes(c.num_experts, c.moe_router_topk, (c.moe_ffn_hidden_size or plan.model.ffn_size) // t,
                       (c.moe_shared_expert_intermediate_size or 0) // t, group)


class Groups(NamedTuple):
    """Groups of ranks. Ranks count through t first, then c, then d, then p."""

    tensor: RankGroup
    shards: RankGroup            # that shard a copy of the model's states: the replicas, or neighbours among them
    instances: RankGroup         # with the same shard
    pipeline: RankGroup
    context: RankGroup
    experts: RankGroup           # neighbours among the replicas
    expert_replicas: RankGroup   # with the same experts


def groups_of(plan: Plan) -> Groups:
    p, n = plan.parallel, plan.parallel.world_size
    t, stages, e = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.expert_model_parallel_size
    return Groups(RankGroup(t, 1, n), RankGroup(p.instance_size, t, n),
                  RankGroup(p.num_distributed_optimizer_instances, t * p.instance_size, n),
                  RankGroup(stages, t * p.replicas, n), RankGroup(p.context_parallel_size, t, n), RankGroup(e, t, n),
                  RankGroup(p.expert_replicas, t * e, n))


@cache
def layer(sizes: Sizes, hardware: Hardware) -> StageTime:
    """Time forward and backward of one layer and microbatch.

    Blocks of keys from other ranks keep no probabilities: whatever is recomputed beside, the backward computes their
    scores again, the first of the core's two products.
    """
    forward, backward = (one_pass(sizes, hardware, backward) for backward in (False, True))
    products, scores = attention_core(sizes, hardware, backward=False)
    if sizes.context.ranks > 1 and sizes.way != "a2a":
        again = Parts(products / 2, scores)
        recomputed = {"none": again, "selective": again, "full": forward.plus(again)}[sizes.recompute]
    else:
        recomputed = {"none": Parts(), "selective": Parts(products, scores), "full": forward}[sizes.recompute]
    return StageTime(forward, backward.plus(recomputed), Parts(products=linear_products(sizes, hardware)))


def one_pass(sizes: Sizes, hardware: Hardware, backward: bool) -> Parts:
    """Time a layer's forward, or the part of its backward that gives the input's gradient."""
    core, scores = attention_core(sizes, hardware, backward)
    return Parts(linear_products(sizes, hardware) + core, elementwise(sizes, hardware, backward) + scores,
                 region_messages(sizes, hardware, backward), context_messages(sizes, hardware, backward),
                 expert_messages(sizes, hardware))


def linear_products(sizes: Sizes, hardware: Hardware) -> float:
    """Time the products of Q, K and V, attention's output and the MLP. Each of the two gradients takes the same."""
    n, h, heads = sizes.b * sizes.s, sizes.h, sizes.heads
    attention = hardware.product(n, h, heads + 2 * sizes.keys) + hardware.product(n, heads, h)
    if sizes.experts is None:
        return attention + mlp_products(sizes, hardware, n, sizes.ffn)
    one = sizes.experts
    local, own = one.number // one.group.ranks, n // (sizes.t if sizes.sequence_parallel else 1)
    return (attention + hardware.product(own, h, one.number)
            + local * mlp_products(sizes, hardware, max(1, n * one.k // local), one.ffn)
            + (mlp_products(sizes, hardware, n, one.shared) if one.shared else 0))


def mlp_products(sizes: Sizes, hardware: Hardware, n: int, f: int) -> float:
    """Time an MLP of f columns for n tokens."""
    return hardware.product(n, sizes.h, (1 + sizes.gated) * f) + hardware.product(n, f, sizes.h)


def attention_core(sizes: Sizes, hardware: Hardware, backward: bool) -> tuple[float, float]:
    """Time q k^T and probabilities times v: 4 b s^2 h/t FLOPs forward, twice that backward; and softmax. Each of c
    ranks has a c-th of both: the positions of either queries or heads.
    """
    b, s, _, a, t = sizes[:5]
    keys = s * sizes.context.ranks
    flops = (1 + backward) * 4 * b * s * keys * sizes.heads
    return (flops / (hardware.peak * hardware.attention[backward]),
            hardware.stream(b * a * s * keys / t, hardware.passes.scores[backward]))


def elementwise(sizes: Sizes, hardware: Hardware, backward: bool) -> float:
    """Time the elementwise kernels: outside the regions on all positions or a shard of them, inside on columns.

    A GPT has 12 h/t columns there: Q, K, V, attention's result, and 4h/t on either side of the activation.
    """
    n = sizes.b * sizes.s
    outside = n * sizes.h / (sizes.t if sizes.sequence_parallel else 1)
    columns = 2 * sizes.heads + 2 * sizes.keys + (2 + sizes.gated) * sizes.ffn
    if (one := sizes.experts):       # which move their copies into order and back, too
        columns += (2 + sizes.gated) * (one.k * one.ffn + one.shared - sizes.ffn) + 2 * one.k * sizes.h
    return (hardware.stream(outside, hardware.passes.outside[backward])
            + hardware.stream(n * columns / 12, hardware.passes.inside[backward]) + hardware.overhead[backward])


def region_messages(sizes: Sizes, hardware: Hardware, backward: bool) -> float:
    """Time two all-reduces of b s h each way (Shoeybi et al. 2019, figure 4).

    With sequence parallelism each is two halves, and the backward gathers the two inputs again unless they are kept
    (Korthikanti et al. 2022, section 4.2.2).
    """
    x = sizes.b * sizes.s * sizes.h * hardware.element_bytes
    if not sizes.sequence_parallel:
        return 2 * collective_time(hardware, "all_reduce", sizes.tensor, x)
    gathered = collective_time(hardware, "all_gather", sizes.tensor, x)
    halves = 2 * (gathered + collective_time(hardware, "reduce_scatter", sizes.tensor, x))
    return halves + (2 * gathered if backward and not sizes.keep_gathered_inputs else 0)


def context_messages(sizes: Sizes, hardware: Hardware, backward: bool) -> float:
    """Time the messages of attention over c ranks that nothing hides (reference/layers/context_attention.py).

    A ring's keys and values travel beneath the block of attention that a rank computes meanwhile, and in the backward
    the gradients with them, but for the last hop, which brings these home.
    """
    group, size = sizes.context, 2 * sizes.b * sizes.s * sizes.keys * hardware.element_bytes     # of a rank's k and v
    if group.ranks == 1:
        return 0.0
    if sizes.way == "p2p":
        hop = slowest_link(hardware, group).seconds("send", 2, size)
        block = sum(attention_core(sizes, hardware, backward)) / group.ranks
        if not backward:
            return (group.ranks - 1) * max(0.0, hop - block)
        both = group.ranks - 2
        return hop + max(0.0, hop - block) + both * max(0.0, 2 * hop - block)
    if sizes.way == "all_gather":
        gathered = collective_time(hardware, "all_gather", group, size * group.ranks)
        return gathered * (1 + backward)                                      # a reduce-scatter takes as long
    queries = 2 * sizes.b * sizes.s * sizes.heads * hardware.element_bytes    # and what they attended
    return collective_time(hardware, "all_to_all", group, queries + size)


def expert_messages(sizes: Sizes, hardware: Hardware) -> float:
    """Time dispatch and combine of k copies of each token, of which (e - 1)/e go to other ranks if the routers choose
    evenly. The backward sends as much.
    """
    if sizes.experts is None:
        return 0.0
    copies = sizes.b * sizes.s * sizes.experts.k * sizes.h * hardware.element_bytes
    return 2 * collective_time(hardware, "all_to_all", sizes.experts.group, copies)
