"""A comparison of two runs: `python -m mpi_impl.compare A B` names the first tensor in which they differ.

    python -m mpi_impl.compare "-n 1 --global-batch-size 8" "-n 4 --global-batch-size 8 --tensor-model-parallel-size 2"
    python -m mpi_impl.compare recorded/one recorded/four

A and B are the same training run on two topologies: same model, data, seed and batch. Each is either a folder that
`pretrain_gpt --record DIR` has written, or pretrain_gpt's options, quoted, with the number of ranks: then it is run
here, for its first two iterations, and recorded. It compares every rank's shard of every tensor that both runs have:
the parameters, the activations, their gradients, the weights' gradients before and after they are summed over ranks,
and the updated parameters (mpi_impl/recording/names.py has the list, in order).

How to read it: it names the first tensor *in the order of computation* that is wrong, so everything from which that was
computed is right, and the mistake is between the tensor before it and this one. It also lists the tensors after it,
because they often tell more: an activation that differs on one tensor-parallel rank alone is another story than one
that differs on all. With --dtype float64 rounding is so small that any difference is a mistake. In formats of fewer
digits a correct first update may differ visibly, so all tensors after it are compared less strictly.

The exit status is 0 if the runs agree, and 1 if they differ.
"""
import shlex
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from mpi_impl.launching.entry import ArgumentParser, run_alone
from mpi_impl.recording.completeness import check_whole, format_iterations
from mpi_impl.recording.differences import Findings, TensorDifference, compare
from mpi_impl.recording.recording import Recording, read
from mpi_impl.runtime.tables import aligned
from reference.errors import UserError


def main() -> None:
    parser = ArgumentParser(prog="mpi_impl.compare", description="Name the first tensor in which two runs differ.",
                            epilog="The exit status is 0 if they agree, and 1 if they differ.")
    for run in ("A", "B"):
        parser.add_argument(run, help="a folder written by pretrain_gpt --record, or a run's options in quotes: "
                            "'-n RANKS' and pretrain_gpt's")
    options = parser.parse_args()
    with ExitStack() as until_compared:
        a, b = (recording_of(name, run, until_compared) for name, run in (("A", options.A), ("B", options.B)))
        check_whole(a, b)
        found = compare(a, b)
        print(report(found, a, b))
    sys.exit(int(bool(found.differences)))


# ---- the runs -------------------------------------------------------------------------------------------------------


def recording_of(name: str, run: str, until_compared: ExitStack) -> Recording:
    """Read a recording, or record a run now, in a folder that lasts until the runs are compared."""
    if not run.startswith("-"):
        return read(run)
    folder = until_compared.enter_context(TemporaryDirectory(prefix=f"recorded-{name}-"))
    print(f"running {name}: {run}", flush=True)
    ranks, options = ranks_and_options(name, run)
    command = [sys.executable, "-m", "mpi_impl.launch", "-n", str(ranks), "-m", "mpi_impl.pretrain_gpt", *options,
               "--record", folder, "--exit-interval", "2", "--eval-iters", "0"]      # two are recorded
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"Run {name} ended with status {done.returncode}, and has said:\n{done.stdout.strip()}")
    return read(folder)


def ranks_and_options(name: str, run: str) -> tuple[int, list[str]]:
    """Split a run's options into the number after -n and those of pretrain_gpt."""
    try:
        words = shlex.split(run)
    except ValueError as error:
        raise UserError(f"The options of run {name} cannot be read: {error}. Quote each run once, and what needs "
                        "quotes inside with the other kind.") from error
    parser = ArgumentParser(prog=f"Run {name}", add_help=False)
    parser.add_argument("-n", type=int)
    options, others = parser.parse_known_args(words)
    if options.n is None:
        raise UserError(f"Run {name} does not say how many ranks it has. Begin it with -n RANKS.")
    return options.n, others


# ---- the report -----------------------------------------------------------------------------------------------------


def report(found: Findings, a: Recording, b: Recording) -> str:
    formats = " and ".join(sorted({a.about.format, b.about.format}))
    if found.differences:
        return "\n".join([*first(found), "", *table(found.differences)])
    worst = found.worst
    assert worst is not None, "recordings that are whole have tensors in common"
    alone = f"; {found.alone:,} more are in one alone, since topologies and kernels differ" if found.alone else ""
    when = format_iterations(sorted({key.iteration for key in a.parts}))
    return (f"A and B agree: {found.compared:,} tensors of {when} were compared, in {formats}{alone}. They differ "
            f"most in {worst.key}: by {worst.size:.1e}, which is {worst.relative:.1e} of {worst.unit_is}; "
            f"{worst.allowed:.0e} is allowed.")


def first(found: Findings) -> list[str]:
    """Describe the first difference."""
    one = found.differences[0]
    layer = "" if one.key.layer is None else f", layer {one.key.layer}"
    before = f"the {found.before:,} tensors before it agree, the last of them is {found.last}" if found.last else "none"
    expected, value = one.values
    return ["A and B differ. The first tensor, in the order of computation:", "",
            f"  {one.key}",
            f"  where      {ranks(one)}{layer}",
            f"  size       {one.size:.1e}, which is {one.relative:.1e} of {one.unit_is}; rounding explains "
            f"{one.allowed:.0e}",
            f"  largest    at {list(one.at)} of {list(one.shape)}: {expected:.6g} ({one.expected}), but {value:.6g} "
            f"({one.holders[0]})",
            f"  before     {before}"]


def ranks(one: TensorDifference) -> str:
    """Name the ranks that differ from what is expected."""
    texts = []
    for run in ("A", "B"):
        held = sorted({rank for holder in one.holders if holder.run == run for rank in holder.ranks})
        if held:
            alone = all(len(holder.ranks) == 1 for holder in one.holders if holder.run == run)
            word = ("rank" if len(held) == 1 else "ranks") if alone else "the sum over ranks"
            texts.append(f"{word} {', '.join(map(str, held))} of {run}")
    return " and ".join(texts)


def table(differences: list[TensorDifference]) -> list[str]:
    """Tabulate the differences that follow the first."""
    if len(differences) == 1:
        return ["No other tensor differs."]
    rows = [("then", "off by", "relative", "where")]
    rows += [(str(one.key), f"{one.size:.1e}", f"{one.relative:.1e}", ranks(one)) for one in differences[1:]]
    return aligned(rows, left=(0, 3)).splitlines()


if __name__ == "__main__":
    run_alone(main)
