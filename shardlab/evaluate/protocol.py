"""Several models: the papers' protocol of fine-tuning, and an ensemble.

The protocol is the best learning rate and batch size, then the median over several seeds (Shoeybi et al. 2019, section
5.3, after Liu et al. 2019, RoBERTa): both numbers are chosen by the main figure on the validation part, and the median
of that over 5 seeds is the result. A median is not moved by the one run in five that fails to learn, which happens to
large models on small data. The test part is not asked: it must choose nothing.

An ensemble answers with the mean of its models' probabilities. (The paper does not say how its own does.)
"""
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from mpi_impl.comm.group import Group
from mpi_impl.runtime.files import write_whole
from reference.config import option
from reference.errors import UserError
from shardlab.evaluate.arguments import check_tuning, complete_options
from shardlab.evaluate.fine_tuning import FineTuning, describe_measures, metrics_of
from shardlab.evaluate.pretrained import find_pretrained
from shardlab.evaluate.tasks import TASKS
from shardlab.evaluate.zero_shot import ZeroShot


class Protocol:
    """Several runs of fine-tuning, one after the other on the same ranks. The constructor checks all of them."""

    def __init__(self, args, ranks: Group):
        self.args, self.ranks, self.name = args, ranks, TASKS[args.task].figure
        for name in ("save", "metrics_file"):
            if value := getattr(args, name):
                raise UserError(f"{option(name)} {value} is for one run, but --seeds and --tune-lr do several. Leave "
                                "it out, and give it to a run with the best rate and batch.")
        if args.epochs == 0:
            raise UserError("--epochs is 0, but --seeds and --tune-lr compare runs that learn. Choose at least 1.")
        self.trials = list(product(args.tune_lr or [args.lr], args.tune_global_batch_size or [args.global_batch_size]))
        model = ranks.broadcast_object(lambda: find_pretrained(args)).model
        for trial in self.trials:
            check_tuning(self.options(*trial, args.seed))
            complete_options(self.options(*trial, args.seed), model, ranks.size)

    def options(self, lr: float, global_batch_size: int | None, seed: int):
        """Return the options of one run."""
        return replace(self.args, lr=lr, global_batch_size=global_batch_size, seed=seed)

    def run(self) -> None:
        """Choose the best rate and batch with the first seed, and print the median over all seeds."""
        found = {trial: self.figure(*trial, self.args.seed) for trial in self.trials}
        best = max(found, key=found.__getitem__)                     # the first of equals
        others = range(self.args.seed + 1, self.args.seed + self.args.seeds)
        figures = [found[best], *[self.figure(*best, seed) for seed in others]]
        seeds = f"{len(figures)} seed{'s' * (len(figures) > 1)}"
        self.say(f"{describe(*best)} | median validation {self.name} over {seeds} {median(figures):.2%} "
                 f"({listed(figures)})")

    def figure(self, lr: float, global_batch_size: int | None, seed: int) -> float:
        """Tune once, and return the main figure of the validation part at the end."""
        tuning = FineTuning(self.options(lr, global_batch_size, seed), self.ranks)
        found = tuning.train()
        tuning.at_the_end.close()
        self.say(f"{describe(lr, global_batch_size)}, seed {seed} | validation {self.name} {found:.2%}")
        return found

    def say(self, text: str) -> None:
        """Print a text, on rank 0."""
        if self.ranks.rank == 0:
            print(text, flush=True)


class Ensemble:
    """Tuned models that answer together, one after the other on the same ranks."""

    def __init__(self, args, ranks: Group):
        self.args, self.ranks = args, ranks
        self.source = "load" if args.load else "load_hf"
        self.folders = [getattr(args, self.source), *args.ensemble]
        self.tokenizers: set[str] = set()
        several = ["seeds"] * (args.seeds > 1)
        for name in ("save", "tune_lr", "tune_global_batch_size", "train_iters", "epochs", *several):
            if getattr(args, name):
                raise UserError(f"{option(name)} is for tuning, but the models of --ensemble are tuned already. Leave "
                                "it out.")

    def run(self) -> None:
        """Print the figures of each model, and those of all together."""
        self.answers(self.folders[-1], sum(self.answers(folder) for folder in self.folders[:-1]))

    def answers(self, folder: str, others: Any = None) -> np.ndarray:
        """Return the probabilities of the model in a folder. With the sum of all `others`, report the ensemble's too.

        Raises UserError for a model that was not tuned on the task, or that has another tokenizer: other rows.
        """
        model = FineTuning(replace(self.args, **{self.source: folder}, epochs=0, metrics_file=None), self.ranks)
        self.tokenizers.add(model.pretrained.tokenizer.fingerprint)
        if len(self.tokenizers) > 1:
            raise UserError(f"The tokenizer of {folder} is not that of {self.folders[0]}. Give models with one.")
        part, n = model.last_part, len(self.folders)
        probabilities = model.answer(part)
        model.say(f"{folder} | {part} {describe_measures(model.measures(part, probabilities))}")
        if others is not None:
            found = model.measures(part, (others + probabilities) / n)
            model.say(f"ensemble of {n} | {part} {describe_measures(found)}")
            if self.args.metrics_file and model.first:
                write_whole(self.args.metrics_file, json.dumps(metrics_of(part, found)) + "\n")
        model.at_the_end.close()
        return probabilities


def describe(lr: float, global_batch_size: int | None) -> str:
    return f"lr {lr:g}" + (f", batch {global_batch_size}" if global_batch_size else "")


def listed(figures: Sequence[float]) -> str:
    return ", ".join(f"{one:.2%}" for one in sorted(figures))


def evaluation(args, ranks: Group) -> ZeroShot | FineTuning | Protocol | Ensemble:
    """Return the program of the options: a GPT as it is; or one run of fine-tuning, several of them, or an ensemble."""
    if TASKS[args.task].architecture == "gpt":
        return ZeroShot(args, ranks)
    if args.ensemble:
        return Ensemble(args, ranks)
    several = args.seeds > 1 or args.tune_lr or args.tune_global_batch_size
    return Protocol(args, ranks) if several else FineTuning(args, ranks)
