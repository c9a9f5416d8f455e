"""Torchtitan's numerics logs: norms of what each operator computed in one step, a file for each rank.

rank_N_activations.log has a block for each operator, in the order of dispatch, under `[path of the module/op_I_NAME]`:
shape and dtype, the L2 norm, and as "Output hash" and "Input hashes" the L1 norms (pytorch/torchtitan,
agent_tooling/numerics_debugging/activation_tracer.py). No layout is known, so a rank is compared with the same rank.
"""
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf, isnan, nan
from typing import NamedTuple

from mpi_impl.compare.differences import TOLERANCE
from mpi_impl.compare.their_runs.records import LARGEST_LINES
from mpi_impl.runtime.files import read_text
from mpi_impl.runtime.tables import aligned
from reference.errors import UserError
from reference.precision import FORMATS

LOG = re.compile(r"rank_(\d{1,9})_activations\.log")
SHAPE = re.compile(r"torch\.Size\((\[[\d, ]*\])\)(?:, Dtype: torch\.(\w+))?")
PRINTED = 1e-6      # relatively: norms are written with seven digits
AVERAGE = 0.1       # of an element's rounding, how much a norm over the 1,000 elements or more of an operator shows
ONLY_NORMS = ("Only norms were compared, each rank with the same one of the other run: other values of the same norms, "
              "exchanged rows for instance, are not seen.")


@dataclass
class LoggedOperator:
    """A block of a log."""

    key: str                    # path of the module/op_I_NAME
    facts: dict[str, str] = field(default_factory=dict)
    repeated: int = 0           # earlier blocks of the same name

    @property
    def phase(self) -> str:
        return self.facts.get("Phase", "forward")

    @property
    def shape(self) -> str:
        found = SHAPE.fullmatch(self.facts.get("Shape", ""))
        return found[1] if found else "unknown"

    @property
    def format(self) -> str | None:
        found = SHAPE.fullmatch(self.facts.get("Shape", ""))
        name = found[2] if found else None
        return name if name is None or name in FORMATS else "bfloat16" if name.startswith("float") else "float64"

    def norms(self) -> dict[str, list[float]]:
        """Return the norms of the output; of an operator that works in place, which has none, those of its inputs."""
        names = {"L1": "Output hash", "L2": "L2 norm"}
        if not any(fact in self.facts for fact in names.values()):
            return {"input's L1": self.inputs()}
        return {name: numbers(self.facts.get(fact, "")) for name, fact in names.items()}

    def inputs(self) -> list[float]:
        """Return the L1 norms of the inputs."""
        return numbers(self.facts.get("Input hashes", ""))

    def __str__(self) -> str:
        return f"{self.phase}: {self.key}" + (f", call {self.repeated + 1}" if self.repeated else "")


Log = dict[str, LoggedOperator]         # of one rank, in the order of dispatch


class OperatorDifference(NamedTuple):
    """An operator that is not the same in A and B."""

    place: int                  # in A's log
    rank: int
    a: LoggedOperator
    b: LoggedOperator
    what: str
    before: str


def is_log_folder(folder: str) -> bool:
    return os.path.isdir(folder) and any(map(LOG.fullmatch, os.listdir(folder)))


def compared(a: str, b: str) -> tuple[str, bool]:
    """Compare two folders of logs: what is to be said, and whether they differ. Raises UserError."""
    runs = [read(folder) for folder in (a, b)]
    check_comparable(a, b, *runs)
    coarsest = max((one.format or "float64" for run in runs for log in run.values() for one in log.values()),
                   key=lambda form: FORMATS[form].epsilon)
    for differs in (other_shape, lambda one, other: other_norm(one, other, coarsest)):
        found = [first for rank in runs[0] if (first := first_difference(rank, runs[0][rank], runs[1][rank], differs))]
        if found:
            return "\n".join(described(min(found), found)), True
    both = sum(len(log.keys() & runs[1][rank].keys()) for rank, log in runs[0].items())
    alone = sum(len(log.keys() ^ runs[1][rank].keys()) for rank, log in runs[0].items())
    alone_is = f"; {alone:,} more are in one log alone" if alone else ""
    return f"A and B agree: the norms of {both:,} operators on {len(runs[0])} ranks{alone_is}. {ONLY_NORMS}", False


def check_comparable(a: str, b: str, of_a: dict[int, Log], of_b: dict[int, Log]) -> None:
    if of_a.keys() != of_b.keys():
        raise UserError(f"{a} has logs of {len(of_a)} ranks and {b} of {len(of_b)}, or of others: logs have no layout, "
                        "so only runs of one layout can be compared. Record both on the same ranks, or, for two "
                        "layouts, with `shardlab recorder`.")
    if not any(of_a[rank].keys() & of_b[rank].keys() for rank in of_a):
        raise UserError(f"{a} and {b} have no operator in common: they are logs of two models.")


# ---- a log ----------------------------------------------------------------------------------------------------------


def read(folder: str) -> dict[int, Log]:
    """Read the logs of all ranks. Raises UserError."""
    names = {int(found[1]): name for name in os.listdir(folder) if (found := LOG.fullmatch(name))}
    return {rank: read_log(os.path.join(folder, names[rank])) for rank in sorted(names)}


def read_log(path: str) -> Log:
    """Read a rank's log. Raises UserError if it is not whole."""
    text = read_text(path, LARGEST_LINES)
    total = re.match(r"Total captured activations: (\d{1,9})\n", text)
    if not total:
        raise UserError(f"{path} is not a log of torchtitan's numerics: its first line does not count activations.")
    blocks: list[LoggedOperator] = []
    log, seen = {}, Counter[str]()
    for line in text.splitlines():
        if line.startswith("[") and line.endswith("]"):
            blocks.append(LoggedOperator(line[1:-1]))
        elif blocks and line.startswith("  "):
            name, _, value = line.strip().partition(":")
            blocks[-1].facts[name] = value.strip()
    if len(blocks) != int(total[1]) or not text.endswith("\n\n"):
        raise UserError(f"{path} ends early: it has {len(blocks):,} operators of {int(total[1]):,}, or the last one is "
                        "cut off. Copy it again, or log the step again.")
    for one in blocks:
        one.repeated = seen[str(one)]
        seen[f"{one.phase}: {one.key}"] += 1
        log[str(one)] = one
    try:
        for one in blocks:
            one.norms(), one.inputs()
    except ValueError as error:
        raise UserError(f"{path} has a norm that is not a number: {error}.") from error
    return log


def numbers(text: str) -> list[float]:
    return [nan if one.strip() == "None" else float(one) for one in text.split(",") if one.strip()]


# ---- differences ----------------------------------------------------------------------------------------------------


def first_difference(rank: int, a: Log, b: Log, differs: Callable[[LoggedOperator, LoggedOperator], str]) -> (
        OperatorDifference | None):
    """Return the first operator of a rank's logs that differs in this way."""
    before = "none"
    for place, (key, one) in enumerate(a.items()):
        if key in b and (what := differs(one, b[key])):
            return OperatorDifference(place, rank, one, b[key], what, before)
        before = key if key in b else before
    return None


def other_shape(a: LoggedOperator, b: LoggedOperator) -> str:
    return "" if a.shape == b.shape else "the shape: the runs are not of one model, batch and layout"


def other_norm(a: LoggedOperator, b: LoggedOperator, coarsest: str) -> str:
    """Describe the norm of two operators that differs most, if rounding does not explain it."""
    form = max((a.format or coarsest, b.format or coarsest), key=lambda form: FORMATS[form].epsilon)
    allowed = max(AVERAGE * TOLERANCE[form].first, PRINTED)
    off, name, x, y = max((apart(x, y), name, x, y) for name, norms in a.norms().items()
                          for x, y in zip_longest(norms or [nan], b.norms().get(name) or [nan], fillvalue=nan))
    return f"{name} norm {x:.6e} (A), but {y:.6e} (B): {off:.1e} of it; {form} explains {allowed:.0e}" * (off > allowed)


def apart(x: float, y: float) -> float:
    """Return the relative difference: none between two NaNs, which collectives have that are not awaited."""
    if x == y or (isnan(x) and isnan(y)):
        return 0
    return inf if isnan(x) or isnan(y) or inf in (abs(x), abs(y)) else abs(x - y) / max(abs(x), abs(y))


def described(one: OperatorDifference, found: list[OperatorDifference]) -> list[str]:
    """Describe the first difference, and those of the other ranks."""
    shapes = one.a.shape if one.a.shape == one.b.shape else f"{one.a.shape} (A), but {one.b.shape} (B)"
    inputs = [each.inputs() for each in (one.a, one.b)]
    same = len(inputs[0]) == len(inputs[1]) and all(apart(x, y) <= PRINTED for x, y in zip(*inputs))
    others = [("rank", "first differs at"), *((str(each.rank), str(each.a)) for each in found if each is not one)]
    return ["A and B differ. The first operator, in the order of dispatch:", "",
            f"  {one.a}",
            f"  where      rank {one.rank}, at {one.a.facts.get('Location', 'a line that was not logged')}",
            f"  shape      {shapes}",
            f"  differs    {one.what}",
            f"  inputs     {'have the same norms' if same else 'have other norms, too'}",
            f"  before     {one.before}" + ", which does not differ so" * (one.before != "none"), "",
            *(aligned(others, left=(1,)).splitlines() if others[1:] else ["No other rank differs."]), "", ONLY_NORMS]
