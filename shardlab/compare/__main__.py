"""A comparison of two runs: `python -m shardlab.compare A B` names the first tensor in which they differ.

    python -m shardlab.compare "-n 1 --global-batch-size 8" "-n 4 --global-batch-size 8 --tensor-model-parallel-size 2"
    python -m shardlab.compare recorded/one recorded/four

A and B are the same training run on two topologies: same model, data, seed and batch. Each is either a folder that
`pretrain_gpt --record DIR` has written, or pretrain_gpt's options, quoted, with the number of ranks: then it is run
here, for its first two iterations, and recorded. Or both are folders that shardlab_recorder.py has written, in training
programs of PyTorch, or both are checkpoints of such programs, or dumps of their frameworks
(shardlab/compare/their_runs). It compares every rank's shard of every tensor that both runs have: the parameters,
the activations, their gradients, the weights' gradients before and after they are summed over ranks, and the updated
parameters (shardlab/compare/names.py has the list, in order).

How to read it: it names the first tensor *in the order of computation* that is wrong, so everything from which that was
computed is right, and the mistake is between the tensor before it and this one. It also lists the tensors after it,
because they often tell more: an activation that differs on one tensor-parallel rank alone is another story than one
that differs on all. With --dtype float64 rounding is so small that any difference is a mistake. In formats of fewer
digits a correct first update may differ visibly, so all tensors after it are compared less strictly.

The exit status is 0 if the runs agree, 1 if they differ, and 2 if they cannot be compared.
"""
import shlex
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.launch.launcher import own_job
from mpi_impl.runtime.files import check_writable, write_whole
from reference.errors import UserError
from shardlab.compare import their_runs, two_runs
from shardlab.compare.completeness import check_whole
from shardlab.compare.differences import SHOWN, compare
from shardlab.compare.recording import Recording, read
from shardlab.compare.report import report


def main() -> None:
    parser = ArgumentParser(prog="shardlab.compare", description="Name the first tensor in which two runs differ.",
                            epilog="The exit status is 0 if they agree, 1 if they differ, and 2 if they cannot be "
                            "compared.")
    for run in ("A", "B"):
        parser.add_argument(run, help="a folder written by pretrain_gpt --record or by shardlab_recorder.py, a "
                            "checkpoint of PyTorch's (a folder of DCP, a file of torch.save, safetensors), or a run's "
                            "options in quotes: '-n RANKS' and pretrain_gpt's")
    parser.add_argument("--report", metavar="FILE", help="a page to write for a browser: two runs on the same ranks, "
                        "played beside each other; of other programs, all tensors side by side")
    options = parser.parse_args()
    if their_runs.are_recordings(options.A, options.B):
        text, differ = their_runs.compared(options.A, options.B, options.report)
        print(text)
        sys.exit(int(differ))
    if options.report:
        check_writable(options.report)
        check_ranks(options.A, options.B)
    with ExitStack() as until_compared:
        a, b = (recording_of(name, run, until_compared) for name, run in (("A", options.A), ("B", options.B)))
        if options.report:
            two_runs.check_comparable(a, b)
        check_whole(a, b, tensors=False)
        found = compare(a, b, two_runs.ALL if options.report else SHOWN)
        if not found.differences:
            check_whole(a, b)
        said = report(found, a, b)
        print(said)
        if options.report:
            write_whole(options.report, two_runs.page(two_runs.TwoRuns(found, a, b), said,
                                                      {"A": options.A, "B": options.B}))
            print(f"\nBoth runs are in {options.report}: open it in a browser.")
    sys.exit(int(bool(found.differences)))


def check_ranks(*runs: str) -> None:
    """Raise UserError for runs on different numbers of ranks, before any of them is run."""
    ranks = [ranks_and_options(name, run)[0] if run.startswith("-") else read(run).about.parallel.world_size
             for name, run in zip("AB", runs)]
    if ranks[0] != ranks[1]:
        raise UserError(f"--report shows two runs rank by rank, but A has {ranks[0]} ranks and B {ranks[1]}. Give both "
                        "the same ranks, or leave --report out: without it, runs on any two topologies are compared.")


# ---- the runs -------------------------------------------------------------------------------------------------------


def recording_of(name: str, run: str, until_compared: ExitStack) -> Recording:
    """Read a recording, or record a run now, in a folder that lasts until the runs are compared."""
    if not run.startswith("-"):
        return read(run)
    ranks, options = ranks_and_options(name, run)
    folder = until_compared.enter_context(TemporaryDirectory(prefix=f"recorded-{name}-"))
    print(f"running {name}: {run}", flush=True)
    command = own_job(ranks, "mpi_impl.pretrain_gpt", *options, "--record", folder, "--exit-interval", "2",
                      "--eval-iters", "0")      # two are recorded
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


if __name__ == "__main__":
    run_alone(main)
