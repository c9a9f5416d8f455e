"""The contenders of cuda_step.py, and their rounds. One that fails loses only its own figures."""
import json
import os
import re
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

from turns import Contender, program
from works import CHOSEN, Work

WARM_UP = 8             # steps that compile, allocate and record
FEWEST_STEPS = 5        # of a turn
ENVIRONMENT = {"WORLD_SIZE": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(min(8, os.cpu_count() or 1))}
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|OutOfMemory)\w*: .+|(\S+: )?error: .+")


class Way(NamedTuple):
    """A way to take a step: the contender's program and its options."""

    label: str
    program: str
    options: str = ""
    float32: bool = True        # whether there are weights in float32, as in ours
    tunes: bool = False         # whether it times kernels while it compiles, for which it needs the GPU to itself


# The most valuable first: a run that is cut has the figures of those that came before.
WAYS = {
    "ours": Way("ours", "shardlab_gpt"),
    "graph": Way("ours, a graph", "shardlab_gpt", "--graph"),
    "compiled": Way("PyTorch compiled", "pytorch_gpu", "--compile default"),
    "masters": Way("PyTorch compiled, the step a graph, bfloat16 with float32 masters", "pytorch_gpu",
                   "--compile default --step-graph --weights masters"),
    "step": Way("PyTorch compiled, the step a graph", "pytorch_gpu", "--compile default --step-graph"),
    "bf16": Way("PyTorch compiled, the step a graph, bfloat16 weights (other numerics)", "pytorch_gpu",
                "--compile default --step-graph --weights bfloat16", float32=False),
    "graphs": Way("PyTorch compiled, reduce-overhead", "pytorch_gpu", "--compile graphs"),
    "eager": Way("PyTorch eager", "pytorch_gpu"),
    "tuned-masters": Way("PyTorch max-autotune, the step a graph, bfloat16 with float32 masters", "pytorch_gpu",
                         "--compile tuned --step-graph --weights masters", tunes=True),
    "tuned": Way("PyTorch max-autotune", "pytorch_gpu", "--compile tuned-graphs", tunes=True),
    "tuned-bf16": Way("PyTorch max-autotune, the step a graph, bfloat16 weights (other numerics)", "pytorch_gpu",
                      "--compile tuned --step-graph --weights bfloat16", float32=False, tunes=True)}


def ways_of(work: Work) -> dict[str, Way]:
    """Return the ways that this work can be done: ours reads numbers of tokens while a layer with experts computes,
    which a graph cannot do.
    """
    return {key: way for key, way in WAYS.items() if not (work.E and key == "graph")}


def command_of(way: Way, work: Work) -> list[str]:
    """Return the command that starts a contender."""
    ours = ["1", "--cuda"] if way.program == "shardlab_gpt" else []
    return [*program(way.program), work.argument, *ours, *way.options.split()]


def memory_of(work: Work) -> float:
    """Estimate the bytes that a contender takes: states, what a layer keeps for its backward, logits, and libraries."""
    kept = 12 * work.h + 3 * work.f * (CHOSEN if work.E else 1)
    return 1.15 * (22 * work.weights + 2 * work.tokens * (work.L * kept + 8 * work.V)) + 2e9


class Rounds:
    """The turns of one work's contenders, whose figures are kept as soon as each turn has ended."""

    def __init__(self, name: str, work: Work, options: Namespace, deadline: float):
        """`deadline`, by time.monotonic, is that of the whole run."""
        self.name, self.work, self.options, self.deadline = name, work, options, deadline
        self.until = deadline                               # of what is going on: starts leave time for rounds
        self.began, self.alive = time.monotonic(), dict[str, Contender]()
        self.times: dict[str, list[list[float]]] = {}       # key -> rounds -> seconds of each step
        self.steps: dict[str, int] = {}                     # in a turn
        self.errors: dict[str, str] = {}
        self.logs = tempfile.TemporaryDirectory()

    def measure(self, keys: list[str], memory: float) -> None:
        """Measure these contenders. As many as fit into `memory` bytes of a GPU are alive at once, and take turns.

        Ours comes first, and stays for the turns of all others.
        """
        stays, others = [key for key in keys if key == "ours"], [key for key in keys if key != "ours"]
        room = max(1, int(memory / memory_of(self.work)) - len(stays))
        try:
            for i in range(0, max(1, len(others)), room):
                batch = others[i:i + room]
                if self.over():
                    break
                self.start([key for key in stays + batch if key not in self.alive and key not in self.errors])
                self.play(stays + batch)
                self.end(batch)
        finally:
            self.end(list(self.alive))
            self.logs.cleanup()

    def start(self, keys: list[str]) -> None:
        """Start contenders side by side, and warm them up. Those that time kernels follow, one after the other.

        Time is left for the rounds of all that are alive then: one that is not warm by then has failed.
        """
        seconds = 1.5 * self.options.rounds * self.options.seconds * (len(self.alive) + len(keys))
        self.until = self.deadline - seconds
        with ThreadPoolExecutor(max(1, len(keys))) as pool:
            list(pool.map(self.open, keys))
            list(pool.map(self.warm_up, [key for key in keys if not WAYS[key].tunes]))
        for key in keys:
            if WAYS[key].tunes and not self.over():
                self.warm_up(key)
        self.until = self.deadline

    def open(self, key: str) -> None:
        try:
            with self.log_of(key).open("w") as log:
                self.alive[key] = Contender(key, [command_of(WAYS[key], self.work)], ENVIRONMENT, 1, self.limit(), log)
        except SystemExit as error:
            self.fail(key, error)

    def warm_up(self, key: str) -> None:
        if key in self.alive and self.take(key, WARM_UP):
            self.say(f"{WAYS[key].label} is warm")

    def play(self, keys: Iterable[str]) -> None:
        """Let contenders take turns, as long as there is time."""
        for number in range(self.options.rounds):
            for key in keys:
                found = self.turn(key) if key in self.alive and not self.over() else []
                if found:
                    self.keep(key, number, found)

    def turn(self, key: str) -> list[float]:
        """Take a turn, whose first steps do not count. Before the first one, choose its number of steps."""
        if key not in self.steps and (found := self.take(key, 5)):
            self.steps[key] = max(FEWEST_STEPS, round(self.options.seconds / median(found[2:])))
        before = max(2, self.steps.get(key, 0) // 10)
        return self.take(key, before + self.steps[key])[before:] if key in self.alive else []

    def take(self, key: str, steps: int) -> list[float]:
        """Return the seconds of each step; none if the contender fails."""
        try:
            return self.alive[key].turn(steps, self.limit())
        except (SystemExit, OSError) as error:
            self.fail(key, error)
            return []

    def over(self) -> bool:
        return time.monotonic() >= self.until

    def limit(self) -> float:
        """Return the seconds after which a contender has failed."""
        return max(1.0, min(self.options.patience, self.until - time.monotonic()))

    def keep(self, key: str, number: int, found: list[float]) -> None:
        self.times.setdefault(key, []).append(found)
        ms = [round(1e3 * seconds, 4) for seconds in (median(found), min(found), max(found))]
        self.write(key, round=number, steps=len(found), **dict(zip(("ms", "least", "most"), ms)))
        self.say(f"{WAYS[key].label}, round {number + 1}: {ms[0]:.2f} ms")

    def fail(self, key: str, error: BaseException) -> None:
        """Keep the last line of a contender's error, and end it."""
        if key in self.alive:
            self.alive.pop(key).stop(2.0)       # a process that dies prints its error meanwhile
        lines = self.log_of(key).read_text(errors="replace").splitlines()
        self.errors[key] = next((line.strip() for line in reversed(lines) if ERROR.match(line.strip())), str(error))
        self.write(key, error=self.errors[key], log=lines[-20:])
        self.say(f"{WAYS[key].label}: {self.errors[key]}")

    def end(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self.alive:
                self.alive.pop(key).stop()

    def log_of(self, key: str) -> Path:
        return Path(self.logs.name, key)

    def write(self, key: str, **what: object) -> None:
        """Append a line to the file of --json, if there is one."""
        if self.options.json:
            with open(self.options.json, "a") as file:
                file.write(json.dumps({"work": self.name, "contender": key, **what}) + "\n")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:3.0f} s] {self.name}: {text}", file=sys.stderr, flush=True)
