"""A rank of a training run that notes when it has come how far: `starting_rank.py SECONDS [options of pretrain_gpt]`.

SECONDS is when the command was given, on the clock of time.monotonic. Rank 0 prints the seconds of each phase.
"""
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module

ENTERED = time.monotonic()
times: dict[str, float] = {}        # when each phase ended


def note(phase: str) -> None:
    times.setdefault(phase, time.monotonic())


def noting(phase: str, function: Callable, before: bool = False) -> Callable:
    """Return a function that notes the end of its first call, or the time `before` it."""
    def noted(*args, **others):
        if before:
            note(phase)
        result = function(*args, **others)
        note(phase)
        return result

    return noted


def process_began() -> float:
    """Return when Linux started this process, to a hundredth of a second."""
    with open("/proc/self/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    began = float(sys.argv.pop(1))
    times["launcher, until it starts the rank"] = process_began()
    times["Python's interpreter"] = ENTERED
    import_module("mpi_impl")       # the rank's environment, before NumPy
    import_module("numpy")
    note("import of NumPy")
    import_module("mpi4py.MPI")
    note("start of MPI")
    train = import_module("mpi_impl.pretrain_gpt").main
    run = import_module("shardlab.programs.pretraining").Pretraining
    note("import of the rest")
    inputs, metrics = import_module("shardlab.programs.inputs").Inputs, import_module("shardlab.report.metrics").Metrics
    inputs.check_files = noting("options", inputs.check_files)
    run.connect = noting("data and tokenizer", run.connect)
    run.work = noting("model, checks, measured rate", run.work, before=True)
    metrics.step = noting("first step", metrics.step, before=True)     # a prediction steps, too
    import_module("mpi_impl.launch.entry").run(train)
    if import_module("mpi_impl.comm.group").world().rank == 0:
        report(began)


def report(began: float) -> None:
    for phase, ended in times.items():
        print(f"phase {ended - began:.3f} {phase}")
        began = ended


if __name__ == "__main__":
    main()
