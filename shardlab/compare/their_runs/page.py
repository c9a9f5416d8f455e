"""A comparison as a page for a browser: every tensor in the order of computation, with both runs beside each other.

For each of them it shows how the ranks of either run share it, and how far the two are apart: a bar on a scale of
powers of ten, on which a mark shows how far rounding may take them. It is one file, without scripts.
"""
from collections.abc import Iterator
from html import escape
from itertools import groupby
from math import log10
from typing import NamedTuple

from reference.errors import UserError
from shardlab.compare.differences import TensorDifference
from shardlab.compare.their_runs.differences import Comparison
from shardlab.compare.their_runs.records import TheirKey, TheirRun

LEAST = 1e-17       # the left end of the scale; 1 is the right one
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24;
       background: #fff; }
pre { background: #f3f5f7; padding: 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.15rem 0.8rem 0.15rem 0; border-top: 1px solid #e3e6ea; white-space: nowrap; }
summary { cursor: pointer; padding: 0.4rem 0; font-weight: 600; }
.scale { position: relative; width: 16rem; height: 0.8rem; background: #f3f5f7; display: inline-block; }
.bar { position: absolute; left: 0; top: 0; bottom: 0; background: #5b8db8; }
.mark { position: absolute; top: -0.2rem; bottom: -0.2rem; width: 2px; background: #1b1f24; }
.differs { background: #fff0e8; } .differs .bar { background: #c8501e; }
.number { font-variant-numeric: tabular-nums; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e8eb; background: #15181c; } pre, .scale { background: #23282e; } .mark { background: #e6e8eb; }
  th, td { border-color: #2d333a; } .differs { background: #3d2418; }
}"""


class Compared(NamedTuple):
    """A row: a tensor, and its largest difference, or a sentence in place of it."""

    key: TheirKey
    difference: TensorDifference | None
    problem: str

    @property
    def differs(self) -> bool:
        return self.difference is None or self.difference.beyond_rounding


def page(comparison: Comparison, verdict: str) -> str:
    """Return the page; `verdict` is the text that the program prints."""
    rows, names = list(rows_of(comparison)), [escape(name) for name in comparison.names]
    first = next((row.key for row in rows if row.differs), None)
    parts = [section(comparison, f"step {step}, {phase}", list(group), first)
             for (step, phase), group in groupby(rows, lambda row: (row.key.iteration, row.key.phase))]
    return "\n".join([
        "<!doctype html>", '<html lang="en"><meta charset="utf-8">', f"<title>{names[0]} and {names[1]}</title>",
        f"<style>{STYLE}</style>", f"<h1>{names[0]} and {names[1]}</h1>", f"<pre>{escape(verdict)}</pre>",
        "<p>All tensors that both have, in the order of computation. A bar is as long as the largest difference of an "
        "element, in units of the tensor's largest; each tenth of the scale is 1.7 powers of ten, and the right end is "
        "1. The mark is what rounding explains.</p>", *parts, "</html>", ""])


def rows_of(comparison: Comparison) -> Iterator[Compared]:
    for key in comparison.a.order:
        if key in comparison.common:
            try:
                yield Compared(key, comparison.difference(key), "")
            except UserError as error:
                yield Compared(key, None, str(error))


def section(comparison: Comparison, title: str, rows: list[Compared], first: TheirKey | None) -> str:
    """Return a step's phase, which is open if the first difference is in it."""
    differ = sum(row.differs for row in rows)
    state = " open" if any(row.key == first for row in rows) else ""
    head = "".join(f"<th>{escape(text)}</th>" for text in ("", *comparison.names, "difference", ""))
    return "\n".join([f"<details{state}><summary>{escape(title)}: {len(rows)} tensors, of which {differ or 'none'} "
                      f"differ{'s' if differ < 2 else ''}</summary>", f"<table><tr>{head}</tr>",
                      *(row_of(comparison, row) for row in rows), "</table></details>"])


def row_of(comparison: Comparison, row: Compared) -> str:
    call = f", call {row.key.call + 1}" if row.key.call else ""
    shared = [f"<td>{sharing(run, row.key)}</td>" for run in (comparison.a, comparison.b)]
    return (f'<tr{" class=differs" * row.differs}><td>{escape(row.key.name)}{call}</td>{"".join(shared)}'
            f'<td>{scale(row.difference) if row.difference else ""}</td><td class="number">'
            f'{f"{row.difference.relative:.1e}" if row.difference else escape(row.problem)}</td></tr>')


def scale(difference: TensorDifference) -> str:
    """Draw a difference, and what is allowed."""
    return (f'<span class="scale"><span class="bar" style="width: {percent(difference.relative):.1f}%"></span>'
            f'<span class="mark" style="left: {percent(difference.allowed):.1f}%"></span></span>')


def percent(relative: float) -> float:
    """Return a number's place between LEAST and 1, on a scale of powers."""
    return 100 * (1 - log10(min(max(relative, LEAST), 1)) / log10(LEAST))


def sharing(run: TheirRun, key: TheirKey) -> str:
    """Describe how the ranks of a run share a tensor."""
    parts = [part for part, _ in run.parts[key]]
    boxes, ranks = len({(part.first, part.shape) for part in parts}), len({part.rank for part in parts})
    if any(part.summed for part in parts):
        return f"a sum over {ranks} ranks"
    copies = f" on {ranks} ranks" if ranks > 1 else ""
    return f"whole{copies}" if boxes == 1 else f"{boxes} parts{copies}"
