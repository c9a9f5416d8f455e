"""A description of this machine, of all that Shardlab uses, and of what to do about the rest: `shardlab doctor`.

The environment may be broken in any way. So this imports nothing that could be: whatever may fail, crash or wait for
ever is tried in a process of its own, with a time limit. The exit status is 1 if training cannot work, and else 0.
"""
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mpi_impl.launch import mps
from mpi_impl.launch.begin import ROOT
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.launch.guard import run_guarded
from mpi_impl.launch.launcher import launcher, mpi_vendor, own_job, own_program
from mpi_impl.launch.status import shared_memory_here
from mpi_impl.runtime.advice import is_installed, typed
from mpi_impl.runtime.mpis import DEFAULT, implementation
from mpi_impl.runtime.rank_environment import cores
from mpi_impl.runtime.tables import bytes_of
from reference.errors import UserError

# Packages of the base install that every run imports, by name, with their modules; and others, with their use.
NEEDED = {"numpy": "numpy", "mpi4py": "mpi4py", "tokenizers": "tokenizers", "safetensors": "safetensors",
          "ml-dtypes": "ml_dtypes", "msgspec": "msgspec", "xxhash": "xxhash", "psutil": "psutil"}
USEFUL = {"matplotlib": "pictures", "shtab": "tab completion", "tqdm": "the progress of a preparation"}
NOTEBOOKS = ("jupyterlab", "jupytext")      # modules

# What Shardlab uses of MPI beyond messages and sums, by its trial in comm/abilities.py; and what follows without.
ABILITIES = {
    "threads": "a rank that stops while others wait for it may go unnoticed, so give each job a --timeout",
    "shared_memory": "sums of ranks on one machine take several times as long",
    "device_memory": "arrays on GPUs go through the host, unless NCCL moves them",
}

SHARING_NCCL = 23000        # the first version in which ranks can share a GPU, 2.30
SECONDS = 60                # for one question
SECONDS_TO_COMPILE = 240
SHARING = 8                 # ranks of the example that shares a GPU
WIDTH = 110
PIP = f"{typed('pip')} install"
INSTALL = "In a clone of the project, ./run.sh setup test makes an environment that has it all; elsewhere, "


class Fact(NamedTuple):
    """A fact about this machine."""

    state: str          # "ok", "no" (and training works without), or "FAULT"
    sentence: str
    advice: str = ""    # then lines for a shell, if any

    def __str__(self) -> str:
        advice, *commands = self.advice.split("\n")
        text = textwrap.fill(f"{self.sentence} {advice}".strip(), WIDTH, initial_indent=f"  {self.state:7}",
                             subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
        return "\n".join([text, *(" " * 13 + command for command in commands)])


class Reply(NamedTuple):
    """The output of a process, and its exit status; None if it ran out of time."""

    status: int | None
    text: str

    @property
    def problem(self) -> str:
        """Return what went wrong, as a clause: the last line that was printed, which is the message of an error."""
        if self.status is None:
            return "it did not end in time"
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        ended = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        return lines[-1].removeprefix("error: ").rstrip(".") if lines else f"it ended with {ended}"


def main(argv: Sequence[str] | None = None) -> None:
    ArgumentParser(prog="shardlab.doctor", description="Tell what this machine has, and what is missing.",
                   epilog="The exit status is 1 if training cannot work.").parse_args(argv)
    print("Shardlab on this machine:", flush=True)
    states = set()
    for fact in facts():
        print(fact, flush=True)
        states.add(fact.state)
    if "FAULT" in states:
        print("Training cannot work here yet. Do what is said behind FAULT, then ask again.")
        sys.exit(1)
    shardlab = typed("shardlab")
    print(f"Training works here. Begin with `{shardlab} demo`, or with `{shardlab} demos mlp -n 4`.")


def facts() -> Iterator[Fact]:
    """Yield one fact after the other, since some take seconds to find."""
    yield python()
    yield packages()
    mpi = mpi_library()
    yield mpi
    if mpi.state == "ok":
        yield two_ranks()
        yield abilities()
        yield from slurm()
    yield processors()
    yield shared_memory()
    yield compiler()
    yield gpu()
    yield cupy()
    yield sharing()
    yield notebooks()


# ---- questions, each to a process of its own ------------------------------------------------------------------------


def ask(command: Sequence[str], seconds: float = SECONDS) -> Reply:
    """Run a command with a time limit, and return what it printed. Its output is a file: a pipe would be held
    open by whatever it leaves behind.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                       start_new_session=True)
        except OSError as error:
            return Reply(127, f"{command[0]} cannot be started: {error.strerror}")
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return Reply(status, output.read().replace(b"\0", b"").decode(errors="replace"))


def ask_python(function: Callable[[], None], seconds: float = SECONDS) -> Reply:
    """Call a function of this module in a Python of its own."""
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from shardlab.doctor import {function.__name__} as ask; ask()"
    return ask([sys.executable, "-P", "-c", code], seconds)


def import_packages() -> None:
    """Print a line for each package that cannot be imported."""
    for name in (*NEEDED, *USEFUL):
        module = NEEDED.get(name, name)
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(name, "" if error.name == module else f"({error})")


def print_library() -> None:
    """Print the name and the version of the MPI library."""
    try:
        mpi_vendor()
    except UserError as error:
        sys.exit(" ".join(str(error.__cause__).split()))
    from mpi_impl.comm.mpi_library import library
    print(library())


def print_kernels() -> None:
    """Print the C++ compiler and whether our kernels, which it compiles, can be loaded."""
    from mpi_impl.kernels.fused import core
    print(core.compiler())
    print("works" if core.works() else "fails")


def print_cupy() -> None:
    """Print CuPy's version, the number of GPUs that it finds, and NCCL's version as one number; 0 without it."""
    import cupy
    from cupy.cuda import nccl
    print(cupy.__version__, cupy.cuda.runtime.getDeviceCount() if cupy.is_available() else 0,
          nccl.get_version() if nccl.available else 0)


# ---- what training needs --------------------------------------------------------------------------------------------


def python() -> Fact:
    return Fact("ok", f"Python {platform.python_version()}, {sys.executable}, on {platform.system()} "
                f"{platform.machine()}.")


def packages() -> Fact:
    reply = ask_python(import_packages, 2 * SECONDS)
    if reply.status != 0:
        return Fact("FAULT", f"The packages that training needs cannot be imported: {reply.problem}.",
                    f"{INSTALL}{PIP} --force-reinstall {' '.join(NEEDED)}.")
    lacking = {line.split()[0]: line.strip() for line in reply.text.splitlines()}
    install = f"{INSTALL}{PIP} {' '.join(lacking)}."
    if needed := [line for name, line in lacking.items() if name in NEEDED]:
        return Fact("FAULT", f"Training needs packages that cannot be imported: {', '.join(needed)}.", install)
    if lacking:
        return Fact("no", "All packages that training needs can be imported, but there is no " + ", and no ".join(
            f"{line}, for {USEFUL[name]}" for name, line in lacking.items()) + ".", install)
    return Fact("ok", "All packages of the base install can be imported.")


def mpi_library() -> Fact:
    """Find the MPI library of mpi4py, and the launcher that fits it."""
    reply = ask_python(print_library)
    if reply.status != 0:
        return Fact("FAULT", f"There is no MPI to use: {reply.problem}.",
                    f"{INSTALL}{PIP} mpi4py {DEFAULT.wheel}, or load your system's MPI.")
    library = reply.text.strip()
    try:
        command = launcher(library.rsplit(" ", 1)[0], 2)[0]
    except UserError as error:
        return Fact("FAULT", str(error))
    return Fact("ok", f"mpi4py uses {library}, and {command} is a launcher that fits it.")


def two_ranks() -> Fact:
    """Start two ranks, and let them add up."""
    job = ["-n", "2", "--timeout", str(SECONDS), "-m", "mpi_impl.launch.first_sum"]
    reply = ask(own_program("mpi_impl.launch", *job), SECONDS + 10)
    if reply.status == 0 and "1 + 2 = 3" in reply.text.splitlines():        # an MPI may complain, and work
        return Fact("ok", "Two ranks were started and added up 1 + 2 = 3.")
    wheel = implementation(ask_python(print_library).text).wheel
    return Fact("FAULT", f"Two ranks were started, but did not add up 1 + 2: {reply.problem}.",
                f"All they said is shown by `{typed('python')} -m mpi_impl.launch {' '.join(job)}`. Where shared "
                   "memory is small, as it is in a container (see below), give it more. Where a firewall keeps "
                   "processes of one machine apart, let them talk. Otherwise reinstall MPI: "
                   f"{PIP} --force-reinstall mpi4py {wheel}.")


def abilities() -> Fact:
    """Let two ranks try what Shardlab uses of MPI beyond messages and sums; each may crash them, or take forever."""
    lacking = [name for name in ABILITIES if ask(own_job(2, "mpi_impl.launch.trial", name)).status != 0]
    can = [name.replace("_", " ") for name in ABILITIES if name not in lacking]
    return Fact("no" if lacking else "ok",
                f"They tried what else Shardlab uses of this MPI: {' and '.join(can) or 'nothing'} worked.",
                " ".join(f"Without {name.replace('_', ' ')}, {ABILITIES[name]}." for name in lacking))


def slurm() -> Iterator[Fact]:
    """Find out whether srun, if it is there, introduces this MPI's ranks to one another."""
    if not (program := shutil.which("srun")):
        return
    kind = implementation(ask_python(print_library).text).srun
    reply = ask([program, "--mpi=list"])
    if reply.status != 0:
        yield Fact("no", f"srun is installed, but knows no cluster: {reply.problem}.")
    elif kind in (line.split()[-1] for line in reply.text.splitlines() if line.strip()):
        yield Fact("ok", f"srun can start this MPI's ranks (--mpi={kind}).")
    else:
        yield Fact("no", f"srun cannot start this MPI's ranks, since this Slurm lacks {kind} (srun --mpi=list).",
                   "Install what it needs for that (on Debian for pmix: apt install libpmix-dev), or an MPI for "
                   "which it has one.")


# ---- what makes it faster, or shows it ------------------------------------------------------------------------------


def processors() -> Fact:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    n = cores()
    return Fact("ok", f"{n} {'cores' if n > 1 else 'core'} may be used, and the machine has {bytes_of(memory)} of "
                "memory.", "More ranks than cores take turns, which is slower and changes no result.")


def shared_memory() -> Fact:
    sentence, advice = shared_memory_here()
    return Fact("no" if advice else "ok", sentence, advice)


def compiler() -> Fact:
    advice = ("Runs compute with NumPy alone, which is slower. On Debian and Ubuntu: apt install g++; on macOS: "
              "xcode-select --install.")
    reply = ask_python(print_kernels, SECONDS_TO_COMPILE)
    lines = reply.text.split("\n")
    if reply.status != 0:
        return Fact("no", f"Whether our kernels can be compiled could not be found out: {reply.problem}.")
    if not lines[0]:
        return Fact("no", "There is no C++ compiler.", advice)
    if lines[1] != "works":
        return Fact("no", f"The C++ compiler {lines[0]} cannot compile our kernels, or they cannot be loaded.",
                    advice)
    return Fact("ok", f"The C++ compiler {lines[0]} has compiled our kernels for this machine.")


def gpu() -> Fact:
    if not (program := shutil.which("nvidia-smi")):
        return Fact("no", "There is no NVIDIA GPU, or no driver for it (nvidia-smi is not there): ranks compute on "
                    "cores.")
    reply = ask([program, "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if reply.status != 0:
        return Fact("no", f"NVIDIA's driver does not work: nvidia-smi says that {reply.problem}.",
                    "Reinstall the driver, or start the container with the GPUs (docker run --gpus all).")
    return Fact("ok", f"NVIDIA's driver finds {'; '.join(reply.text.strip().splitlines())}.")


def cupy() -> Fact:
    """Find CuPy, the GPUs that it can use, and NCCL."""
    advice = (f"Training on GPUs needs it: {PIP} '.[cuda12,cudnn12]' in a clone of the project, or "
              "'.[cuda13,cudnn13]', whichever CUDA the driver has.")
    if not is_installed("cupy"):
        return Fact("no", "CuPy is not installed, and NCCL, which it would use, is not looked for.", advice)
    reply = ask_python(print_cupy)
    if reply.status != 0:
        return Fact("no", f"CuPy is installed but cannot be imported: {reply.problem}.", advice)
    version, count, nccl = reply.text.split()[-3:]
    if count == "0":
        return Fact("no", f"CuPy {version} is installed, but finds no GPU that it can use.")
    if nccl == "0":
        return Fact("no", f"CuPy {version} can use GPUs ({count} of them), but finds no NCCL: arrays go by MPI "
                    "from one to the other, which is slower.",
                    f"{PIP} nvidia-nccl-cu12, or nvidia-nccl-cu13.")
    return Fact("ok", f"CuPy {version} can use GPUs ({count} of them), and has NCCL: add --device cuda to a run.")


def sharing() -> Fact:
    """Find out whether ranks can share a GPU with NCCL, and whether MPS makes that quick."""
    reply = ask_python(print_cupy) if is_installed("cupy") else Reply(1, "")
    _, count, nccl = reply.text.split()[-3:] if reply.status == 0 else ("", "0", "0")
    version = f"{int(nccl) // 10_000}.{int(nccl) // 100 % 100}"
    if "0" in (count, nccl):
        return Fact("no", "Ranks cannot share a GPU with NCCL: that needs a GPU, CuPy, and NCCL 2.30 or newer.")
    if int(nccl) < SHARING_NCCL:
        return Fact("no", f"Ranks cannot share a GPU with NCCL {version}: that needs 2.30 or newer.",
                    f'{PIP} -U "nvidia-nccl-cu13>=2.30", or nvidia-nccl-cu12, whichever CUDA CuPy was made for.')
    if not mps.find_program():
        return Fact("no", f"Ranks can share a GPU with NCCL {version}, but take turns on it, which is slow, since "
                          f"MPS's {mps.PROGRAM} is not there.", mps.WHERE_FROM)
    run = f"{typed('shardlab')} run --mps -n {SHARING} pretrain_gpt ... --device cuda --distributed-backend nccl"
    return Fact("ok", f"Ranks can share a GPU with NCCL {version}, and with MPS compute at the same time: `{run}`.",
                "\n".join(["Instead of --mps, a shell can start a daemon of its own, and end it:",
                           *mps.own_daemon(SHARING)]))


def notebooks() -> Fact:
    if missing := [name for name in NOTEBOOKS if not is_installed(name)]:
        return Fact("no", f"Notebooks and labs need {', '.join(missing)}, and cannot be opened without.",
                    "In a clone of the project, ./run.sh setup notebook installs them; elsewhere, "
                       f"{PIP} {' '.join(missing)}.")
    return Fact("ok", "Jupyter is installed: ./run.sh notebook opens the walkthroughs and labs.")


if __name__ == "__main__":
    sys.exit(run_guarded(partial(run_alone, main)))
