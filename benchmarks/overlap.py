"""The share of message time that computing hides, and what that wins: buckets of gradients, ZeRO-3's prefetch, rings.

    .venv/bin/python benchmarks/overlap.py

Ranks take training steps (contenders/overlap_ranks.py), two of them unless `--ranks` says otherwise, for each should
have a core: first through shared memory, where the cores that compute also copy the bytes, and then through a wire: the
loopback device of a network of their own, whose speed Linux limits, so that bytes travel while the ranks do something
else. The wire needs MPICH, `unshare`, `ip` and `tc`.

The share that is hidden is 1 - spent / alone: what a rank spends on the messages of a step (posting them, helping them
on, waiting for them), relative to what it spends where nothing else runs. Both are medians of the same run.
"""
import json
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from subprocess import CalledProcessError
from typing import NamedTuple

from programs import parse, parser_of
from turns import launched, output_of

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.tables import aligned
from reference.errors import UserError

SWEPT = {"buckets": "MB of a bucket", "zero_2": "MB of a bucket, ZeRO-2", "zero_3": "width of a layer, gradients",
         "prefetch": "width of a layer", "ring": "positions of a rank"}
OVER_TCP = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}      # MPICH's variables
# Run the rest of the command where the loopback device sends this many Gbit/s, of both directions together.
LIMITED = 'ip link set lo up && tc qdisc add dev lo root tbf rate "$0"gbit burst 256kb latency 2s && exec "$@"'


class Overlap(NamedTuple):
    """The effect of overlap on messages of one kind, at one size of the sweep; seconds are those of a step."""

    kind: str
    size: float
    alone: float            # what the messages take where nothing else runs
    hidden: float           # the share of that which is hidden
    unhelped: float         # the same if MPI is not called between posting and waiting
    immediate: float        # a step in which each message is waited for where it is posted
    overlapped: float       # a step as it is
    won: float              # the difference, as the median over turns
    helped: float           # how much longer a step is if MPI is not called in between, likewise


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of("overlap", __doc__), argv, turns=(6, "of each step in each way"),
                 wire=(8, "the wire's Gbit/s"), ranks=(2, "that train"))
    if args.ranks == 1:
        raise UserError("--ranks is 1, but one rank alone sends nothing: choose at least 2.")
    for name, wire in (("shared memory", None), (f"a wire of {args.wire} Gbit/s", args.wire)):
        print(f"\n{name}\n{table(measure(args.ranks, args.turns, wire))}", flush=True)


def measure(ranks: int, turns: int, wire: int | None) -> list[Overlap]:
    """Let the ranks take their steps through shared memory, or through a wire of this many Gbit/s. Raises UserError."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "overlap.json")
        command = launched(ranks, "overlap_ranks", str(turns), str(output))
        if wire is not None:
            command = ["env", *(f"{name}={value}" for name, value in OVER_TCP.items()),
                       "unshare", "--map-root-user", "--net", "sh", "-c", LIMITED, str(wire), *command]
        try:
            output_of(command)
        except CalledProcessError as error:
            raise UserError(f"The ranks ended with status {error.returncode}" + (
                "." if wire is None else ". A wire needs Linux with MPICH, `unshare`, `ip` and `tc`, and the right to "
                "make a network namespace; without them, there are only the figures of shared memory above.")) from None
        return [overlap_of(**case) for case in json.loads(output.read_text())]


def overlap_of(kind: str, size: float, turns: Sequence[Mapping[str, Mapping[str, float]]]) -> Overlap:
    """Return the medians over turns, which have the seconds of a step in each way."""
    steps = {way: median(turn[way]["step"] for turn in turns) for way in turns[0]}
    spent = {way: median(sum(turn[way][doing] for doing in ("post", "help", "wait")) for turn in turns)
             for way in turns[0]}
    longer = {way: median(turn[way]["step"] - turn["overlapped"]["step"] for turn in turns) for way in turns[0]}
    return Overlap(kind, size, spent["alone"], 1 - spent["overlapped"] / spent["alone"],
                   1 - spent["unhelped"] / spent["alone"], steps["immediate"], steps["overlapped"],
                   longer["immediate"], longer["unhelped"])


def table(found: Sequence[Overlap]) -> str:
    rows = [["", "", "messages, ms", "hidden", "without help", "step, immediate", "overlapped, ms", "won, ms",
             "by help, ms"]]
    for kind, each in groupby(found, lambda one: one.kind):
        rows += [[SWEPT[kind], f"{one.size:,.4g}", f"{1e3 * one.alone:.1f}", f"{one.hidden:.0%}", f"{one.unhelped:.0%}",
                  f"{1e3 * one.immediate:.1f}", f"{1e3 * one.overlapped:.1f}", f"{1e3 * one.won:+.1f}",
                  f"{1e3 * one.helped:+.1f}"] for one in each]
    return aligned(rows)


if __name__ == "__main__":
    run_alone(main)
