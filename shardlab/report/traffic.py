"""The ledger as a table, each line next to its prediction, and as JSON; and the papers' formulas next to its sums.

On several hosts both also split the ring's bytes into those inside hosts and those between hosts.
"""
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi_impl.comm.ledger import RING, Entry, Ledger, Total, bytes_between_hosts, ring_bytes, wire_bytes
from mpi_impl.comm.topology import Topology
from mpi_impl.runtime.files import write_whole
from mpi_impl.runtime.tables import aligned
from reference.config import ModelConfig, ParallelConfig
from reference.costs.volumes import PassCounts, data_parallel_traffic, pipeline_traffic, tensor_parallel_traffic
from reference.parallel.stages import edges_between_ranks, layouts_of_ranks
from shardlab.predict.predict import Totals


class Line(NamedTuple):
    """An entry of the ledger and its prediction; what is not predicted has none."""

    entry: Entry
    total: Total
    predicted: Total | None
    between: float | None = None    # ring bytes that cross between hosts; None on one host

    @property
    def as_predicted(self) -> bool:
        """Report whether this is what was predicted. Of an all-to-all that is the number of calls: how many elements
        travel depends on the data.
        """
        if self.predicted is None or self.total.calls != self.predicted.calls:
            return False
        return self.entry.operation == "all_to_all_rows" or self.total.elements == self.predicted.elements


def pipeline_ledger(topology: Topology) -> Ledger:
    """Return the sum of the ledgers of this rank's pipeline; called by all its ranks together."""
    together = Ledger()
    for ledger in topology.pipeline.allgather_objects(topology.world.ledger):
        together.add(ledger)
    return together


def compare(ledger: Ledger, predicted: Totals) -> list[Line]:
    """Return the predictions, in order, with zeros for those that never came; then the ledger's other entries."""
    lines = [Line(entry, ledger.totals.get(entry, Total()), total) for entry, total in predicted.items()]
    lines += [Line(entry, total, None) for entry, total in ledger.totals.items() if entry not in predicted]
    if not ledger.crossing:
        return lines
    return [line._replace(between=bytes_between_hosts(ledger, line.entry)) for line in lines]


def table(lines: list[Line]) -> str:
    """Format one line an entry. 'ring' is what this rank would send if each call ran as a ring.

    On several hosts the bytes inside hosts and between hosts follow, for a collective as the mean over the group's
    ranks.
    """
    several = any(line.between is not None for line in lines)
    head = ("group", "phase", "reason", "operation", "calls", "elements", "predicted", "", "wire bytes", "ring bytes",
            *(("inside hosts", "between hosts") if several else ()))
    body = [(f"{e.group} x{e.group_size}", e.phase, e.reason, e.operation, f"{total.calls:,}", f"{total.elements:,}",
             f"{p.elements:,}" if p else "", ("=" if line.as_predicted else "NOT") if p else "",
             f"{wire_bytes(e, total):,}", f"{ring_bytes(e, total):,.0f}",
             *(f"{part:,.0f}" for part in inside_and_between(line)))
            for line in lines for e, total, p, _ in [line]]
    return aligned([head, *body], left=(0, 1, 2, 3, 7))


def inside_and_between(line: Line) -> tuple[float, ...]:
    """Return a line's ring bytes inside hosts and between hosts; () on one host."""
    return () if line.between is None else (ring_bytes(*line[:2]) - line.between, line.between)


def summary(ledger: Ledger, predicted: Totals, c: ModelConfig, p: ParallelConfig, b: int, s: int,
            work: PassCounts) -> str:
    """Return the papers' statements, each with this run's number; and on several hosts the bytes between hosts."""
    own = s // p.context_parallel_size
    statements = [*([] if c.experts else in_layers(ledger, c, p, b, own, work)),
                  for_the_loss(ledger, c, b, own, p.context_parallel_size, work)]
    if p.context_parallel_size > 1:
        statements.append(between_positions(ledger, predicted, c, p, own, work))
    if n := edges_between_ranks(c, p):
        statements.append(between_stages(ledger, c, p, b, own, n * work.microbatches))
    if p.replicas > 1:
        statements.append(between_replicas(ledger, predicted, c, p, work))
    if ledger.crossing:
        statements.append(between_hosts(ledger))
    return "\n".join(statements)


def in_layers(ledger: Ledger, c: ModelConfig, p: ParallelConfig, b: int, s: int, work: PassCounts) -> list[str]:
    """Describe the traffic at the edges of a layer's tensor-parallel regions."""
    t, units = p.tensor_model_parallel_size, c.num_layers * work.microbatches
    reasons = [f"{branch} {end}" for branch in ("attention", "mlp") for end in ("input", "output", "input, again")]
    calls = {phase: sum(ledger.calls(phase=phase, reason=reason) for reason in reasons) / units
             for phase in ("forward", "backward")}
    ring = sum(RING[e.operation](total.elements, t) for e, total in ledger.totals.items()
               if e.phase in calls and e.reason in reasons) / units
    gathers_again = p.sequence_parallel and not p.keep_gathered_inputs
    what, forward, backward = (("All-gathers and reduce-scatters", 4, 6 if gathers_again else 4)
                               if p.sequence_parallel else ("All-reduces", 2, 2))
    factor = 10 if gathers_again else 8
    return [f"{what} a layer and microbatch: {calls['forward']:g} forward, {calls['backward']:g} backward. "
            f"Predicted: {forward} and {backward}.",
            f"Ring elements a layer and microbatch: {ring:,.0f}. Predicted: {factor} b s h (t-1)/t = "
            f"{tensor_parallel_traffic(b, s, c.hidden_size, t, gathers_again):,.0f}."]


def for_the_loss(ledger: Ledger, c: ModelConfig, b: int, s: int, ranks: int, work: PassCounts) -> str:
    """Describe the traffic of the loss of logits that are sharded by vocabulary, if so many ranks with s positions each
    share a sample.
    """
    loss = sum(ledger.elements(phase="forward", reason=f"loss: {what}")
               for what in ("maximum", "logit of the target", "sum of exp")) / work.microbatches
    n, name = c.most_predicted(s, ranks), "s" if c.causal else "n"
    meaning = "" if c.causal else f", n = {n}, the positions that are predicted at most"
    return (f"Elements for the loss of a microbatch: {loss:,.0f}. Predicted: 3 b {name} = {3 * b * n:,}{meaning}. "
            f"Gathering the logits would take b {name} V = {b * n * c.vocab_size:,}.")


def between_positions(ledger: Ledger, predicted: Totals, c: ModelConfig, p: ParallelConfig, s: int,
                      work: PassCounts) -> str:
    """Describe what attention sends between context-parallel ranks, each with s positions."""
    n, units = p.context_parallel_size, c.num_layers * work.microbatches
    measured, expected = (sum(RING[entry.operation](total.elements, n) for entry, total in totals.items()
                              if entry.group == "context" and entry.phase in ("forward", "backward")) / units
                          for totals in (ledger.totals, predicted))
    return (f"Elements that attention sends to ranks with other positions, a layer and microbatch ({p.cp_comm_type}, "
            f"each of c = {n} ranks has {s:,} of {n * s:,} positions): {measured:,.0f}. Predicted: {expected:,.0f}.")


def between_stages(ledger: Ledger, c: ModelConfig, p: ParallelConfig, b: int, s: int, messages: int) -> str:
    """Describe the forward's traffic between stages."""
    sent = ledger.elements(group="pipeline", operation="send", phase="forward") / messages
    part = " / t" if p.sent_parts > 1 else ""
    return (f"Elements that a rank sends on to the next stage, a microbatch: {sent:,.0f}. "
            f"Predicted: b s h{part} = {pipeline_traffic(b, s, c.hidden_size, p.sent_parts):,.0f}.")


def between_replicas(ledger: Ledger, predicted: Totals, c: ModelConfig, p: ParallelConfig, work: PassCounts) -> str:
    """Describe the traffic of gradients and parameters, counted unit by unit, next to the formula of the ZeRO paper."""
    d, m, psi = p.replicas, work.microbatches // work.steps, sum(one.size for one in layouts_of_ranks(c, p))
    instances, reasons = p.num_distributed_optimizer_instances, ("gradients", "gradients of experts", "parameters")
    phases = ("forward", "backward", "recompute", "reduction", "optimizer")
    measured, expected = (sum(RING[entry.operation](total.elements, entry.group_size) for entry, total in totals.items()
                              if entry.reason in reasons and entry.phase in phases) / work.steps
                          for totals in (ledger.totals, predicted))
    paper = data_parallel_traffic(psi, d, p.zero_stage, m, instances)
    formula = ("2", "2", "(m + 1)", "3 m")[p.zero_stage]
    between = f" + 2 Psi/N (I-1)/I between I = {instances} instances" if instances > 1 else ""
    tied = "" if c.untie_embeddings_and_output_weights else ", and a tied table is gathered for the logits, too"
    twice = ", layers recomputed in groups come twice" if ledger.calls(reason="parameters", phase="recompute") else ""
    why = f"; the embedding's backward needs no parameters{tied}{twice}" if p.zero_stage == 3 else ""
    return (f"Ring elements of gradients and parameters between the replicas, a step of m = {m}: {measured:,.0f}. "
            f"Predicted: {expected:,.0f}. ZeRO stage {p.zero_stage} in short: {formula} Psi (N-1)/N{between} = "
            f"{paper:,.0f}, with Psi = {psi:,}, N = {p.instance_size}{why}.")


def between_hosts(ledger: Ledger) -> str:
    """Describe the bytes of all lines inside and between hosts."""
    ring = sum(ring_bytes(entry, total) for entry, total in ledger.totals.items())
    between = sum(bytes_between_hosts(ledger, entry) for entry in ledger.totals)
    return (f"Ring bytes inside hosts: {ring - between:,.0f}; between hosts: {between:,.0f}, in rings in the order of "
            "ranks.")


def report(ledger: Ledger, predicted: Totals, c: ModelConfig, p: ParallelConfig, b: int, s: int,
           work: PassCounts) -> str:
    """Return the table and the statements for the end of a run, from the ledgers of one pipeline: all send the same."""
    lines, ranks = compare(ledger, predicted), p.pipeline_model_parallel_size
    who = "rank 0" if ranks == 1 else f"the {ranks} ranks of rank 0's pipeline, added up,"
    return f"What {who} sent (ledger):\n{table(lines)}\n{summary(ledger, predicted, c, p, b, s, work)}"


def rows(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return lines as objects for a program."""
    return [{**line.entry._asdict(), **line.total._asdict(), "wire_bytes": wire_bytes(line.entry, line.total),
             "ring_bytes": ring_bytes(line.entry, line.total),
             **dict(zip(("ring_bytes_inside_hosts", "ring_bytes_between_hosts"), inside_and_between(line))),
             "predicted_calls": p and p.calls, "predicted_elements": p and p.elements}
            for line in lines for p in [line.predicted]]


def write_json(path: str, lines: Sequence[Line]) -> None:
    """Write lines as a JSON list of objects. Raise UserError if that fails."""
    write_whole(path, json.dumps(rows(lines), indent=1) + "\n")
