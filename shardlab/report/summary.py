"""The end of a run in three lines: its loss, its traffic and its memory, the last two next to what was predicted."""
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.runtime.tables import aligned, bytes_of
from shardlab.report.memory import RankMemory
from shardlab.report.traffic import Line


class SummaryLine(NamedTuple):
    """One line of the summary."""

    subject: str
    text: str
    as_predicted: bool | None = None      # None where nothing is predicted


def summary_lines(losses: Sequence[tuple[int, float]], lines: Sequence[Line], memory: Sequence[RankMemory],
                  p: int) -> list[SummaryLine]:
    """Summarize a run, whose traffic is that of a pipeline of p ranks."""
    return [loss_line(losses), traffic_line(lines, p), memory_line(memory)]


def describe(lines: Sequence[SummaryLine]) -> str:
    """Format the summary for a terminal."""
    return aligned([[line.subject, line.text] for line in lines], left=(0, 1))


def loss_line(losses: Sequence[tuple[int, float]]) -> SummaryLine:
    (first, begin), (last, end) = losses[0], losses[-1]
    return SummaryLine("loss", f"{begin:.4f} in iteration {first}" + (
        f", {end:.4f} in iteration {last}" if last > first else ""))


def traffic_line(lines: Sequence[Line], p: int) -> SummaryLine:
    """Add up the bytes of each group of ranks, as rings, and compare every line with its prediction."""
    sums: dict[str, float] = defaultdict(float)
    for line in lines:
        sums[line.entry.group] += ring_bytes(line.entry, line.total)
    sent = ", ".join(f"{group} {bytes_of(size)}" for group, size in sums.items() if size) or "nothing"
    predicted = [line for line in lines if line.predicted is not None]
    others = dict.fromkeys(line.entry.phase for line in lines if line.predicted is None)       # such as sampling
    more = f" ({len(lines) - len(predicted)} more have none: {', '.join(others)})" if others else ""
    wrong = [f"{line.entry.phase} {line.entry.reason}" for line in predicted if not line.as_predicted]
    verdict = f"NOT as predicted: {', '.join(wrong)}" if wrong else f"= the prediction, all {len(predicted)} lines"
    who = "rank 0" if p == 1 else f"a pipeline of {p} ranks"
    return SummaryLine("traffic", f"{who} sent: {sent}; {verdict}{more}", not wrong)


def memory_line(memory: Sequence[RankMemory]) -> SummaryLine:
    """Compare every rank's measured bytes with the prediction, and name the fullest rank's."""
    most = max(one.held.states for one in memory)
    activations = max(one.held.activations for one in memory)
    wrong = [rank for rank, one in enumerate(memory) if not one.as_predicted]
    verdict = (f"NOT as predicted on rank {', '.join(map(str, wrong))}" if wrong else
               f"= the prediction{f', on all {len(memory)} ranks' * (len(memory) > 1)}")
    return SummaryLine("memory", f"a rank holds at most {bytes_of(most)} of parameters, gradients and moments, and "
                                 f"{bytes_of(activations)} of activations; {verdict}", not wrong)
