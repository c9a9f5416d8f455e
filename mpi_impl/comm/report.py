"""The ledger as a table, each line beside what the papers' formulas predict, and as JSON."""
import json
from pathlib import Path
from typing import NamedTuple

from mpi_impl.comm.ledger import RING, Entry, Ledger, Total, ring_bytes, wire_bytes
from reference.config import ModelConfig, ParallelConfig
from reference.cost import data_parallel_traffic, pipeline_traffic, tensor_parallel_traffic
from reference.stages import layouts_of_ranks
from reference.traffic import Traffic, Work, edges, traffic


class Line(NamedTuple):
    """One entry of the ledger and its prediction; an entry that no formula foresees has none."""

    entry: Entry
    total: Total
    predicted: Traffic | None

    @property
    def as_predicted(self) -> bool:
        return self.predicted is not None and self.total == (self.predicted.calls, self.predicted.elements)


def compare(ledger: Ledger, predictions: list[Traffic]) -> list[Line]:
    """What was predicted, in that order, with a total of zero where it never came; then the ledger's other entries."""
    found = {(e.operation, e.group, e.phase, e.reason): (e, total) for e, total in ledger.totals.items()}
    lines = [Line(*found.pop(p[:4], (Entry(p.operation, p.group, 1, p.phase, p.reason, "float32"), Total())), p)
             for p in predictions if p.calls]
    return lines + [Line(e, total, None) for e, total in found.values()]


def table(lines: list[Line]) -> str:
    """One line an entry. 'ring' is what this rank would send if each call ran as a ring."""
    head = ("group", "phase", "reason", "operation", "calls", "elements", "wire bytes", "ring bytes",
            "predicted elements", "formula")
    body = [(f"{e.group} x{e.group_size}", e.phase, e.reason, e.operation, f"{total.calls:,}", f"{total.elements:,}",
             f"{wire_bytes(e, total):,}", f"{ring_bytes(e, total):,.0f}",
             f"{p.elements:,}" if p else "", ("= " if line.as_predicted else "NOT ") + p.formula if p else "")
            for line in lines for e, total, p in [line]]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    numbers = range(4, 9)
    return "\n".join("  ".join(cell.rjust(w) if i in numbers else cell.ljust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip()
                     for row in [head, *body])


def summary(ledger: Ledger, c: ModelConfig, p: ParallelConfig, b: int, s: int, work: Work) -> str:
    """The papers' statements, each with the number that this run measured."""
    t, units, n = p.tensor_model_parallel_size, c.num_layers * work.microbatches, edges(c, p)
    edges_of_layers = tuple(f"{branch} {end}" for branch in ("attention", "mlp")
                            for end in ("input", "output", "input, again"))

    def calls(phase):
        return sum(ledger.calls(phase=phase, reason=reason) for reason in edges_of_layers) / units

    ring = sum(RING[e.operation](total.elements, t) for e, total in ledger.totals.items()
               if e.phase in ("forward", "backward") and e.reason in edges_of_layers) / units
    again = p.sequence_parallel and not p.keep_gathered_inputs
    cut = p.sequence_parallel
    kind, backward = ("All-gathers and reduce-scatters", 6 if again else 4) if cut else ("All-reduces", 2)
    loss = sum(ledger.elements(phase="forward", reason=f"loss: {what}")
               for what in ("maximum", "logit of the target", "sum of exp")) / work.microbatches
    statements = [
        f"{kind} a layer and microbatch: {calls('forward'):g} forward, {calls('backward'):g} backward. "
        f"Predicted: {4 if cut else 2} and {backward}.",
        f"Ring elements a layer and microbatch: {ring:,.0f}. Predicted: {10 if again else 8} b s h (t-1)/t = "
        f"{tensor_parallel_traffic(b, s, c.hidden_size, t, again):,.0f}.",
        f"Elements for the loss of a microbatch: {loss:,.0f}. Predicted: 3 b s = {3 * b * s:,}. "
        f"Gathering the logits would take b s V = {b * s * c.vocab_size:,}.",
    ]
    if n:
        sent = ledger.elements(operation="send", phase="forward") / work.microbatches / n
        formula, predicted = "b s h / t" if p.sent_parts > 1 else "b s h", pipeline_traffic(b, s, c.hidden_size,
                                                                                            p.sent_parts)
        statements.append(f"Elements that a rank sends on to the next stage, a microbatch: {sent:,.0f}. "
                          f"Predicted: {formula} = {predicted:,.0f}.")
    if p.data_parallel_size > 1:
        statements.append(between_replicas(ledger, c, p, work))
    return "\n".join(statements)


def between_replicas(ledger: Ledger, c: ModelConfig, p: ParallelConfig, work: Work) -> str:
    """Gradients and parameters, beside the formulas of the ZeRO paper."""
    d, m, psi = p.data_parallel_size, work.microbatches // work.steps, sum(one.size for one in layouts_of_ranks(c, p))
    ring = sum(RING[e.operation](total.elements, d) for e, total in ledger.totals.items()
               if e.reason in ("gradients", "parameters") and e.phase not in ("evaluation", "sampling")) / work.steps
    formula = ("2 Psi", "2 Psi", "(m + 1) Psi", "3 m Psi")[p.zero_stage]
    why = (" (The embedding's backward needs no parameters; a word table that gives the logits, too, is gathered for "
           "both.)" if p.zero_stage == 3 else "")
    return (f"Ring elements of gradients and parameters between the replicas, a step of m = {m}: {ring:,.0f}. "
            f"Predicted with ZeRO stage {p.zero_stage}: {formula} (N-1)/N = "
            f"{data_parallel_traffic(psi, d, p.zero_stage, m):,.0f}, with Psi = {psi:,}, N = {d}.{why}")


def report(ledger: Ledger, c: ModelConfig, p: ParallelConfig, b: int, s: int, work: Work) -> str:
    """Table and statements for the end of a run, from the ledgers of a pipeline's ranks: all pipelines do alike."""
    lines, ranks = compare(ledger, traffic(c, p, b, s, work)), p.pipeline_model_parallel_size
    who = "rank 0" if ranks == 1 else f"the {ranks} ranks of rank 0's pipeline, added up,"
    return f"What {who} sent (ledger):\n{table(lines)}\n{summary(ledger, c, p, b, s, work)}"


def write_json(path: str, ledger: Ledger, c: ModelConfig, p: ParallelConfig, b: int, s: int, work: Work) -> None:
    """The same lines as a JSON list of objects."""
    lines = compare(ledger, traffic(c, p, b, s, work))
    rows = [{**line.entry._asdict(), **line.total._asdict(), "wire_bytes": wire_bytes(line.entry, line.total),
             "ring_bytes": ring_bytes(line.entry, line.total),
             "predicted_calls": line.predicted.calls if line.predicted else None,
             "predicted_elements": line.predicted.elements if line.predicted else None,
             "formula": line.predicted.formula if line.predicted else None} for line in lines]
    Path(path).write_text(json.dumps(rows, indent=1) + "\n")
