"""Figures of papers beside our predictions of them, as rows of tables."""
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi_impl.runtime.tables import aligned
from reference.costs.hardware import Hardware
from reference.costs.plans import Plan


class Row(NamedTuple):
    """A figure of a paper, and our prediction of it."""

    name: str
    published: float
    found: float
    allowed: float      # how far off ours may be: in points, or as a share

    @property
    def meets(self) -> bool:
        return abs(self.off) <= self.allowed

    @property
    def off(self) -> float:
        return self.found - self.published


class Share(Row):
    """A row whose error is relative to the published figure."""

    @property
    def off(self) -> float:
        return self.found / self.published - 1


class Table(NamedTuple):
    title: str
    unit: str           # "%" for shares of one
    rows: Sequence[Row]
    why: str = ""       # the reason for a row that is off by more


def scheduled(v: int | None) -> dict[str, Any]:
    """Return the settings of 1F1B, or with several chunks for a rank of the interleaved schedule."""
    return {"pipeline_schedule": "interleaved", "virtual_pipeline_size": v} if v and v > 1 else {}


def fits(plan: Plan, hardware: Hardware) -> bool:
    return sum(plan.memory) <= hardware.memory - hardware.reserved


def describe(table: Table) -> str:
    rows = [["", "paper", "ours", "off by", "allowed"]]
    for row in table.rows:
        percent, share = table.unit == "%", isinstance(row, Share)
        figures = [f"{x:.1%}" if percent else f"{x:,.4g}" for x in (row.published, row.found)]
        off = f"{row.off:+.1%}" if share else f"{100 * row.off:+.1f} points"
        limit = f"{row.allowed:.0%}" if share else f"{100 * row.allowed:.0f} points"
        rows.append([row.name, *figures, off, limit if row.meets else f"{limit}: MISSED"])
    missed = not all(row.meets for row in table.rows)
    return f"{table.title}\n{aligned(rows)}" + (f"\n{table.why}" if missed and table.why else "")
