"""The options of shardlab/dry_run/__main__.py: those of a training run, and a few of its own.

So a run's command line is that of its rehearsal. What reads or writes files has no effect, and is named.
"""
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi_impl.launch.option_fields import declared, option_field, option_group, parse_choosing
from mpi_impl.runtime.outputs import check_outputs
from reference.config import option, require_positive
from reference.errors import UserError
from shardlab.plan import profiles
from shardlab.predict.rank import ImaginedWorld
from shardlab.programs.options import (NAMES, OUTSIDE_A_STEP, BERTPretrainingOptions, DeviceOptions,
                                       GPTPretrainingOptions, GraphOptions)
from shardlab.programs.presets import VOCABULARIES, VOCABULARY
from shardlab.programs.settings import settings_of


@option_group
class DryRunOptions:
    """The dry run."""

    world_size: int = option_field(help="ranks of the imagined world", metavar="N", check=require_positive)
    rank: tuple[int, ...] = option_field(
        (), "run this rank; may be repeated (default: the first rank of each kind, and a match of all kinds' messages)",
        "R", repeated=True)
    check_scale: bool = option_field(
        False, "count what grows with the ranks, from open files to tags, and compare it with its limits")
    hardware: str = option_field(
        "dgx-a100", f"{', '.join(profiles.known())}, or a file as benchmarks/calibrate.py writes it", "NAME",
        known=profiles.known())
    model: str = option_field("gpt", "whose training to run: with pretrain_gpt's options, or with pretrain_bert's",
                              choices=tuple(NAMES))


@option_group
class GPTDryRunOptions(DryRunOptions, GPTPretrainingOptions):
    """GPT."""


@option_group
class BERTDryRunOptions(DryRunOptions, BERTPretrainingOptions):
    """BERT."""


KINDS: dict[str, Any] = {"gpt": GPTDryRunOptions, "bert": BERTDryRunOptions}
DESCRIPTION = ("Run the training program as single ranks of an imagined world, on arrays without data: its "
               "memory, its messages and its time on GPUs. The other options are those of the run, pretrain_gpt's or, "
               "with --model bert, pretrain_bert's.")
WITHOUT_EFFECT = {*OUTSIDE_A_STEP, *declared(DeviceOptions), *declared(GraphOptions), "seed",
                  "distributed_timeout_minutes"} - {"trace"}


@dataclass(frozen=True)
class DryRunRequest:
    """The question that a command line asks."""

    world: ImaginedWorld
    ranks: tuple[int, ...]      # to run; () for one of each kind
    trace: str | None           # a folder
    program: str                # to count what its ranks need to start, or ""
    ignored: list[str]          # options without effect


def parse(argv: Sequence[str] | None) -> DryRunRequest:
    """Parse and check a command line. Raises UserError."""
    kind, given = parse_choosing("dry_run", DESCRIPTION, "model", KINDS, argv, GPTDryRunOptions)
    architecture = given.get("model", "gpt")
    settings = settings_of(given, kind, given["world_size"], architecture)
    a = settings.args
    check_ranks(a.rank, a.world_size)
    check_alone(a)
    check_shapes(a)
    check_outputs(Namespace(**{name: value for name, value in vars(a).items() if name not in WITHOUT_EFFECT}))
    usual = VOCABULARIES.get(a.preset or "", VOCABULARY[architecture])
    words = usual if a.vocab_size is None else a.vocab_size
    world = ImaginedWorld(settings.model(words), settings.parallel, settings.precision, a.micro_batch_size,
                          a.seq_length, settings.microbatches, profiles.load(a.hardware),
                          cudnn=True, optimizer=settings.optimizer)
    program = f"shardlab.programs.{architecture}" if a.check_scale else ""
    return DryRunRequest(world, a.rank, a.trace, program, [option(name) for name in given if name in WITHOUT_EFFECT])


def check_alone(a: Namespace) -> None:
    """Raise UserError for options that --check-scale would ignore."""
    if a.check_scale and (ignored := [name for name in ("rank", "trace") if getattr(a, name)]):
        raise UserError(f"--check-scale counts for all ranks, so {option(ignored[0])} has no effect. Leave out "
                        "one of the two.")


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Raise UserError for a rank that the world does not have."""
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise UserError(f"--rank is {rank}, but the ranks of --world-size {world_size} are 0 to {world_size - 1}.")


def check_shapes(args) -> None:
    """Raise UserError where the shapes of arrays depend on their data, which nobody knows."""
    if args.moe_expert_capacity_factor is not None:
        raise UserError("--moe-expert-capacity-factor drops a number of tokens that depends on the data, but a dry run "
                        "has no data: it takes every expert for chosen as often as any other, and then none is "
                        "dropped. Leave it out.")
