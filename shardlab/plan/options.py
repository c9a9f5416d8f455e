"""The options of `plan`, and the model that they name."""
from collections.abc import Mapping, Sequence
from typing import Any

from mpi_impl.launch.option_fields import declared, filled, option_field, option_group, parse_given, same_option
from mpi_impl.runtime.outputs import check_outputs
from reference.config import ARCHITECTURES, ModelConfig, option
from reference.errors import UserError
from shardlab.plan import profiles
from shardlab.plan.candidates import SIMULATED
from shardlab.plan.launch_line import SIZES
from shardlab.programs.options import NAMES, OPTIONS, ExpertsOptions, LlamaOptions, ModelOptions
from shardlab.programs.partners import check_partners
from shardlab.programs.presets import PRESETS, VOCABULARIES, VOCABULARY
from shardlab.programs.settings import experts_config, in_other_words


@option_group
class ClusterOptions:
    """The cluster and its work."""

    num_gpus: int = option_field(metavar="N", help="or other devices, one for each rank")
    global_batch_size: int = option_field(metavar="B", help="samples of a step")
    hardware: str = option_field(
        "dgx-a100", f"{', '.join(profiles.known())}, or a file as benchmarks/calibrate.py writes it", "NAME",
        known=profiles.known())


@option_group
class ModelSizeOptions:
    """The model."""

    preset: str | None = option_field(None, "a published model; or give the sizes:",
                                      choices=[name for models in PRESETS.values() for name in models])
    num_layers: int | None = option_field(None, metavar="L")
    hidden_size: int | None = option_field(None, metavar="H")
    num_attention_heads: int | None = option_field(None, metavar="A")
    seq_length: int | None = option_field(None, metavar="S")
    position_embedding_type: str = same_option(ModelOptions, "position_embedding_type",
                                               ModelOptions.position_embedding_type)
    untie_embeddings_and_output_weights: bool = option_field(False)
    vocab_size: int | None = option_field(
        None, f"default: the preset's, or {VOCABULARY['gpt']}, and {VOCABULARY['bert']} for a BERT", "V")


@option_group
class PlanOptions(ClusterOptions, ModelSizeOptions, LlamaOptions, ExpertsOptions):
    """The output."""

    best: int = option_field(6, f"how many plans to show, at most {SIMULATED}", "N")
    plot: str | None = option_field(None, "draw their memory and their time", "FILE")
    operators: bool = option_field(False, "instead of plans, print what each operator of a GPT should split")


MODEL = (declared(PlanOptions).keys() - declared(ClusterOptions).keys()
         - {"preset", "vocab_size", "best", "plot", "operators"})


def parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the given options by name. Raises UserError."""
    given = parse_given("shardlab.plan", "Find the fastest way to shard a model over GPUs.", PlanOptions, argv)
    args = PlanOptions(**given)
    if not 1 <= args.best <= SIMULATED:
        raise UserError(f"--best is {args.best}, but must be at least 1, and at most {SIMULATED}.")
    check_outputs(args)
    return given


def model_of(given: Mapping[str, Any]) -> ModelConfig:
    """Return the model of the preset, or of the sizes, which come first. Raises UserError if one is missing."""
    name = given.get("preset", "")
    architecture = next((one for one, models in PRESETS.items() if name in models), "gpt")
    preset, kind = PRESETS[architecture].get(name, {}), OPTIONS[architecture]
    sizes = {size: value for size, value in given.items() if size in MODEL}
    if missing := [size for size in SIZES if size not in preset | sizes]:
        raise UserError(f"Which model? Without --preset it needs {', '.join(map(option, missing))}.")
    if foreign := [size for size in sizes if size not in declared(kind)]:
        raise UserError(f"{option(foreign[0])} is for a GPT, but --preset {name} is a {NAMES[architecture]}. Leave one "
                        "of the two out.")
    options: Any = kind(**preset | sizes)
    check_partners(given, options)
    words = given.get("vocab_size", VOCABULARIES.get(name, VOCABULARY[architecture]))
    return filled(ModelConfig, options, vocab_size=words, max_position_embeddings=options.seq_length,
                  architecture=architecture, experts=experts_config(options),
                  heads=ARCHITECTURES[architecture][0], **in_other_words(options))
