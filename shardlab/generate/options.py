"""The options of `generate`, checked against one another, and made into configs."""
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpi_impl.comm.hosts import ranks_in_words
from mpi_impl.data.tokenizer_types import TOKENIZER_TYPES
from mpi_impl.launch.option_fields import filled, option_field, option_group, parse_given, same_option
from reference.config import ModelConfig, ParallelConfig, option, require_positive
from reference.errors import UserError
from reference.generation.decoding import Sampling
from reference.precision import FORMATS
from shardlab.programs.options import DeviceOptions, ParallelismOptions, TokenizerFileOptions
from shardlab.programs.settings import check_device


@option_group
class TokenizerOptions(TokenizerFileOptions):
    """The tokenizer."""

    tokenizer_type: str | None = option_field(None, "where none was saved with the weights", choices=TOKENIZER_TYPES)


@option_group
class SavedModelOptions:
    """The model."""

    load: str | None = option_field(None, "the last checkpoint in this folder, which pretrain_gpt has saved", "DIR")
    load_hf: str | None = option_field(None, "or weights in Hugging Face's layout, of a GPT-2, Llama, Mistral, "
                                       "Qwen or Mixtral", "DIR")
    dtype: str = option_field("float32", "compute in this", choices=FORMATS)


@option_group
class TextOptions:
    """The text."""

    prompt: tuple[str, ...] | None = option_field(
        None, "how a text begins; may be given several times (default: with nothing, as a document does)", "TEXT",
        repeated=True)
    prompts_file: str | None = option_field(None, "a prompt in each line of this file", "F")
    num_samples: int = option_field(1, "texts for each prompt", "N", check=require_positive)
    micro_batch_size: int = option_field(1, "texts that are generated at the same time", "b", check=require_positive)
    tokens_to_generate: int = option_field(100, "for each text", "N", check=require_positive)
    stop: tuple[str, ...] | None = option_field(
        None, "end a text before this word, once it is generated; may be given several times", "TEXT", repeated=True)
    ignore_eod: bool = option_field(False, "go on behind the end of a document, where a text ends")


@option_group
class SamplingOptions:
    """The choice of tokens."""

    greedy: bool = option_field(False, "take the most probable token: the same as --temperature 0")
    temperature: float = option_field(Sampling.temperature, "below 1, probable tokens become more probable", "T")
    top_k: int | None = option_field(Sampling.top_k, "of the K most probable tokens (default: of all)", "K")
    top_p: float = option_field(
        Sampling.top_p, "of the fewest probable tokens that have this probability together", "P")
    seed: int = option_field(Sampling.seed)


@option_group
class ForwardParallelismOptions:
    """Parallelism."""

    tensor_model_parallel_size: int = option_field(1, "ranks that share each layer", "T")
    pipeline_model_parallel_size: int = option_field(
        1, "ranks (or groups of T) that hold the layers between them", "P")
    distributed_timeout_minutes: float = same_option(ParallelismOptions, "distributed_timeout_minutes", 10.0)


@option_group
class GenerationOptions(SavedModelOptions, TokenizerOptions, TextOptions, SamplingOptions, ForwardParallelismOptions,
                        DeviceOptions):
    """The options of `generate`."""


class GenerationSettings(NamedTuple):
    """A program's options, checked against one another and against the number of ranks."""

    args: GenerationOptions
    parallel: ParallelConfig
    sampling: Sampling


def parse(argv: Sequence[str] | None, world_size: int) -> GenerationSettings:
    """Parse and check a command line. Where an option but --prompt and --stop is given twice, the last one counts.

    Raises UserError.
    """
    given = parse_given("generate", "Text from a trained GPT, on any number of ranks.", GenerationOptions, argv)
    args = GenerationOptions(**given)
    check_model_and_prompts(args)
    check_device(args)
    return GenerationSettings(args, parallel_config(args, world_size), sampling(args, given))


def check_model_and_prompts(args: GenerationOptions) -> None:
    """Raise UserError unless one model is named, or for prompts from two places."""
    if (args.load is None) == (args.load_hf is None):
        raise UserError("A text comes from one model. Give its folder: --load for a checkpoint of pretrain_gpt, or "
                        "--load-hf for weights in Hugging Face's layout.")
    if args.stop and not all(args.stop):
        raise UserError("--stop is empty, and would end a text before its first character. Give a word, or leave it "
                        "out.")
    if args.prompt and args.prompts_file:
        raise UserError(f"--prompt and --prompts-file {args.prompts_file} are both given. Write all prompts into the "
                        "file, or leave it out.")


def parallel_config(args, world_size: int) -> ParallelConfig:
    """Return how all ranks share one replica. Raises UserError for ranks that are left over."""
    t, p = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    parallel = ParallelConfig.for_world(world_size, t, p)
    if parallel.data_parallel_size > 1:
        raise UserError(f"--tensor-model-parallel-size {t} x --pipeline-model-parallel-size {p} is {t * p}, but there "
                        f"are {world_size} ranks, and a text comes from one copy of the model. Start "
                        f"{ranks_in_words(t * p)}, or share the model out over more of them.")
    return parallel


def sampling(args: GenerationOptions, given: Mapping[str, Any]) -> Sampling:
    """Return how tokens are chosen. Raise UserError for --greedy together with an option that leaves a choice."""
    others = [name for name in ("temperature", "top_k", "top_p") if name in given]
    if args.greedy and others:
        raise UserError(f"--greedy takes the most probable token, whatever {option(others[0])} says. Leave one of them "
                        "out.")
    return filled(Sampling, args, **({"temperature": 0.0} if args.greedy else {}))


def check_top_k(top_k: int | None, model: ModelConfig) -> None:
    """Raise UserError if the vocabulary has fewer tokens."""
    if top_k is not None and top_k > model.vocab_size:
        raise UserError(f"--top-k is {top_k}, but the model has {model.vocab_size:,} tokens. Choose at most that "
                        "number, or leave the option out.")
