"""Every command that READMEs show works in a fresh clone, on a base install."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.completion import parser_of
from tests.base_install import base_environment
from tests.readme_commands import Command, commands, copy_as_cloned

COMMANDS = commands()

QUICK = ("reference.schedules", "shardlab.plot_schedule", "shardlab.demos", "shardlab.doctor", "shardlab.demos.memory",
         "reference.prove")

BY_THEMSELVES = ("microshard", "microshard.py")      # programs with a parser of their own

# What makes a run short. Of an option that is given twice, the last counts.
MODEL = "--hidden-size 32 --num-attention-heads 8 --seq-length 32 "
SHORT = {
    "mpi_impl.pretrain_gpt": MODEL + "--eval-iters 1 --train-iters 2",
    "mpi_impl.pretrain_bert": MODEL + "--eval-iters 1 --train-iters 2",
    "shardlab.generate": "",
    "shardlab.prove": "--micro-batch-size 1 --global-batch-size 4",
    "shardlab.plan": "",
    "shardlab.score": "",
    "shardlab.dry_run": "--rank 0 --global-batch-size 1536",
    "mpi_impl.data.prepare": "--jaccard 0",         # near-duplicates need more than the base install
    "shardlab.compare": MODEL,
    "shardlab.experiments.layer_norm_order": "--layers 1 --seeds 1 --train-iters 1",
    "shardlab.experiments.model_size": "--hidden-size 16 --seeds 1 --train-iters 1",
    "shardlab.experiments.batch_size": "--batch-size 1 2 --seeds 1 --loss 9",
    "shardlab.plan.scaling_study": "",
    "shardlab.experiments.shared_layers": "--num-layers 1 --seeds 1 --train-iters 1",
    "shardlab.experiments.stale_weights": "--stages 2 --microbatches 4 --seeds 1 --lr 0.1",
    "shardlab.experiments.prefetch": "--num-layers 2 --hidden-size 16 --steps 1 --message-time 1",
    "shardlab.demos.memory": "",
    "shardlab.demos.context_parallel": "",
    "shardlab.demos.cross_entropy": "",
    "shardlab.demos.experts": "",
    "shardlab.demos.mlp": "",
    "shardlab.demos.pipeline": "",
    "shardlab.demos.stale_weights": "",
    "shardlab.demos.zero": "",
    "shardlab.demos.train": "--train-iters 2",
    "reference.prove": "--tensor-model-parallel-size 2",
    "benchmarks.fusion": "",
    **dict.fromkeys(BY_THEMSELVES, "--steps 1"),
    **dict.fromkeys(QUICK[:4], ""),
}
NOT_RUN = ("shardlab.evaluate", "tools.playground",         # they need what others publish,
           "shardlab.completion")                           # or write into the home folder


@pytest.fixture
def clone(tmp_path):
    """Make a fresh clone, with the texts and the entry that the READMEs say a reader has."""
    folder = copy_as_cloned(tmp_path / "clone")
    for name in ("texts", "submissions"):
        (folder / name).mkdir()
    for name in ("mine.toml", "submissions/mine.toml"):
        shutil.copy(folder / "shardlab/score/entries/bubble_v.toml", folder / name)
    texts = [path.read_text() for path in sorted(folder.glob("reference/*.py"))]
    (folder / "texts" / "a.txt").write_text("\n".join(texts[::2]))
    (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1::2]))
    return folder


def run(command: Command, clone: Path) -> str:
    """Run it in the clone, shortened. Return "" or what went wrong."""
    places = {name: str(Path(sys.executable).parent / name) for name in ("python", "mpiexec")}
    words = [places.get(word, word) for word in command.words]
    short = shlex.split(SHORT[command.program])
    if command.program == "shardlab.compare":       # its options are those of two runs
        words[-2:] = [f"{one} {MODEL}" for one in words[-2:]]
    elif "--load" in words and "--save" in words:   # goes on with the run that an earlier command has saved
        words += [*short, "--train-iters", "3"]
    elif not {"--help", "--check-scale"} & set(words):      # which take no time
        words += short
    done = subprocess.run(words, cwd=clone, env=base_environment(clone.parent, "plot"), capture_output=True, text=True,
                          timeout=300)
    return "" if done.returncode == 0 else f"{shlex.join(words)}\n{done.stdout[-1000:]}{done.stderr[-1000:]}"


def test_every_program_of_the_readmes_is_run_or_named_as_one_that_cannot_be():
    programs = {command.program for command in COMMANDS}
    assert programs == {*SHORT, *NOT_RUN}, "Say in SHORT which options make its run short."


@pytest.mark.parametrize("command", [one for one in COMMANDS if "--" in str(one.options) and one.program not in (
    *QUICK, *BY_THEMSELVES)], ids=str)
def test_every_option_of_the_readmes_is_declared_by_its_program(command):
    """Or by pretrain_gpt, for a comparison of two runs. (That the values fit together is seen when all are run.)"""
    given = set(re.findall(r"--[a-z][\w-]*", " ".join(command.options))) - {"--help"}
    kind = re.findall(r"--task [\w-]+", " ".join(command.options))
    parser = parser_of(command.program.replace("shardlab.compare", "mpi_impl.pretrain_gpt"), *" ".join(kind).split())
    assert given <= parser._option_string_actions.keys()


def test_quick_commands_work_in_a_fresh_clone(clone):
    """One of each program; the others are deep."""
    quick = {command.program: command for command in COMMANDS if command.program in QUICK}
    assert quick.keys() == set(QUICK)
    assert not list(filter(None, (run(command, clone) for command in quick.values())))
    assert (clone / "runs" / "memory.png").read_bytes().endswith(b"IEND\xaeB`\x82")


@pytest.mark.deep
def test_all_commands_work_in_a_fresh_clone(clone):
    """They run in the order of the READMEs, but a command that loads a model comes after the one that saves it."""
    in_order = sorted(COMMANDS, key=lambda command: command.program == "shardlab.generate")
    failed = [run(command, clone) for command in in_order if command.program not in NOT_RUN]
    assert not list(filter(None, failed))
