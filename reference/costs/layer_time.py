"""The time of a layer, forward and backward, for one microbatch on one rank. The whole step's: step_time.py.

Letters as in reference/config; c is the number of context-parallel ranks, e that of expert-parallel ones.
"""
from functools import cache
from math import prod
from typing import NamedTuple

from reference.config import ModelConfig
from reference.costs.hardware import Hardware, RankGroup, collective_time, slowest_link
from reference.costs.parameters import declared_block
from reference.costs.plans import Plan
from reference.params import leaves


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


class Matrix(NamedTuple):
    """A rank's shard of a weight matrix."""

    rows: int
    columns: int
    inside: int         # those of the two that are sharded, as they are inside a region; 0 for a replicated matrix


class ExpertSizes(NamedTuple):
    """The experts in the MLP's place, if the routers choose evenly."""

    number: int         # E
    k: int              # that compute a token
    matrices: tuple[Matrix, ...]     # of one
    group: RankGroup    # of the e ranks that deal them out


class Sizes(NamedTuple):
    """The sizes that determine the time of a layer, so that plans which share them compute it once."""

    b: int
    s: int              # positions on a rank: of the sequence's s, a c-th
    h: int
    a: int
    t: int
    heads: int          # columns of all heads of queries on a rank: h/t in a GPT,
    keys: int           # and of those of keys, or of values: the same
    matrices: tuple[Matrix, ...]     # that compute every token
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
    chosen = None
    if experts:
        assert c.experts
        chosen = ExpertSizes(c.experts.num_experts, c.experts.moe_router_topk, matrices_of(c, experts, t, dealt=True),
                             groups.experts)
    return Sizes(plan.b, plan.positions, c.hidden_size, c.num_attention_heads, t,
                 c.num_attention_heads // t * c.head_size, max(1, c.groups // t) * c.head_size,
                 matrices_of(c, experts, t), p.sequence_parallel, p.keep_gathered_inputs, p.recompute.granularity,
                 groups.tensor, groups.context, p.cp_comm_type, chosen)


@cache
def matrices_of(c: ModelConfig, experts: bool, t: int, dealt: bool = False) -> tuple[Matrix, ...]:
    """Return a layer's matrices on a rank, as they are declared; with `dealt` those of one of its experts."""
    found = []
    for _, tensor in leaves(declared_block(c, experts)):
        if tensor.decay and tensor.dealt == dealt:
            shape, split = tensor.local_shape(t)[dealt:], tensor.split
            rows, columns = shape[0], prod(shape[1:])
            found.append(Matrix(rows, columns, 0 if split is None else rows if split == dealt else columns))
    return tuple(found)


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

    Blocks of keys from other ranks keep no probabilities: whatever is recomputed besides, the backward computes their
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
    """Time the products of a layer's matrices. Each of the two gradients takes the same.

    A replicated matrix, the router's, is outside the regions: with sequence parallelism each rank has its positions.
    """
    n = sizes.b * sizes.s
    outside = n // (sizes.t if sizes.sequence_parallel else 1)
    found = sum(hardware.product(n if one.inside else outside, one.rows, one.columns) for one in sizes.matrices)
    if (experts := sizes.experts):
        local = experts.number // experts.group.ranks
        found += local * sum(hardware.product(max(1, n * experts.k // local), one.rows, one.columns)
                             for one in experts.matrices)
    return found


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
    columns = sum(one.inside for one in sizes.matrices)
    if (experts := sizes.experts):       # which move their copies into order and back, too
        columns += experts.k * (sum(one.inside for one in experts.matrices) + 2 * sizes.h)
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
