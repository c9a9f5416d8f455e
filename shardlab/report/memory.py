"""The bytes that each rank holds: measured, predicted, and by the papers' formulas."""
from collections.abc import Sequence
from typing import NamedTuple

from mpi_impl.runtime.tables import aligned, verdict
from mpi_impl.training.trainer import Held, Trainer
from reference.config import ParallelConfig
from reference.costs.parameters import parameters_of_stage
from reference.parallel.model_states import model_states
from reference.parallel.stages import layers_of_rank
from reference.precision import Precision
from shardlab.predict.predict import Predicted

# For stages 0 to 3: w bytes a parameter, g a gradient, K of Adam's, Psi parameters, N replicas.
FORMULAS = ("(w + g + K) Psi", "(w + g) Psi + K Psi/N", "w Psi + (g + K) Psi/N", "(w + g + K) Psi/N")
MIXED = ((2, 2, 12), (2, 4, 12))     # w, g, K in mixed precision: the paper's, and with float32 main gradients


class RankMemory(NamedTuple):
    """One rank's bytes."""

    psi: int              # parameters of the rank's shard of the model, without buckets' padding
    padding: int          # elements of padding in the buckets
    held: Held
    expected: Held        # as predicted
    even: bool            # whether activations are predicted only for routers that choose evenly

    @property
    def compared(self) -> list[tuple[str, int, int]]:
        """Return the name, measurement and prediction of each part; activations if they are measured, and predicted."""
        known = self.held.activations and not self.even
        return [(name, getattr(self.held, name), value) for name, value in self.expected._asdict().items()
                if known or name not in ("activations", "recomputed")]

    @property
    def as_predicted(self) -> bool:
        return all(found == value for _, found, value in self.compared)


def rank_memory(trainer: Trainer, predicted: Predicted) -> RankMemory:
    """Return this rank's bytes, after its steps."""
    parallel, layout = trainer.topology.config, trainer.state.layout
    psi = parameters_of_stage(trainer.state.model, parallel.tensor_model_parallel_size,
                              layers_of_rank(trainer.state.stages), parallel.expert_model_parallel_size)
    return RankMemory(psi, layout.size - psi, trainer.held(), predicted.held, predicted.even)


def all_ranks(trainer: Trainer, predicted: Sequence[Predicted]) -> list[RankMemory]:
    """Return every rank's bytes; called by all of them together."""
    topology = trainer.topology
    return topology.world.allgather_objects(rank_memory(trainer, predicted[topology.place.pipeline]))


def report(trainer: Trainer, predicted: Sequence[Predicted]) -> str:
    """Tabulate the bytes of all ranks after a run; called by all of them together, identical on every rank. Ranks with
    the same bytes share a row.
    """
    everyone = all_ranks(trainer, predicted)
    parallel, precision = trainer.topology.config, trainer.state.precision
    w, g, k = precision.bytes_each
    instances = parallel.num_distributed_optimizer_instances
    sharing = "replicas" if instances == 1 else f"replicas in each of {instances} instances"
    return "\n".join([
        "What each rank holds from step to step, in bytes of the arrays that exist (memory):",
        states_table(everyone, parallel), *while_table(everyone), "",
        f"N = {parallel.instance_size} {sharing}, ZeRO stage {parallel.zero_stage}, {precision.compute}: w = {w} "
        f"bytes a parameter, g = {g} a gradient, K = {k} for "
        f"{'a float32 copy and ' * precision.half}Adam's two moments."
        + (" Muon's matrices have one." if parallel.whole_matrices else ""),
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
    formula = (FORMULAS[parallel.zero_stage] + " - moments of matrices" * parallel.whole_matrices
               + " - offloaded" * parallel.cpu_offload)
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
        rows.append([ranks, *(cell for found, value in pairs for cell in (
            f"{found:,}", f"{value:,}" if one.even else verdict(found, value)))])
    unknown = ["(How many tokens a rank's experts process depends on the data: activations are predicted for routers "
               "that choose evenly. For the bounds see docs/experts.md.)"] if any(one.even for one in everyone) else []
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
