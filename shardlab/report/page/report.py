"""The option --report: the page of a run. All its data are one JSON, made of what the run has recorded."""
import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from math import isfinite
from typing import Any

from mpi_impl.comm.clock import Clock, DeviceClock, VirtualClock
from mpi_impl.comm.ledger import Ledger
from mpi_impl.comm.topology import Topology, place
from mpi_impl.comm.trace import Slice
from mpi_impl.runtime.files import write_whole
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, ParallelConfig
from reference.costs.parameters import parameters
from reference.costs.volumes import PassCounts
from reference.parallel.data_parallel import samples_of
from reference.parallel.stages import schedule_of, stages_of_ranks
from reference.precision import Precision
from shardlab.predict.group import survey
from shardlab.predict.predict import Predicted, sent_by_pipeline
from shardlab.report import memory, traffic
from shardlab.report.charts import AXES, COLORS, MEMORY, WORDS
from shardlab.report.memory import RankMemory, all_ranks
from shardlab.report.page.played_step import played_step
from shardlab.report.page.senders import Sent, members, sent_by_all
from shardlab.report.page.shapes import work_of
from shardlab.report.summary import SummaryLine, summary_lines
from shardlab.report.timelines.tracing import TracedSteps
from shardlab.report.traffic import Line

MOST_LOSSES = 1_000       # on the page: of a longer run, every n-th, and the last
GROUPS = "tensor", "pipeline", "data", "context", "replicas", "shards", "instances", "expert", "expert replicas"
MOST_SENT = 10_000        # rows of who sends what to whom; beyond that, all reasons of a group together


@dataclass(frozen=True)
class ReportedRun:
    """The facts of a run that its page tells, besides its recordings."""

    title: str                                  # "GPT"
    model: ModelConfig
    parallel: ParallelConfig
    precision: Precision
    b: int                                      # sequences of a microbatch
    s: int                                      # tokens of a sequence
    m: int                                      # microbatches of a replica's step
    predicted: Sequence[Predicted]              # of each rank of a pipeline
    work: PassCounts
    losses: Sequence[tuple[int, float]]         # of each iteration
    validation: Sequence[tuple[int, float]] = ()
    baseline: float | None = None               # the validation loss of a model without context
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""                            # "" for CPU cores
    written: str = ""                           # text of the model's, after its prompt and <|>; "" if it wrote none


def watch(topology: Topology, on_device: bool) -> TracedSteps:
    """Prepare to trace one step for the page's player, on a clock of its own: all ranks call this together.

    On CPU cores, which ranks may share, that is a virtual clock: in this one step each message between ranks carries
    the time, 8 bytes more. A GPU's clock is the wall's, read when the GPU has done its work.
    """
    clock: Clock = DeviceClock() if on_device else VirtualClock()
    return TracedSteps(topology, clock)


@dataclass(frozen=True)
class Closing:
    """The comparison of a run with its prediction, at its end."""

    lines: list[Line]              # of the ledger
    short: list[SummaryLine]
    full: str                      # every line


def closing(trainer: Trainer, run: ReportedRun, ledger: Ledger) -> Closing:
    """Compare what was sent and held with what was predicted. All ranks call this; `ledger` is that of rank 0's
    pipeline.
    """
    sizes, held = (run.model, run.parallel, run.b, run.s, run.work), all_ranks(trainer, run.predicted)
    sent = sent_by_pipeline(run.predicted, run.work)
    lines = traffic.compare(ledger, sent)
    full = f"{traffic.report(ledger, sent, *sizes)}\n\n{memory.report(trainer, run.predicted)}"
    return Closing(lines, summary_lines(run.losses, lines, held, run.parallel.pipeline_model_parallel_size), full)


def write_report(path: str, trainer: Trainer, traced: TracedSteps, run: ReportedRun, ledger: Ledger) -> None:
    """Write the page, on rank 0; all ranks call this together. Raise UserError if that fails."""
    world, said = trainer.topology.world, closing(trainer, run, ledger)
    held, ledgers = all_ranks(trainer, run.predicted), world.allgather_objects(trainer.ledger)
    steps = world.allgather_objects(traced.steps[-1])
    if world.rank == 0:
        data = {"title": title(run), "summary": [line._asdict() for line in said.short], "run": facts(run),
                "losses": losses(run), "topology": topology(run, [one.psi for one in held]),
                "ledger": traffic.rows(said.lines), "sent": sent(ledgers, run), "memory": memory_rows(held),
                "player": player(traced.clock, steps, run),
                "written": run.written, "text": said.full, "words": WORDS,
                "colors": {"actions": COLORS, "axes": AXES, "memory": MEMORY}}
        write_whole(path, page(data))


def page(data: dict[str, Any], name: str = "page") -> str:
    """Return a page with a player: its HTML, with the style, the scripts and the data inside."""
    def text(file: str) -> str:
        return files("shardlab.report.page").joinpath(file).read_text("utf-8")

    inside = {"title": html.escape(data["title"]), "css": text("page.css"), "json": script_json(data),
              "js": "\n".join(map(text, ("elements.js", "player.js", f"{name}.js")))}
    pieces = text(f"{name}.html").split("%%")                # text, name, text, name, ..., text
    return "".join(inside[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def script_json(data: Any) -> str:
    """Return JSON that cannot end the <script> that it stands in. Numbers that are not finite become null."""
    return json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def finite(data: Any) -> Any:
    match data:
        case float():
            return data if isfinite(data) else None
        case Mapping():
            return {key: finite(value) for key, value in data.items()}
        case list() | tuple():
            return [finite(value) for value in data]
    return data


# ---- the parts of the data ------------------------------------------------------------------------------------------


def title(run: ReportedRun) -> str:
    n = run.parallel.world_size
    return f"{run.title} on {n} rank{'s' * (n > 1)}"


def facts(run: ReportedRun) -> dict[str, Any]:
    p, c = run.parallel, run.model
    return {"t": p.tensor_model_parallel_size, "p": p.pipeline_model_parallel_size, "d": p.data_parallel_size,
            "c": p.context_parallel_size, "schedule": p.pipeline_schedule, "zero_stage": p.zero_stage,
            "sequence_parallel": p.sequence_parallel,
            "model": {"layers": c.num_layers, "hidden size": c.hidden_size, "heads": c.num_attention_heads,
                      "vocabulary": c.vocab_size, "parameters": parameters(c)},
            "step": {"microbatches of a replica": run.m, "sequences of a microbatch": run.b,
                     "tokens of a sequence": run.s},
            "format": run.precision.compute, "device": run.device, "options": dict(run.options)}


def losses(run: ReportedRun) -> dict[str, Any]:
    """Return the curves, of a long run every n-th value, exactly as it was."""
    every = -(-len(run.losses) // MOST_LOSSES)
    kept = [one for i, one in enumerate(run.losses, 1) if i % every == 0 or i in (1, len(run.losses))]
    far = -(-max(1, len(run.validation)) // MOST_LOSSES)
    return {"training": kept, "every": every, "validation": [*run.validation[:-1:far], *run.validation[-1:]],
            "baseline": run.baseline}


def topology(run: ReportedRun, psis: Sequence[int]) -> list[dict[str, Any]]:
    """Return each rank's place, what it holds, the number of its parameters, and its groups."""
    c, p, found = run.model, run.parallel, []
    stages, colors = stages_of_ranks(c, p), survey(p)
    for rank, psi in enumerate(psis):
        at = place(rank, p)
        held = stages[at.pipeline]
        layers = [layer for own in held.values() for layer in own]
        found.append({"rank": rank, **at._asdict(), "parameters": psi,
                      "stages": {str(stage): [own[0], own[-1]] for stage, own in held.items()},
                      "embedding": 0 in layers, "head": c.num_layers - 1 in layers,
                      "groups": {name: members(rank, name, colors) for name in GROUPS if name in colors}})
    return found


def sent(ledgers: Sequence[Ledger], run: ReportedRun) -> dict[str, Any]:
    """Return who sends how much to whom, as rows of [from, to, reason, bytes], and the reasons."""
    found = sent_by_all(ledgers, run.parallel, run.m)
    if len(found) > MOST_SENT:
        sums = defaultdict[tuple[int, int, str], float](float)
        for one in found:
            sums[one.source, one.to, one.group] += one.bytes
        found = [Sent(source, to, group, "", "", size) for (source, to, group), size in sums.items()]
    reasons = list(dict.fromkeys((one.group, one.phase, one.reason) for one in found))
    number = {reason: i for i, reason in enumerate(reasons)}
    return {"reasons": reasons, "rows": [[one.source, one.to, number[one.group, one.phase, one.reason], one.bytes]
                                         for one in found]}


def memory_rows(everyone: Sequence[RankMemory]) -> list[dict[str, Any]]:
    """Return each rank's bytes: what it holds, and [part, measured, predicted] where there is a formula."""
    return [{"held": one.held._asdict(), "compared": one.compared} for one in everyone]


def player(clock: Clock, steps: Sequence[Sequence[Slice]], run: ReportedRun) -> dict[str, Any]:
    """Return the traced step, with what each kind of action of each stage computes, and each microbatch's samples."""
    c, p, schedule = run.model, run.parallel, schedule_of(run.parallel, run.m)
    found = played_step(clock, steps, schedule, p, message_bytes(run))
    kinds = sorted({action.kind for actions in schedule.ranks for action in actions}, key="FBIW".index)
    work = {f"{stage}{kind}": work_of(c, p, run.b, run.s, layers, kind)
            for own in stages_of_ranks(c, p) for stage, layers in own.items() for kind in kinds}
    samples = [samples_of(0, k, p.data_parallel_size, run.b).start for k in range(2)][:run.m]
    step = samples[1] - samples[0] if len(samples) > 1 else 0
    replica = samples_of(1, 0, p.data_parallel_size, run.b).start if p.data_parallel_size > 1 else 0
    return found | {"work": work, "samples": {"each": run.b, "a microbatch": step, "a replica": replica}}


def message_bytes(run: ReportedRun) -> int:
    """Return the bytes that a rank sends to the next stage at a time."""
    return run.b * run.s * run.model.hidden_size // run.parallel.sent_parts * run.precision.form.bytes
