"""The messages of a run, line by line, as formulas: the ledger's prediction. Letters: reference/config."""
from collections.abc import Collection
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.costs.replica_traffic import (Traffic, copies, gathered_parameters, loss, losses_of_experts, owners,
                                             published_parameters, reduction, replicas)
from reference.models.model import batch_type, sequences_of
from reference.parallel.stages import layouts_of_ranks, stages_of_ranks


class PassCounts(NamedTuple):
    """The number of passes of a run through the model, as one replica sees it."""

    steps: int
    microbatches: int               # over all steps, forward and backward
    evaluations: int
    evaluation_microbatches: int    # over all evaluations, forward only
    skipped: int = 0                # steps that changed no parameter


def traffic(c: ModelConfig, p: ParallelConfig, b: int, s: int, work: PassCounts, replica: int = 0) -> list[Traffic]:
    """Predict every message of a run, in the order of a step; with ZeRO, of the shard that `replica` owns.

    b is the micro-batch size, s the sequence length, or with context parallelism a rank's s/c. A layer all-reduces
    b s h elements twice forward (g) and twice backward (f); in a ring that is 4 x 2 (t-1)/t b s h = 8 b s h (t-1)/t
    elements a layer and microbatch (1909.08053, section 3). With sequence parallelism each is an all-gather or a
    reduce-scatter, forward and backward (2205.05198, section 4.2.2). Between stages on different ranks, b s h elements
    go each way, or b s h / t from each of t ranks where the receivers gather them (2104.04473, section 4.1).
    """
    m, e, steps, evaluations = work.microbatches, work.evaluation_microbatches, work.steps, work.evaluations
    own = s // p.context_parallel_size
    layouts = layouts_of_ranks(c, p)
    ranks, heads = len(layouts), len(c.heads)
    return in_words_of_c(p, [
        *data(c, p, b, s, m + e, steps, evaluations, ranks),
        *forward(c, p, b, own, "forward", m),
        *backward(c, p, b, own, m),
        *layers(c, p, b, own, "recompute", m, recomputed_layers(c, p)),
        *gathered_parameters(c, p, layouts, m, e),
        *reduction(p, layouts, m, steps),
        *copies(c, p, layouts, steps, replica),
        *loss(p, "reduction", steps, ranks, heads, "a step"),
        *losses_of_experts(c, p, steps, ranks),
        Traffic("all_reduce", owners(p), "optimizer", "gradient norm", steps * ranks, steps * ranks,
                "1 a rank, a step"),
        *published_parameters(p, layouts, steps - work.skipped),
        *forward(c, p, b, own, "evaluation", e),
        *loss(p, "evaluation", evaluations, ranks, heads, "an evaluation"),
    ])


def in_words_of_c(p: ParallelConfig, lines: list[Traffic]) -> list[Traffic]:
    """Write s/c for a rank's positions into the formulas, where context parallelism deals them out."""
    if p.context_parallel_size == 1:
        return lines
    return [line if line.group == "context" or line.reason == "batch" else
            line._replace(formula=line.formula.replace("b s", "b s/c")) for line in lines]


# ---- inside a replica -----------------------------------------------------------------------------------------------


def data(c: ModelConfig, p: ParallelConfig, b: int, s: int, microbatches: int, steps: int, evaluations: int,
         ranks: int) -> list[Traffic]:
    """Predict the samples; and for weighted losses, the sum of a global batch's weights.

    In a GPT the first and the last rank of a pipeline read samples. In a BERT all do: every layer must know the
    padding.
    """
    kind = batch_type(c)
    readers, row = (min(2, ranks), "s + 1") if c.causal else (ranks, kind.width(s))
    found = [Traffic("broadcast", "tensor", "data", "batch", readers * microbatches,
                     readers * microbatches * b * kind.width(s), f"{f'{readers} ' if readers > 1 else ''}b ({row})")]
    if not c.causal:
        batches = (steps + evaluations) * ranks
        found.append(Traffic("all_reduce", replicas(p), "data", "weights of the losses", batches,
                             batches * len(c.heads), "heads a rank, a batch"))
        if c.experts:
            found.append(Traffic("all_reduce", "data", "data", "tokens without padding", steps * ranks, steps * ranks,
                                 "1 a rank, a step"))
    return found


def bsh(c: ModelConfig, b: int, s: int) -> int:
    """Return the elements of [b, s, h] for b samples, each of which may be several sequences."""
    return b * sequences_of(c) * s * c.hidden_size


def forward(c: ModelConfig, p: ParallelConfig, b: int, s: int, phase: str, m: int) -> list[Traffic]:
    """Predict the forward of m microbatches, of which a rank has s positions."""
    x, bs, found = bsh(c, b, s), b * s, []
    if "lm" in c.heads:
        found = [*edge(p, "enter", phase, "logits input", m, x, "b s h"),
                 *(Traffic("all_reduce", "tensor", phase, f"loss: {what}", m, m * bs, "b s")
                   for what in ("maximum", "sum of exp", "logit of the target"))]
    if p.sequence_parallel:
        found += [Traffic("broadcast", "tensor", phase, f"loss: {head}", m, m * b, "b")
                  for head in c.heads if head != "lm"]
    return [
        *edge(p, "leave", phase, "embedding output", m, x, "b s h"),
        *layers(c, p, b, s, phase, m, range(c.num_layers)),
        *between_stages(c, p, phase, "activation", m, x),
        *found,
    ]


def layers(c: ModelConfig, p: ParallelConfig, b: int, s: int, phase: str, m: int,
           which: Collection[int]) -> list[Traffic]:
    """Predict the forward of m microbatches through these layers."""
    x, number = bsh(c, b, s), "recomputed layers" if phase == "recompute" else "L"
    found = [one for branch, times in branches(c, which).items()
             for one in (*edge(p, "enter", phase, f"{branch} input", m * times, x, f"{number} b s h"),
                         *edge(p, "leave", phase, f"{branch} output", m * times, x, f"{number} b s h"))]
    return [*found, *dispatches(c, p, b, s, phase, m * branches(c, which)["experts"]),
            *contexts(c, p, b * sequences_of(c) * s, phase, m * len(which), number)]


def backward(c: ModelConfig, p: ParallelConfig, b: int, s: int, m: int) -> list[Traffic]:
    """Predict the backward of m microbatches: the adjoint of every edge of a region."""
    x, times = bsh(c, b, s), branches(c, range(c.num_layers))
    return [
        *(edge(p, "enter_backward", "backward", "logits input", m, x, "b s h") if "lm" in c.heads else []),
        *(one for branch in ("mlp", "attention")
          for one in (*edge(p, "leave_backward", "backward", f"{branch} output", m * times[branch], x, "L b s h"),
                      *edge(p, "enter_backward", "backward", f"{branch} input", m * times[branch], x, "L b s h"))),
        *edge(p, "leave_backward", "backward", "experts output", m * times["experts"], x, "L b s h"),
        *edge(p, "enter_backward", "backward", "experts input", m * times["experts"], x, "L b s h", kept=True),
        *dispatches(c, p, b, s, "backward", m * times["experts"]),
        *contexts(c, p, b * sequences_of(c) * s, "backward", m * c.num_layers, "L"),
        *between_stages(c, p, "backward", "gradient", m, x),
        *edge(p, "leave_backward", "backward", "embedding output", m, x, "b s h"),
    ]


# The collective at each edge of a tensor-parallel region (reference/comm/mappings.py): f and g, or with sequence
# parallelism what replaces them.
EDGES = {"enter": ("", "all_gather"), "leave": ("all_reduce", "reduce_scatter"),
         "enter_backward": ("all_reduce", "reduce_scatter"), "leave_backward": ("", "all_gather")}


def edge(p: ParallelConfig, name: str, phase: str, reason: str, calls: int, x: int, formula: str,
         kept: bool = False) -> list[Traffic]:
    """Predict the collectives of x elements at an edge; a backward gathers an input again unless it was kept."""
    operation = EDGES[name][p.sequence_parallel]
    found = [(operation, reason)] if operation else []
    if name == "enter_backward" and p.sequence_parallel and not (kept or p.keep_gathered_inputs):
        found = [("all_gather", f"{reason}, again"), *found]
    return [Traffic(operation, "tensor", phase, why, calls, calls * x, formula) for operation, why in found]


def branches(c: ModelConfig, which: Collection[int]) -> dict[str, int]:
    """Count the branches of each kind in these layers. A shared expert is an MLP beside the others."""
    experts = sum(map(c.has_experts, which))
    shared = experts if c.experts and c.experts.moe_shared_expert_intermediate_size else 0
    return {"attention": len(which), "mlp": len(which) - experts + shared, "experts": experts}


def dispatches(c: ModelConfig, p: ParallelConfig, b: int, s: int, phase: str, times: int) -> list[Traffic]:
    """Predict the choices and weights that enter the region of experts, and the all-to-alls there and back.

    Of the b s k copies of a microbatch's tokens, (e-1)/e travel to other ranks if the routers choose evenly. How many
    do travel depends on the data: the ledger has the count. (Each of t ranks sends them: layers/experts.py.)
    """
    if c.experts is None:
        return []
    e, copies, found = p.expert_model_parallel_size, b * sequences_of(c) * s * c.experts.moe_router_topk, []
    if phase == "backward":
        found += edge(p, "enter_backward", phase, "experts: weights", times, copies, "L b s k", kept=True)
    else:
        if p.context_parallel_size > 1 and phase != "evaluation":
            found.append(Traffic("all_reduce", "context", phase, "experts: choices of sequences", times,
                                 times * b * sequences_of(c) * c.experts.num_experts, "L b E"))
        found += [*edge(p, "enter", phase, "experts: choices", times, copies, "L b s k"),
                  *edge(p, "enter", phase, "experts: weights", times, copies, "L b s k")]
    if e > 1:
        travel = times * copies * c.hidden_size * (e - 1) // e
        found += [Traffic("all_to_all_rows", "expert", phase, f"experts: {what}", times, travel,
                          "L b s k h (e-1)/e, if the routers choose evenly") for what in ("dispatch", "combine")]
        if phase != "backward":
            found.append(Traffic("all_gather", "expert", phase, "experts: counts of copies", times,
                                 times * e * c.experts.num_experts, "L e E"))
    return found


def contexts(c: ModelConfig, p: ParallelConfig, tokens: int, phase: str, times: int, number: str) -> list[Traffic]:
    """Predict attention's messages between context-parallel ranks, each with so many tokens, in `times` layers."""
    ranks, backward = p.context_parallel_size, phase == "backward"
    if ranks == 1:
        return []
    t, d = p.tensor_model_parallel_size, c.head_size
    queries, keys = tokens * c.num_attention_heads // t * d, tokens * max(1, c.groups // t) * d      # of a rank
    kv, what, d_what = 2 * keys, "keys and values", "gradients of keys and values"
    if p.cp_comm_type == "a2a":
        return [Traffic("all_to_all", "context", phase, what, times, times * n, f"{number} b s/c d {heads}/t")
                for what, n, heads in (("queries", queries, "a"), ("keys", keys, "g"), ("values", keys, "g"),
                                       ("attended values", queries, "a"))]
    if p.cp_comm_type == "all_gather":
        found = [("all_gather", what)] + [("reduce_scatter", d_what)] * backward
        return [Traffic(operation, "context", phase, what, times, times * kv * ranks, f"{number} 2 b s d g/t")
                for operation, what in found]
    hops = times * (ranks - 1)
    return [Traffic("send", "context", phase, what, hops, hops * kv, f"{number} (c - 1) 2 b s/c d g/t")
            for what in (what, *[d_what] * backward)]


def recomputed_layers(c: ModelConfig, p: ParallelConfig) -> list[int]:
    """List the layers of the whole model that each backward recomputes."""
    return [layer for stages in stages_of_ranks(c, p) for held in stages.values()
            for group, recompute in p.recompute.groups(held) if recompute for layer in group]


def between_stages(c: ModelConfig, p: ParallelConfig, phase: str, content: str, m: int, x: int) -> list[Traffic]:
    """Predict the transfers of m microbatches, each of which crosses every edge between two ranks once."""
    n, part = m * edges(c, p), " / t" if p.sent_parts > 1 else ""
    sent = Traffic("send", "pipeline", phase, content, n, n * x // p.sent_parts, f"edges b s h{part}")
    gathered = Traffic("all_gather", "tensor", phase, f"gathered {content}", n, n * x, "edges b s h")
    return [sent, gathered] if p.scattered_parts > 1 else [sent]


def edges(c: ModelConfig, p: ParallelConfig) -> int:
    """Count the edges between ranks: p v - 1 if no two neighbouring stages are on the same rank."""
    rank_of = {stage: r for r, stages in enumerate(stages_of_ranks(c, p)) for stage in stages}
    return sum(rank_of[stage] != rank_of[stage + 1] for stage in range(len(rank_of) - 1))
