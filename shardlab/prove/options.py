"""The options of shardlab/prove/__main__.py: those of a training run, and a few of its own.

So a run's command line is that of its proof. Options of the model and of its parallelism have the same meaning. What
rounds has none, and is refused; what reads or writes files has no effect, and is named.
"""
from collections.abc import Sequence
from typing import Any

from mpi_impl.launch.option_fields import option_field, option_group, parse_choosing
from reference.config import option, require_positive
from reference.errors import UserError
from shardlab.programs.options import NAMES, OUTSIDE_A_STEP, BERTPretrainingOptions, GPTPretrainingOptions
from shardlab.programs.settings import LOSS_SCALING, PretrainingSettings, settings_of


@option_group
class ProofOptions:
    """The proof."""

    model: str = option_field("gpt", "whose training to prove: with pretrain_gpt's options, or with pretrain_bert's",
                              choices=tuple(NAMES))
    proofs: int = option_field(1, "prove N times, each time with fresh random numbers", "N", check=require_positive)


@option_group
class GPTProofOptions(ProofOptions, GPTPretrainingOptions):
    """GPT."""


@option_group
class BERTProofOptions(ProofOptions, BERTPretrainingOptions):
    """BERT."""


KINDS: dict[str, Any] = {"gpt": GPTProofOptions, "bert": BERTProofOptions}
DESCRIPTION = ("Prove that a training run on these ranks computes the same formulas as one process: two steps of a "
               "small model in its place, on exact numbers. The other options are those of the run, pretrain_gpt's "
               "or, with --model bert, pretrain_bert's.")

WITHOUT_EFFECT = OUTSIDE_A_STEP | {"dtype", "distributed_backend"}


def parse(argv: Sequence[str] | None, world_size: int) -> tuple[PretrainingSettings, list[str]]:
    """Parse and check a command line; return also the given options that have no effect. Raises UserError."""
    kind, given = parse_choosing("prove", DESCRIPTION, "model", KINDS, argv, GPTProofOptions)
    check_exact(given)
    settings = settings_of(given, kind, world_size, given.get("model", "gpt"))
    check_exact(vars(settings.args))        # a preset's, too
    replaces = {"dtype"} if "preset" in given else set()        # it takes the place of the preset's 16 bits
    return settings, [option(name) for name in given if name in WITHOUT_EFFECT - replaces]


def check_exact(options: dict[str, Any]) -> None:
    """Raise UserError for options that have no meaning for numbers without rounding."""
    if options.get("device", "cpu") != "cpu":
        raise UserError(f"--device is {options['device']}, but a proof computes with exact numbers, which no GPU has. "
                        "Leave it out: ranks on GPUs and on cores share the work in the same way.")
    for name in ("fp16", "bf16"):
        if options.get(name):
            preset = options.get("preset")
            raise UserError(f"--{name}{f' (of --preset {preset})' if preset else ''} is a format that rounds, but a "
                            "proof is about formulas, without rounding. "
                            + ("Add --dtype float32." if preset else "Leave it out."))
    for name in (*LOSS_SCALING, "fp16_lm_cross_entropy"):
        if options.get(name):
            raise UserError(f"{option(name)} is for numbers of 16 bits, but a proof computes with exact ones, which "
                            "cannot overflow. Leave it out.")
    if options.get("moe_expert_capacity_factor") is not None:
        raise UserError("With --moe-expert-capacity-factor tokens are dropped by their number in a microbatch, and one "
                        "process drops others: it is a different run, which no proof makes the same. Leave it out.")
    if options.get("load_hf") is not None:
        raise UserError(f"--load-hf is {options['load_hf']}, but a proof draws the weights of a small model of its "
                        "own. Give the model's sizes instead.")
