"""A bug of the zoo on the ranks of a pool, and what its runs show; and the same runs without it."""
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from benchmarks.bug_matrix import runs
from benchmarks.bug_matrix.runs import Accounts, LearningCurve
from benchmarks.bug_matrix.settings import STEPS, BugSetting, setting_of
from mpi_impl.launch.pool import RankFailure
from reference.precision import FORMATS
from shardlab.compare.recording import Recording, in_memory
from tests.planted import buggy_codes, planted_run
from tests.small_pools import SmallPools
from tests.zoo.entry import Bug, Entry

SEEDS = range(1, 7)
WINDOW = 20             # steps over which a loss is averaged
SHORT = 20              # steps for the gradient's norm; equal ones to the last bit need no long run
PATIENCE = 60.0         # seconds in which a short run must end; a long one gets several times as much


class CleanRuns:
    """Runs without a bug, each made once. Learning curves of many seeds are kept in a file."""

    def __init__(self, pools: SmallPools, file: Path, steps: int = STEPS, seeds: Sequence[int] = SEEDS):
        """Let learning curves have this many steps, from these seeds."""
        self.pools, self.file, self.steps, self.seeds, self.known = pools, file, steps, seeds, {}
        self.curves = json.loads(file.read_text()) if file.exists() else {}

    def of(self, n: int, function: Callable, *args, timeout: float = PATIENCE):
        """Return the results of a run, or the RankFailure of one that fails without a bug, too."""
        key = n, function, args
        if key not in self.known:
            try:
                self.known[key] = self.pools.run(n, function, *args, timeout=timeout)
            except RankFailure as failure:
                self.known[key] = failure
        return self.known[key]

    def curve(self, setting: BugSetting, seed: int) -> list[float]:
        """Return the losses of a whole run with this seed, on one rank."""
        setting = replaced_seed(setting.on_one_rank, seed)
        if repr(setting) not in self.curves:
            found, = self.pools.run(1, runs.train, setting, self.steps, timeout=10 * PATIENCE)
            self.curves[repr(setting)] = found.losses
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.curves))
        return self.curves[repr(setting)]

    def band(self, setting: BugSetting) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the seed whose final loss is nearest to the mean, and mean and deviation of all, step by step."""
        curves = np.stack([smooth(self.curve(setting, seed)) for seed in self.seeds])
        mean, deviation = curves.mean(0), curves.std(0, ddof=1)
        return self.seeds[int(abs(curves[:, -1] - mean[-1]).argmin())], mean, deviation


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Return the mean of each loss and of those before it, of a window's length in all."""
    return np.array([np.mean(losses[max(0, i + 1 - WINDOW):i + 1]) for i in range(len(losses))])


def replaced_seed(setting: BugSetting, seed: int) -> BugSetting:
    loads = setting.loads and (replace(setting.loads[0], seed=seed), setting.loads[1])
    return setting._replace(case=replace(setting.case, seed=seed), loads=loads)


class PlantedBug:
    """An entry of the zoo, and what happens when its bug is planted in a run. Each run is made when it is asked for."""

    def __init__(self, entry: Entry, pools: SmallPools, clean: CleanRuns, bug: Bug | None = None):
        """Observe the entry's bug, or another one in the same run. Raises StaleBug if its line is gone."""
        self.entry, self.pools, self.clean, self.bug = entry, pools, clean, bug or entry.bug
        self.textbook = setting_of(entry) is None
        buggy_codes(self.bug)       # here, since what the ranks raise counts as seen

    def run(self, n: int, function: Callable, *args, timeout: float = PATIENCE):
        """Return the results of a run with the bug planted, or the RankFailure."""
        try:
            return self.pools.run(n, planted_run, self.bug, function, *args, timeout=timeout)
        except RankFailure as failure:
            return failure

    @cached_property
    def setting(self) -> BugSetting:
        """Return the run, with the seed that is nearest to the mean of all."""
        setting = setting_of(self.entry)
        assert setting is not None, "a bug of the textbook is in no run"
        seed, _, _ = self.clean.band(setting)
        return replaced_seed(setting, seed)

    @property
    def forms(self) -> tuple[str, ...]:
        """Return the formats in which it is compared with the textbook: with float32 also float64, the strict one."""
        return ("float32", "float64") if self.setting.form == "float32" else (self.setting.form,)

    @property
    def compared_steps(self) -> int:
        """Return how many steps are compared tensor by tensor: in float16, with those that look for a loss scale."""
        return 6 if self.setting.form == "float16" else 2

    @property
    def tolerance(self) -> float:
        """Return how far rounding may move a gradient's norm, relative to it."""
        return 1e-4 if self.setting.form == "float32" else 4 * FORMATS[self.setting.form].epsilon

    def both(self, function: Callable, *args):
        """Return the results of a short run on the setting's ranks, with the bug and without it."""
        return self.run(self.setting.ranks, function, *args), self.clean.of(self.setting.ranks, function, *args)

    # ---- the runs ----

    @cached_property
    def accounts(self) -> tuple[list[Accounts] | RankFailure, list[Accounts] | RankFailure]:
        return self.both(runs.keep_accounts, self.setting)

    @cached_property
    def short(self) -> tuple[LearningCurve | RankFailure, LearningCurve | RankFailure]:
        """Return the first steps with the bug and without it, as rank 0 prints them."""
        first = SHORT + (runs.SAVED_AFTER if self.setting.loads else 0)
        found, expected = self.both(runs.train, self.setting, first)
        return (found if isinstance(found, RankFailure) else found[0],
                expected if isinstance(expected, RankFailure) else expected[0])

    @cached_property
    def long(self) -> LearningCurve | RankFailure:
        found = self.run(self.setting.ranks, runs.train, self.setting, self.clean.steps,
                         timeout=5 * PATIENCE)
        return found if isinstance(found, RankFailure) else found[0]

    @property
    def first_steps_are_equal(self) -> bool:
        found, expected = self.short
        return repr(found) == repr(expected)

    @cached_property
    def verified(self):
        return self.both(runs.verify, self.setting, self.forms, self.compared_steps + 1)

    @cached_property
    def recordings(self) -> tuple[Recording | RankFailure, Recording | RankFailure]:
        """Return those with the bug on its ranks, and without it on one."""
        args = self.forms[-1], 2 if self.setting.loads else 0, self.compared_steps
        return (recording_of(self.run(self.setting.ranks, runs.record, self.setting, *args)),
                recording_of(self.clean.of(1, runs.record, self.setting.on_one_rank, *args)))

    @property
    def failure(self) -> RankFailure | None:
        """Return how the run ends by itself, if it does."""
        if isinstance(self.accounts[0], RankFailure):
            return self.accounts[0]
        if isinstance(self.short[0], RankFailure):
            return self.short[0]
        return self.long if not self.first_steps_are_equal and isinstance(self.long, RankFailure) else None


def recording_of(found) -> Recording | RankFailure:
    if isinstance(found, RankFailure):
        return found
    return in_memory(found[0][0], [part for _, parts in found for part in parts])


def sentence(failure: RankFailure) -> str:
    """Return what the first rank says that raised, or died, or that hangs."""
    first = min(failure.answers, key=lambda answer: ("raised", "died", "stuck", "returned").index(answer.what))
    lines = [line.strip() for line in first.detail.splitlines() if line.strip()]
    if first.what == "stuck":
        where = [line for line in lines if line.startswith("File")]
        return short_text(f"It hangs: rank {failure.answers.index(first)} waits in {where[-1] if where else '?'}")
    if first.what == "died":
        return short_text(" ".join(lines))
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Exit|Bug)\b", line)]
    said = lines[errors[-1]:errors[-1] + 2] if errors else lines[-1:]
    if said == ["AssertionError"]:
        said = [line for line in lines if line.startswith("assert ")][-1:]
    return short_text(" ".join(said))


def short_text(text: str) -> str:
    """Return the beginning of a text, without what differs from machine to machine."""
    text = without_folders(" ".join(text.split()))
    return text if len(text) <= 160 else f"{text[:157]}..."


def without_folders(text: str) -> str:
    """Return a text that names our own files as the repository does, and others (a checkpoint's) without a folder."""
    text = re.sub(r'File "(?:[^"]*/)?((?:mpi_impl|reference|tests)/[^"]+)"', r"\1", text)
    text = re.sub(r'File "[^"]*/([^"/]+)"', r"\1", text)
    return re.sub(r"(?<![\w.])/(?:[^\s/]+/)+", "", text)
