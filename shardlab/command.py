"""The command `shardlab`, one door to all programs: `shardlab run -n 8 pretrain_gpt ...` is
`python -m mpi_impl.launch -n 8 -m mpi_impl.pretrain_gpt ...`.

It imports neither NumPy nor MPI: help must come while one looks.
"""
import argparse
import difflib
import importlib.metadata
import os
import runpy
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpi_impl.launch import launcher
from mpi_impl.launch.entry import TYPED, ArgumentParser, run_alone
from mpi_impl.launch.guard import run_guarded
from mpi_impl.runtime.advice import typed
from mpi_impl.runtime.files import check_folder
from reference.errors import UserError
from shardlab.demos import DEMOS

ROOT = Path(__file__).parents[1]
RESULTS = "runs/demo"       # of the demo, in the current folder
DEMO = f"""
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 8
    --seq-length 128
    --vocab-size 1024
    --init-method-std 0.06
    --hidden-dropout 0
    --attention-dropout 0
    --micro-batch-size 2
    --global-batch-size 16
    --train-iters 500
    --log-interval 25
    --eval-interval 100
    --lr 5e-3
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --adam-beta2 0.95
    --sample-tokens 300
    --metrics-file {RESULTS}/metrics.jsonl
    --ledger {RESULTS}/ledger.json
    --report {RESULTS}/report.html
    --save {RESULTS}
""".split()
SHARED = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")     # 2 and 2 of the demo
AFTER_DEMO = f"""
Open {RESULTS}/report.html in a browser, and press Play. The model writes more:
{typed("shardlab")} generate --load {RESULTS} --prompt "def " --tokens-to-generate 200"""
ASIDE = "last_run"            # in the folder, for checkpoints of the run before
TRACKER = "latest_checkpointed_iteration.txt"       # of checkpoints/on_disk.py, which imports NumPy

PROGRAMS = "pretrain_gpt", "pretrain_bert", "prove", "generate", "evaluate"     # of ranks
LABS = ROOT / "course" / "labs"
OWN_PACKAGES = ("shardlab", "mpi_impl", "reference")

HELP = """\
Usage: shardlab COMMAND [OPTIONS]

{commands}

`shardlab COMMAND --help` lists a command's options. RANKS are processes that share the work: 8 of them run on two
cores, too, only slower. More: docs/command.md
"""


class Module(NamedTuple):
    """A program of one process, with its options."""

    name: str
    argv: list[str]


Target = Module | argparse.Namespace        # or a program of ranks: the launcher's options


class Command(NamedTuple):
    """A word after `shardlab`."""

    usage: str                                      # what comes after it
    about: str
    program: Callable[[list[str]], Target]          # that the words behind it name
    folder: str = ""                                # that it saves into, each time again
    afterwards: str = ""                            # printed when it has ended well


def main(argv: Sequence[str] | None = None) -> None:
    run_alone(partial(act, list(sys.argv[1:] if argv is None else argv)))


def act(argv: list[str]) -> None:
    """Do what a command line asks for. Raises UserError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return
    if argv[0] == "--version":
        print(f"shardlab {version()}")
        return
    if argv[0] != "run":        # whose programs have names of their own
        name = [word for word in argv[:2 if argv[0] == "demos" else 1] if not word.startswith("-")]
        os.environ[TYPED] = " ".join(["shardlab", *name])
    program, command = program_of(argv), COMMANDS[argv[0]]
    if isinstance(program, Module):
        run_module(program)
        return
    begins_anew = command.folder and "--load" not in argv
    if begins_anew:
        check_folder(command.folder)
        put_aside(Path(command.folder))
    status = run_guarded(partial(run_alone, partial(launcher.start, program)))    # leaves no process behind
    if begins_anew:
        replace_last(Path(command.folder))
    if status == 0 and command.afterwards:
        print(command.afterwards)
    sys.exit(status)


def put_aside(folder: Path) -> None:
    """Put what a command's last run has saved in its folder aside, until this run has saved something."""
    if (folder / TRACKER).exists():
        move_checkpoints(folder, folder / ASIDE)


def replace_last(folder: Path) -> None:
    """Delete what was put aside if this run has saved something, or else put it back."""
    aside = folder / ASIDE
    if not aside.exists():
        return
    if not (folder / TRACKER).exists():
        move_checkpoints(aside, folder)
    shutil.rmtree(aside)


def move_checkpoints(here: Path, there: Path) -> None:
    """Move checkpoints, and what says which is the latest, to a folder that may have older ones."""
    there.mkdir(exist_ok=True)
    for path in [*here.glob("iter_*"), *here.glob(TRACKER)]:
        if (other := there / path.name).is_dir():
            shutil.rmtree(other)
        path.rename(other)


def program_of(argv: list[str]) -> Target:
    """Return the program that a command line starts. Raises UserError for a word that it does not know."""
    name, *others = argv
    if name not in COMMANDS:
        raise unknown("shardlab has no command", name, COMMANDS)
    return COMMANDS[name].program(others)


def run_module(module: Module) -> None:
    """Run it as `python -m` does. Raises UserError if a package that it needs is missing."""
    sys.argv[1:] = module.argv
    try:
        runpy.run_module(module.name, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OWN_PACKAGES:
            raise
        raise UserError(f"{module.name} needs the package {package}, which is not installed in this environment. "
                        f"`{typed('shardlab')} doctor` tells what is missing, and how to install it.") from error


def version() -> str:
    """Return the project's version: the clone's, or that of the installed package."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return importlib.metadata.version("shardlab")


def help_text() -> str:
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    lines = [f"  {f'{name} {command.usage}':{width}}  {command.about}" for name, command in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


def unknown(problem: str, name: str, known: Iterable[str]) -> UserError:
    """Return an error that names the nearest words, or all of them if none is near."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    advice = f"Did you mean {' or '.join(near)}?" if near else f"It has {', '.join(known)}."
    return UserError(f"{problem} {name!r}. {advice}")


# ---- the commands ---------------------------------------------------------------------------------------------------


def module_of(program: str) -> str:
    """Return the module of a program of ranks."""
    return f"{'mpi_impl' if program.startswith('pretrain_') else 'shardlab'}.{program}"


def run(argv: list[str]) -> Target:
    """Return a program that is named in short, as a file, or after -m, as for mpi_impl.launch."""
    options = launcher.parse_options(argv, "shardlab run")
    if not options.script and not options.module:
        raise UserError(f"shardlab run has nothing to run. Name a program ({', '.join(PROGRAMS)}), a file, or a module "
                        "after -m.")
    name, *others = options.script or [""]
    if name in PROGRAMS:
        options.module, options.script = [module_of(name), *others], []
        return unless_help(options)
    if name in COMMANDS:
        raise UserError(f"{name} is a command, which starts ranks itself if it needs any: "
                        f"`{typed('shardlab')} {name}`.")
    if name and not os.path.exists(name) and not Path(name).suffix:
        raise unknown("shardlab run finds neither a program nor a file", name, PROGRAMS)
    if asks_for_help(options.module or others):
        options.n = 1       # so that it is printed once
    return options


def on_ranks(module: str, ranks: int, argv: list[str]) -> Target:
    """Return a module on as many ranks as -n says, which may stand anywhere. The other options are the module's."""
    parser = ArgumentParser(prog=module, add_help=False)
    launcher.add_launch_options(parser, ranks)
    options, others = parser.parse_known_args(argv)
    options.module, options.script, options.own = [module, *others], [], True
    return unless_help(options)


def unless_help(options: argparse.Namespace) -> Target:
    """Return a program of ranks; or, if it is only asked for its --help, the same program in this process."""
    name, *others = options.module
    return Module(name, others) if asks_for_help(others) else options


def asks_for_help(words: Iterable[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(words)


def demo(argv: list[str]) -> Target:
    """Return the training of a small GPT. Options that are given again replace the demo's."""
    program = on_ranks("mpi_impl.pretrain_gpt", 8, [*DEMO, *argv])
    if not isinstance(program, Module) and set(SHARED).isdisjoint(argv) and program.n not in (4, 8, 16, 32):
        raise UserError(f"-n is {program.n}, but shardlab demo shares its model over 2 x 2 ranks and its 8 "
                        "microbatches over the replicas of it: -n may be 4, 8, 16 or 32. Or give "
                        f"{' and '.join(SHARED)}, too.")
    return program


def demos(argv: list[str]) -> Target:
    """Return the list of the demos, or one of them."""
    name, *others = argv or ["--help"]
    if name in ("-h", "--help"):
        return Module("shardlab.demos", others)
    if name not in DEMOS:
        raise unknown("shardlab demos has no", name, DEMOS)
    if others and others[0].isdecimal():
        raise UserError(f"shardlab demos {name} cannot use {others[0]}. If it is the number of ranks, write "
                        f"`{typed('shardlab')} demos {name} -n {others[0]}`.")
    return on_ranks(f"shardlab.demos.{name}", 4, others)


def labs(argv: list[str]) -> Target:
    """Return the program that makes a course of the labs: that of this clone, since no package of ours has it."""
    if not any(LABS.glob("lab*.py")):       # the students' bundle has notebooks there
        raise UserError(f"shardlab labs needs the sources of the labs, but there is no {LABS}: a clone of the project "
                        "has them, and the installed package does not. Run ./run.sh labs in a clone.")
    sys.path.append(str(ROOT))
    return Module("course.grading.release", argv)


COMMANDS = {
    "doctor": Command("", "tell what this machine has, and what is missing", partial(Module, "shardlab.doctor")),
    "demo": Command("[OPTIONS]", "train a small GPT on 8 ranks, and account for every byte", demo, RESULTS, AFTER_DEMO),
    "demos": Command("[NAME] [-n RANKS]", "show one idea on ranks, as in `shardlab demos mlp -n 4`; no name lists them",
                     demos),
    "run": Command("-n RANKS PROGRAM ...", f"start {', '.join(PROGRAMS[:2])}, or a file such as microshard.py", run),
    "generate": Command("[-n RANKS] ...", "let a trained GPT write", partial(on_ranks, "shardlab.generate", 1)),
    "evaluate": Command("[-n RANKS] ...", "evaluate a model on published data", partial(
        on_ranks, "shardlab.evaluate", 1)),
    "prepare": Command("...", "make a corpus ready for training", partial(Module, "mpi_impl.data.prepare")),
    "plan": Command("...", "find the fastest way to shard a model over a cluster", partial(Module, "shardlab.plan")),
    "dry_run": Command("--world-size N ...", "run single ranks of an imagined world", partial(
        Module, "shardlab.dry_run")),
    "score": Command("[FILE ...]", "rank schedules, layouts and plans on a leaderboard that needs no GPU", partial(
        Module, "shardlab.score")),
    "plot_schedule": Command("...", "draw pipeline schedules", partial(Module, "shardlab.plot_schedule")),
    "compare": Command("A B", "name the first tensor in which two runs differ", partial(Module, "shardlab.compare")),
    "recorder": Command("> shardlab_recorder.py", "print a file by which a PyTorch program records its steps", partial(
        Module, "shardlab.compare.their_runs")),
    "textbook": Command("MODEL RECORDING ...", "compute the first step of recordings again, and name the wrong one",
                        partial(Module, "shardlab.compare.their_runs.textbook")),
    "hang": Command("DUMPS", "say who did not come to which collective, from PyTorch's flight recorder", partial(
        Module, "shardlab.hang")),
    "prove": Command("[-n RANKS] ...", "prove that a training run computes what one process does", partial(
        on_ranks, "shardlab.prove", 4)),
    "microshard": Command("[-n RANKS] ...", "train, prove and write with the whole algorithm in one file", partial(
        on_ranks, "microshard", 4)),
    "labs": Command("[FOLDER]", "make a course of the labs, for nbgrader and Gradescope", labs),
    "completion": Command("SHELL", "print a script by which a shell completes all this at the tab key", partial(
        Module, "shardlab.completion")),
}

if __name__ == "__main__":
    main()
