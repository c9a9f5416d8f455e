"""The options of shardlab/evaluate/__main__.py, checked against one another and against the model."""
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from mpi_impl.launch.option_fields import parse_choosing
from reference.config import LARGEST, ModelConfig, ParallelConfig, option, require_not_negative, require_positive
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from shardlab.evaluate.options import EPOCHS, TaskOptions
from shardlab.evaluate.tasks import TASKS
from shardlab.programs.options import NAMES
from shardlab.programs.settings import (check_device, check_split, microbatches_of, optimizer_config, parallel_config,
                                        precision)

DESCRIPTION = ("Evaluate a model on published data, on any number of ranks. Each task has options of its own, which "
               "--task TASK --help shows.")


def parse(argv: Sequence[str] | None) -> Any:
    """Parse the options and check them, as far as possible before the model is known. Raise UserError if wrong."""
    kinds = {name: task.options for name, task in TASKS.items()}
    kind, given = parse_choosing("evaluate", DESCRIPTION, "task", kinds, argv, TaskOptions)
    args: Any = kind(**given)
    if (args.load is None) == (args.load_hf is None):
        raise UserError(f"--task {args.task} evaluates one model. Give its folder: --load for a checkpoint of "
                        f"pretrain_{TASKS[args.task].architecture}, or --load-hf for a model in Hugging Face's layout.")
    for name in ("lr", "global_batch_size"):
        if name in given and f"tune_{name}" in given:
            raise UserError(f"{option(name)} is given, but {option(f'tune_{name}')} tries values of its own. Leave one "
                            "of the two out.")
    check_device(args)
    return args


def check_architecture(args, found: str) -> None:
    """Raise UserError for a task that is for another model than the one that was `found`."""
    wanted = TASKS[args.task].architecture
    if found != wanted:
        others = " or ".join(name for name, task in TASKS.items() if task.architecture == found)
        raise UserError(f"--task {args.task} is for a {NAMES[wanted]}, but {args.load or args.load_hf} holds a "
                        f"{NAMES[found]}. Give another model, or choose --task {others}.")


def seq_length(args, model: ModelConfig) -> int:
    """Return --seq-length, by default the model's number of positions. Raise UserError if it is more than that."""
    longest = model.max_position_embeddings
    s = longest if args.seq_length is None else args.seq_length
    require_positive("seq_length", s)
    if s > longest:
        raise UserError(f"--seq-length is {s}, but the model has {longest} positions. Choose at most {longest}, or "
                        "leave the option out.")
    return s


def forward_parallel(args, model: ModelConfig, world_size: int) -> ParallelConfig:
    """Return the parallelism of a model that only goes forward. Raise UserError if it is impossible."""
    parallel = ParallelConfig.for_world(world_size, args.tensor_model_parallel_size,
                                        args.pipeline_model_parallel_size)
    check_split(model, parallel)
    return parallel


# ---- fine-tuning of a BERT ------------------------------------------------------------------------------------------


class FineTuningLength(NamedTuple):
    """The length of fine-tuning, with the number of samples in an epoch and in a step."""

    questions: int
    global_batch_size: int
    iterations: int

    def ends_epoch(self, iteration: int) -> bool:
        """Report whether this iteration completes a pass over the samples, or is the last one."""
        asked = iteration * self.global_batch_size
        return iteration == self.iterations or asked // self.questions > (
            asked - self.global_batch_size) // self.questions


def fine_tuning_length(args, questions: int) -> FineTuningLength:
    """Return the length in epochs, the last one filled up with the beginning of the next; or in iterations."""
    epochs = EPOCHS if args.epochs is None else args.epochs
    iterations = ceil(epochs * questions / args.global_batch_size) if args.train_iters is None else args.train_iters
    return FineTuningLength(questions, args.global_batch_size, iterations)


def complete_options(args, model: ModelConfig, world_size: int) -> tuple[Any, ParallelConfig, int]:
    """Return the options of tuning without gaps, how ranks share the work, and the number of microbatches in a step.

    Raises UserError for options that do not go together.
    """
    parallel = parallel_config(args, world_size, model.num_layers)
    d = parallel.data_parallel_size
    args = replace(args, seq_length=seq_length(args, model),
                   global_batch_size=args.global_batch_size or args.micro_batch_size * d)
    m = microbatches_of(args, parallel)
    check_split(model, parallel)
    return args, parallel, m


def check_tuning(args) -> None:
    """Raise UserError for options that do not go together, whatever the model."""
    if args.epochs is not None and args.train_iters is not None:
        raise UserError(f"--epochs is {args.epochs} and --train-iters is {args.train_iters}, but both set the "
                        "length of the tuning. Give one of them.")
    if args.epochs is not None:
        require_not_negative("epochs", args.epochs)
    if args.fp16_lm_cross_entropy:
        raise UserError(f"--fp16-lm-cross-entropy is for a loss over tokens, but --task {args.task} has none. "
                        "Leave it out.")
    optimizer_of(args, LARGEST["train_iters"])     # as for a long run: other wrong options are reported now
    precision(args)


def optimizer_of(args, iterations: int) -> OptimizerConfig:
    """Return Adam's configuration for this number of iterations. Raise UserError for wrong options."""
    return optimizer_config(replace(args, train_iters=max(iterations, 1)))
