"""A rank of a training run that notes when it has come how far: `starting_rank.py SECONDS [options of pretrain_gpt]`.

SECONDS is when the command was given, on the clock of time.monotonic. Rank 0 prints the seconds of each phase.
"""
import os
import sys
import time
from collections.abc import Callable

ENTERED = time.monotonic()
times: dict[str, float] = {}        # when each phase ended


def note(phase: str) -> None:
    times.setdefault(phase, time.monotonic())


def noting(phase: str, function: Callable) -> Callable:
    """Return a function that notes the end of its first call."""
    def noted(*args, **others):
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
    import numpy as np  # noqa: F401

    import mpi_impl  # noqa: F401  the rank's environment, before NumPy
    note("import of NumPy")
    from mpi_impl.comm.group import world
    world()
    note("start of MPI")
    from mpi_impl.pretrain_gpt import main as train
    from mpi_impl.programs import pretraining
    note("import of the rest")
    pretraining.Pretraining.check_files = noting("options", pretraining.Pretraining.check_files)
    pretraining.connect = noting("data and tokenizer", pretraining.connect)
    pretraining.Pretraining.work = noting_first("model, checks, measured rate", pretraining.Pretraining.work)
    pretraining.Trainer.step = noting("first step", pretraining.Trainer.step)
    from mpi_impl.launching.entry import run
    run(train)
    if world().rank == 0:
        report(began)


def noting_first(phase: str, function: Callable) -> Callable:
    """Return a function that notes the beginning of its first call."""
    def noted(*args, **others):
        note(phase)
        return function(*args, **others)

    return noted


def report(began: float) -> None:
    for phase, ended in times.items():
        print(f"phase {ended - began:.3f} {phase}")
        began = ended


if __name__ == "__main__":
    main()
