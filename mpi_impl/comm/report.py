"""The ledger as a table, each line beside what the papers' formulas predict, and as JSON."""
import json
from pathlib import Path
from typing import NamedTuple

from mpi_impl.comm.ledger import Entry, Ledger, Total, ring_bytes, wire_bytes
from reference.config import ModelConfig, ParallelConfig
from reference.cost import pipeline_traffic, ring_all_reduce, tensor_parallel_traffic
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
    branches = {"forward": ("attention output", "mlp output"), "backward": ("attention input", "mlp input")}

    def layer(measure, phase):
        return sum(measure(phase=phase, reason=reason) for reason in branches[phase])

    ring = ring_all_reduce(layer(ledger.elements, "forward") + layer(ledger.elements, "backward"), t) / units
    loss = sum(ledger.elements(phase="forward", reason=f"loss: {what}")
               for what in ("maximum", "logit of the target", "sum of exp")) / work.microbatches
    statements = [
        f"All-reduces a layer and microbatch: {layer(ledger.calls, 'forward') / units:g} forward, "
        f"{layer(ledger.calls, 'backward') / units:g} backward. Predicted: 2 and 2.",
        f"Ring elements a layer and microbatch: {ring:,.0f}. Predicted: 8 b s h (t-1)/t = "
        f"{tensor_parallel_traffic(b, s, c.hidden_size, t):,.0f}.",
        f"Elements for the loss of a microbatch: {loss:,.0f}. Predicted: 3 b s = {3 * b * s:,}. "
        f"Gathering the logits would take b s V = {b * s * c.vocab_size:,}.",
    ]
    if n:
        sent = ledger.elements(operation="send", phase="forward") / work.microbatches / n
        formula, predicted = "b s h / t" if p.pieces > 1 else "b s h", pipeline_traffic(b, s, c.hidden_size, p.pieces)
        statements.append(f"Elements that a rank sends on to the next stage, a microbatch: {sent:,.0f}. "
                          f"Predicted: {formula} = {predicted:,.0f}.")
    return "\n".join(statements)


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
