"""The bytes that each rank holds: measured, by the papers' formulas, and by our ActivationInventory."""
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from mpi_impl.models.stage import turns
from mpi_impl.runtime.tables import aligned, verdict
from mpi_impl.training.trainer import Held, Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.costs.activation_inventory import ActivationInventory, rank_activations
from reference.costs.parameters import parameters_of_stage
from reference.models.bert import CLASSIFIERS
from reference.models.stage import LayersCache
from reference.parallel.layout import SHARED_BLOCK, Bucket
from reference.parallel.model_states import model_states, states_with_experts
from reference.parallel.stages import layers_of_rank, schedule_of
from reference.precision import Precision

# For stages 0 to 3: w bytes a parameter, g a gradient, K of Adam's, Psi parameters, N replicas.
FORMULAS = ("(w + g + K) Psi", "(w + g) Psi + K Psi/N", "w Psi + (g + K) Psi/N", "(w + g + K) Psi/N")
MIXED = ((2, 2, 12), (2, 4, 12))     # w, g, K in mixed precision: the paper's, and with float32 main gradients


class RankMemory(NamedTuple):
    """One rank's bytes."""

    psi: int              # parameters of the rank's shard of the model, without buckets' padding
    padding: int          # elements of padding in the buckets
    held: Held
    expected: Held        # by the formulas

    @property
    def compared(self) -> list[tuple[str, int, int]]:
        """Return the name, measurement and prediction of each part with a formula; activations if measured."""
        pairs = [(name, getattr(self.held, name), value) for name, value in self.expected._asdict().items()]
        return [(name, found, value) for name, found, value in pairs
                if value is not None and (self.held.activations or name not in ("activations", "recomputed"))]

    @property
    def as_predicted(self) -> bool:
        return all(found == value for _, found, value in self.compared)


def rank_memory(trainer: Trainer, b: int, s: int, m: int) -> RankMemory:
    """Return this rank's bytes, after steps of m microbatches of b sequences of s tokens on each replica."""
    parallel, layout = trainer.topology.config, trainer.state.layout
    psi = parameters_of_stage(trainer.state.model, parallel.tensor_model_parallel_size,
                              layers_of_rank(trainer.state.stages), parallel.expert_model_parallel_size)
    return RankMemory(psi, layout.size - psi, trainer.held(), predict(trainer, b, s, m))


def predict(trainer: Trainer, b: int, s: int, m: int) -> Held:
    """Return the same by formulas."""
    parallel, precision = trainer.topology.config, trainer.state.precision
    layout = trainer.state.layout
    experts = sum(bucket.size for bucket in layout.buckets if bucket.dealt)
    states = states_with_experts(layout.size, experts, parallel.shards, parallel.expert_model_parallel_size,
                                 parallel.zero_stage, *precision.bytes_each)
    parameters, gradients, optimizer = map(round, states)
    offloaded_parameters = parameters if parallel.cpu_offload and parallel.zero_stage == 3 else 0
    offloaded_optimizer = optimizer if parallel.cpu_offload else 0
    inventory = ActivationInventory(trainer.state.model, b, s, precision, parallel)
    actions = schedule_of(parallel, m).ranks[trainer.topology.pipeline.rank]
    peak: int | None
    recomputed: int | None
    peak, recomputed = rank_activations(inventory, trainer.state.stages, actions)
    if experts:                                # how many copies come to this rank's experts depends on the data
        peak = recomputed = None
    return Held(parameters - offloaded_parameters, gradients, optimizer - offloaded_optimizer,
                offloaded_parameters + offloaded_optimizer, gathered_bytes(trainer),
                unreduced_bytes(trainer, m, {action.kind for action in actions}), peak, recomputed)


def gathered_bytes(trainer: Trainer) -> int:
    """Return ZeRO-3's peak of whole parameters: a layer and the one that is used next, or the tables of the embedding
    and the logits. In a backward with recompute the next one is not always a neighbour.
    """
    config = trainer.topology.config
    if config.zero_stage < 3:
        return 0
    steps = [names for layers in trainer.state.stages.values() for names in units_in_use(trainer, layers, at_once=2)]
    for layers in trainer.state.stages.values():
        kept = [LayersCache(group, None if again else {}, None) for group, again in config.recompute.groups(layers)]
        order = [f"blocks.{layer}" for each in reversed(kept) for layer in turns(each)]
        steps += map(list, pairwise(order))
    buckets_of = trainer.state.layout.buckets_of
    return trainer.state.device_prototype.itemsize * max(
        sum(bucket.size for name in names for bucket in buckets_of(name)) for names in steps)


def unreduced_bytes(trainer: Trainer, m: int, kinds: Collection[str]) -> int | None:
    """Return the peak of whole gradients with ZeRO-2 and 3.

    A bucket is whole from the backward of its first unit until that of its last: a tied table's from the logits to the
    embedding. Then it is under way until the next one is complete, or the next microbatch needs it. With several stages
    on a rank, or a split backward, other microbatches come in between.
    """
    if trainer.topology.config.zero_stage < 2:
        return 0
    if len(trainer.state.stages) > 1 or "I" in kinds:
        return None
    (layers,), layout = trainer.state.stages.values(), trainer.state.layout
    steps = [list(dict.fromkeys(bucket for name in names for bucket in layout.buckets_of(name)))
             for names in reversed(units_in_use(trainer, layers, at_once=1))]
    whole, under_way, most = set[Bucket](), list[Bucket](), 0
    for i, step in list(enumerate(steps)) * min(m, 2):      # more microbatches repeat the second
        for bucket in step:
            if bucket in under_way:
                del under_way[:under_way.index(bucket) + 1]
            whole.add(bucket)
            most = max(most, elements(whole, under_way))
        if complete := [bucket for bucket in step if all(bucket not in later for later in steps[i + 1:])]:
            whole -= {*complete}
            most = max(most, elements(whole, under_way + complete))
            under_way = complete
    return trainer.state.main.itemsize * most


def elements(whole: Iterable[Bucket], under_way: Iterable[Bucket]) -> int:
    """Count the elements of buckets, of which each that is under way has room for its sum, too."""
    return sum(bucket.size for bucket in whole) + sum(each.size + each.size // each.parts for each in under_way)


def units_in_use(trainer: Trainer, layers: Sequence[int], at_once: int) -> list[list[str]]:
    """Return the units that a stage with these layers uses, step by step, `at_once` layers at a time."""
    blocks = [SHARED_BLOCK if trainer.state.model.share_layers else f"blocks.{layer}" for layer in layers]
    steps = [blocks[i:i + at_once] for i in range(len(blocks))]
    if 0 in layers:
        steps.insert(0, [unit for unit in trainer.state.layout.units if unit.startswith("embedding.")])
    if trainer.state.model.num_layers - 1 in layers:
        steps += units_of_head(trainer.state.model)
    return steps


def units_of_head(c: ModelConfig) -> list[list[str]]:
    """Return the same for everything after the layers."""
    if c.architecture == "gpt":
        return [["final_layernorm", "embedding.word" if c.tied else "output"]]
    return [["final_layernorm"], *(["lm_head", "embedding.word"] if head == "lm" else ["pooler", CLASSIFIERS[head]]
                                   for head in c.heads)]


def all_ranks(trainer: Trainer, b: int, s: int, m: int) -> list[RankMemory]:
    """Return every rank's bytes; called by all of them together."""
    return trainer.topology.world.allgather_objects(rank_memory(trainer, b, s, m))


def report(trainer: Trainer, b: int, s: int, m: int) -> str:
    """Tabulate the bytes of all ranks after a run; called by all of them together, identical on every rank.

    A microbatch is b sequences of s tokens, a replica's step m of those. Ranks with the same bytes share a row.
    """
    everyone = all_ranks(trainer, b, s, m)
    parallel, precision = trainer.topology.config, trainer.state.precision
    w, g, k = precision.bytes_each
    instances = parallel.num_distributed_optimizer_instances
    sharing = "replicas" if instances == 1 else f"replicas in each of {instances} instances"
    return "\n".join([
        "What each rank holds from step to step, in bytes of the arrays that exist (memory):",
        states_table(everyone, parallel), *while_table(everyone), "",
        f"N = {parallel.instance_size} {sharing}, ZeRO stage {parallel.zero_stage}, {precision.compute}: w = {w} "
        f"bytes a parameter, g = {g} a gradient, K = {k} for "
        f"{'a float32 copy and ' * precision.half}Adam's two moments.",
        f"Psi counts the parameters of the rank's layers, 1/t of each sharded one.{padding(everyone)}", "",
        "The formulas for rank 0, in this run's bytes and in mixed precision's: there w is 2 (as the paper writes it),",
        "K is 12 for a float32 copy and two moments, and g is 2 as in the paper, or 4.",
        formulas_table(everyone[0], parallel, precision)])


def padding(everyone: Sequence[RankMemory]) -> str:
    most = max(one.padding for one in everyone)
    return f" So that buckets divide by N, they are padded by {most:,} elements, which count in Psi." if most else ""


def states_table(everyone: Sequence[RankMemory], parallel: ParallelConfig) -> str:
    """Tabulate a row for each kind of rank: measured, then `=` or `NOT` and the formula's."""
    states = ("parameters", "gradients", "optimizer")
    rows = [["ranks", "Psi", *(cell for name in states for cell in (name, "predicted")), "sum", "predicted", "formula"]]
    formula = FORMULAS[parallel.zero_stage] + (" - offloaded" if parallel.cpu_offload else "")
    for ranks, one in distinct(everyone):
        pairs = [(getattr(one.held, name), getattr(one.expected, name)) for name in states]
        pairs.append((sum(found for found, _ in pairs), sum(value for _, value in pairs)))
        cells = (cell for found, value in pairs for cell in (f"{found:,}", verdict(found, value)))
        rows.append([ranks, f"{one.psi + one.padding:,}", *cells, formula])
    return aligned(rows, left=(0, len(rows[0]) - 1))


def while_table(everyone: Sequence[RankMemory]) -> list[str]:
    """Tabulate the peaks of everything else: the columns in which any rank has something."""
    columns = {"offloaded": "offloaded", "gathered": "gathered parameters", "unreduced": "unsent gradients",
               "activations": "activations", "recomputed": "computed again"}
    used = {name: title for name, title in columns.items() if any(getattr(one.held, name) for one in everyone)}
    if not used:
        return []
    rows = [["ranks", *(cell for title in used.values() for cell in (title, "predicted"))]]
    for ranks, one in distinct(everyone):
        pairs = [(getattr(one.held, name), getattr(one.expected, name)) for name in used]
        rows.append([ranks, *(cell for found, value in pairs for cell in
                              (f"{found:,}", "" if value is None else verdict(found, value)))])
    unknown = [] if all(one.expected.unreduced is not None for one in everyone) else [
        "(Where a rank has several stages, or a backward in two, microbatches overlap in their gradients: no formula.)"]
    if any(one.expected.activations is None for one in everyone):
        unknown.append("(How many tokens come to a rank's experts depends on the data: no formula for activations, "
                       "but see docs/experts.md for its bounds.)")
    return ["", "Besides these, elsewhere or for a while, the peaks:", aligned(rows), *unknown]


def formulas_table(one: RankMemory, parallel: ParallelConfig, precision: Precision) -> str:
    """Tabulate all stages of ZeRO, in this run's bytes and in the papers'."""
    sizes, n = list(dict.fromkeys([precision.bytes_each, *MIXED])), parallel.instance_size
    rows = [["stage", "formula", *(f"w = {a}, g = {g}, K = {k}" for a, g, k in sizes), "this run"]]
    for stage, formula in enumerate(FORMULAS):
        found = [sum(model_states(one.psi + one.padding, n, stage, *each)) for each in sizes]
        held = f"{one.held.states:,}" if stage == parallel.zero_stage else ""      # offloaded bytes included
        rows.append([str(stage), formula, *(f"{value:,.0f}" for value in found), held])
    return aligned(rows, left=(0, 1))


def distinct(everyone: Sequence[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Group ranks with the same bytes, as `0 to 3, 8`, with their bytes."""
    found: dict[RankMemory, list[int]] = {}
    for rank, one in enumerate(everyone):
        found.setdefault(one, []).append(rank)
    return [(spans(ranks), one) for one, ranks in found.items()]


def spans(ranks: Sequence[int]) -> str:
    """Format ranks: [0, 1, 2, 3, 8] -> `0 to 3, 8`."""
    firsts = [rank for rank in ranks if rank - 1 not in ranks]
    lasts = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in zip(firsts, lasts))
