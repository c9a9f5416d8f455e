"""The messages between replicas, and those that end a step, as formulas. The whole run's: traffic.py."""
from collections.abc import Iterable
from typing import NamedTuple

from reference.config import ModelConfig, ParallelConfig
from reference.models.stage import has_embedding, has_head
from reference.parallel.layout import SEVERAL, SHARED_BLOCK, Bucket, Layout, Piece, shared_pieces, unit_of
from reference.parallel.stages import stages_of_ranks


class Traffic(NamedTuple):
    """All messages of one kind of collective, for one reason, by the ranks of one pipeline in a whole run."""

    operation: str
    group: str       # of the topology
    phase: str
    reason: str
    calls: int
    elements: int
    formula: str     # of the elements, in each microbatch (or step, if it says so)


def replicas(p: ParallelConfig) -> str:
    """Return the name of the group that holds the same parameters."""
    return "data" if p.context_parallel_size == 1 else "replicas"


def sharders(p: ParallelConfig) -> str:
    """Return the name of the group that shards one copy of the model's states."""
    return "shards" if p.num_distributed_optimizer_instances > 1 else replicas(p)


def owners(p: ParallelConfig) -> str:
    """Return the name of the group that owns the whole model between its ranks."""
    return "world" if p.zero_stage else "model" if p.expert_model_parallel_size == 1 else "holders"


def by_kind(p: ParallelConfig, operation: str, phase: str, reason: str, times: int, buckets: list[Bucket],
            formula: str, of_experts: str = "") -> list[Traffic]:
    """Predict a collective of these buckets, among the ranks that share each: all replicas or an instance, or d c / e.
    """
    found = []
    for dealt, group, why in ((False, sharders(p), reason), (True, "expert replicas", of_experts or reason)):
        sizes = [bucket.size for bucket in buckets if bucket.dealt == dealt]
        if sizes or not dealt:
            found.append(Traffic(operation, group, phase, why, times * len(sizes), times * sum(sizes), formula))
    return found


def reduction(p: ParallelConfig, layouts: list[Layout], m: int, steps: int) -> list[Traffic]:
    """Predict the reduction of gradients: once a step, or with ZeRO-2 and 3 after every microbatch.

    With hybrid sharding each step ends with the sum of a rank's shard over the instances, bucket by bucket.
    """
    operation = "reduce_scatter" if p.zero_stage else "all_reduce"
    times, each = (m, "") if p.zero_stage >= 2 else (steps, ", a step")
    buckets = [bucket for one in layouts for bucket in one.buckets]
    found = by_kind(p, operation, "reduction", "gradients", times, buckets, f"parameters of the ranks{each}",
                    "gradients of experts")
    if p.num_distributed_optimizer_instances > 1:
        found.append(Traffic("all_reduce", "instances", "reduction", "gradients", steps * len(buckets),
                             steps * sum(layout.shard_size for layout in layouts), "shards of the ranks, a step"))
    return found


def published_parameters(p: ParallelConfig, layouts: list[Layout], steps: int) -> list[Traffic]:
    """Predict ZeRO-1's and 2's gathering of the updated parameters."""
    if p.zero_stage not in (1, 2):
        return []
    return by_kind(p, "all_gather", "optimizer", "parameters", steps,
                   [bucket for one in layouts for bucket in one.buckets], "parameters of the ranks, a step")


def gathered_parameters(c: ModelConfig, p: ParallelConfig, layouts: list[Layout], m: int, e: int) -> list[Traffic]:
    """Predict ZeRO-3's gathering of every unit before its use. The embedding's backward needs no parameters.

    Recomputed layers cost no more, except in groups of several: in the backward all but the last are gathered twice.
    """
    if p.zero_stage != 3:
        return []
    found: dict[str, list[Bucket]] = {"forward": [], "backward": [], "recompute": []}
    for layout, stages in zip(layouts, stages_of_ranks(c, p)):
        for units in (edge_units(c, layout), *(block_units(p.recompute.groups(held)) for held in stages.values())):
            for phase, names in units.items():
                found[phase] += [bucket for name in names for bucket in layout.buckets_of(name)]
    return [one for phase, of, times, formula in (
                ("forward", "forward", m, "parameters of the ranks"),
                ("backward", "backward", m, "the same without the embedding's"),
                ("recompute", "recompute", m, "of layers recomputed in groups"),
                ("evaluation", "forward", e, "parameters of the ranks"))
            for one in by_kind(p, "all_gather", phase, "parameters", times, found[of], formula)]


def edge_units(c: ModelConfig, layout: Layout) -> dict[str, list[str]]:
    """Return the units to gather for a rank's embedding and head, if it has them."""
    tensors = layout.tensors
    embedding, heads = [f"embedding.{name}" for name in ("word", "position", "token_type")], []
    if has_head(tensors, c):
        heads = [name for name, subtree in vars(tensors).items() if subtree and name not in SEVERAL]
        heads += ["embedding.word"] if c.tied else []
    return {"forward": [*(embedding if has_embedding(tensors) else []), *heads], "backward": heads}


def block_units(groups: list[tuple[list[int], bool]]) -> dict[str, list[str]]:
    """Return the units to gather for a stage's layers, by the phase in which the gathering begins: one turn ahead."""
    turns = [turn for group, recompute in reversed(groups) for turn in (
        *((layer, "recompute") for layer in group[:-1] if recompute),
        *((layer, "backward") for layer in reversed(group)))]
    begun = [turns[0][1], *(phase for _, phase in turns)]
    return {"forward": [f"blocks.{layer}" for group, _ in groups for layer in group]} | {
        phase: [f"blocks.{layer}" for (layer, _), then in zip(turns, begun) if then == phase]
        for phase in ("backward", "recompute")}


def copies(c: ModelConfig, p: ParallelConfig, layouts: list[Layout], steps: int, replica: int) -> list[Traffic]:
    """Predict the sums of gradients of replicated tensors for which several ranks have partial sums.

    The first and the last stage share a tied table, if they are on two ranks, and layers that share their parameters
    make all stages share a block. With sequence parallelism, tensors that are replicated over t have seen a shard of
    the sequence. Copies of one shard have been used for other heads of queries. A replica sums only its own elements.
    """
    owned = [layout.pieces(replica % p.shards) for layout in layouts]
    tables = [elements(piece for piece in pieces if piece.of.name == "embedding.word") for pieces in owned]
    replicated = [elements(piece for piece in pieces if piece.of.tensor.split is None and not piece.of.tensor.dealt)
                  for pieces in owned]
    part, found = f" / {'d' if p.context_parallel_size == 1 else '(c d)'}" if p.zero_stage else "", []
    if p.num_distributed_optimizer_instances > 1:
        part = f" / {p.shards}"
    if sum("embedding.word" in layout.bucket_of for layout in layouts) > 1:
        found.append(all_reduces("embedding", "tied embedding", tables, steps, f"2 h V/t{part}, a step"))
    if c.share_layers and p.pipeline_model_parallel_size > 1:
        blocks = [elements(piece for piece in pieces if unit_of(piece.of.name) == SHARED_BLOCK) for pieces in owned]
        found.append(all_reduces("pipeline", "shared block", blocks, steps, f"a block{part}, a step"))
    if p.sequence_parallel:
        found.append(all_reduces("tensor", "replicated gradients", replicated, steps, f"not split by t{part}, a step"))
    shared = [shared_pieces(pieces) for pieces in owned]
    for n in sorted({n for pieces in shared for n in pieces}):
        group = "tensor" if n == p.tensor_model_parallel_size else "copies"
        sizes = [elements(pieces.get(n, ())) for pieces in shared]
        found.append(all_reduces(group, f"gradients of {n} copies", sizes, steps, f"split by t/{n}{part}, a step"))
    return found


def elements(pieces: Iterable[Piece]) -> int:
    return sum(piece.size for piece in pieces)


def all_reduces(group: str, reason: str, sizes: list[int], steps: int, formula: str) -> Traffic:
    """Predict all-reduces of these numbers of elements on the ranks of the pipeline, none for 0."""
    return Traffic("all_reduce", group, "reduction", reason, steps * sum(size > 0 for size in sizes),
                   steps * sum(sizes), formula)


def losses_of_experts(c: ModelConfig, p: ParallelConfig, steps: int, ranks: int) -> list[Traffic]:
    """Predict the sums of the load-balancing loss and the z-loss, over all ranks that have a part of them."""
    groups = ("tensor",) * p.sequence_parallel + (replicas(p), "pipeline") if c.experts else ()
    return [Traffic("all_reduce", group, "reduction", "losses of experts", steps * ranks, 2 * steps * ranks,
                    "2 a rank, a step") for group in groups]


def loss(p: ParallelConfig, phase: str, times: int, ranks: int, heads: int, each: str) -> list[Traffic]:
    """Predict the loss's sum over the replicas and its broadcast from the last stage: a number for each head."""
    formula = f"{'1' if heads == 1 else 'heads'} a rank, {each}"
    return [Traffic("all_reduce", replicas(p), phase, "loss", times * ranks, times * ranks * heads, formula),
            Traffic("broadcast", "pipeline", phase, "loss", times * ranks, times * ranks * heads, formula)]
