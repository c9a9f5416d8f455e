"""The options of mpi_impl/generate.py, and what they mean together."""
import argparse
from typing import NamedTuple

from mpi_impl.data.tokenizer import TOKENIZER_TYPES
from mpi_impl.launching.entry import ArgumentParser
from mpi_impl.programs.arguments import check_device, check_timeout
from mpi_impl.programs.options import device_options
from reference.config import ModelConfig, ParallelConfig, option, require_positive
from reference.errors import UserError
from reference.generation.decoding import Sampling
from reference.precision import FORMATS


class Settings(NamedTuple):
    """What the options say, checked against one another and against the number of ranks."""

    args: argparse.Namespace   # the plain values, under their options' names
    parallel: ParallelConfig
    sampling: Sampling


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="generate", description="Text from a trained GPT, on any number of ranks.")
    for title, add_options in (("the model", model_options), ("the text", text_options),
                               ("how a word is chosen", sampling_options), ("parallelism", parallelism_options),
                               ("device", device_options)):
        add_options(p.add_argument_group(title))
    return p


def model_options(g) -> None:
    g.add_argument("--load", metavar="DIR", help="the last checkpoint in this folder, which pretrain_gpt has saved")
    g.add_argument("--load-hf", metavar="DIR", help="or the weights of a GPT-2 in Hugging Face's layout")
    g.add_argument("--dtype", choices=tuple(FORMATS), default="float32", help="compute in this (default: float32)")
    tokenizer_options(g)


def tokenizer_options(g) -> None:
    g.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="where none was saved beside the weights")
    g.add_argument("--tokenizer-model", metavar="F", help="the file in which training has saved its tokenizer")
    g.add_argument("--vocab-file", metavar="F", help="GPT-2's vocab.json, or BERT's vocab.txt")
    g.add_argument("--merge-file", metavar="F", help="GPT-2's merges.txt")


def text_options(g) -> None:
    g.add_argument("--prompt", action="append", metavar="TEXT",
                   help="how a text begins; may be given several times (default: with nothing, as a document does)")
    g.add_argument("--prompts-file", metavar="F", help="a prompt in each line of this file")
    g.add_argument("--num-samples", type=int, default=1, metavar="N", help="texts for each prompt (default: 1)")
    g.add_argument("--tokens-to-generate", type=int, default=100, metavar="N", help="for each text (default: 100)")
    g.add_argument("--ignore-eod", action="store_true", help="go on behind the end of a document, where a text ends")


def sampling_options(g) -> None:
    g.add_argument("--greedy", action="store_true", help="take the likeliest token: the same as --temperature 0")
    g.add_argument("--temperature", type=float, metavar="T",
                   help="below 1, likely words become likelier (default: 1)")
    g.add_argument("--top-k", type=int, metavar="K", help="among the K likeliest tokens (default: of all)")
    g.add_argument("--top-p", type=float, metavar="P",
                   help="of the fewest likely words that have this probability together (default: 1)")
    g.add_argument("--seed", type=int, default=1234)


def parallelism_options(g) -> None:
    g.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="T",
                   help="ranks that share each layer")
    g.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="P",
                   help="ranks (or groups of T) that hold the layers between them")
    g.add_argument("--distributed-timeout-minutes", type=float, default=10, metavar="M",
                   help="end when a rank has waited so long for another")


def parse(argv: list[str] | None, world_size: int) -> Settings:
    """Options -> Settings. When an option is given twice, the last one counts, but for --prompt. Raises UserError."""
    args = parser().parse_args(argv)
    check_names(args)
    check_device(args)
    for name in ("num_samples", "tokens_to_generate"):
        require_positive(name, getattr(args, name))
    check_timeout(args.distributed_timeout_minutes)
    return Settings(args, parallel_config(args, world_size), sampling(args))


def check_names(args) -> None:
    """Raises UserError unless one model is named; for an empty name, as an unset variable of a script gives it; and for
    prompts from two places.
    """
    for name in ("load", "load_hf", "tokenizer_model", "vocab_file", "merge_file", "prompts_file"):
        if getattr(args, name) == "":
            raise UserError(f"{option(name)} is empty. Give a path, or leave the option out.")
    if (args.load is None) == (args.load_hf is None):
        raise UserError("A text comes from one model. Give its folder: --load for a checkpoint of pretrain_gpt, or "
                        "--load-hf for a GPT-2 in Hugging Face's layout.")
    if args.prompt and args.prompts_file:
        raise UserError(f"--prompt and --prompts-file {args.prompts_file} are both given. Write all prompts into the "
                        "file, or leave it out.")


def parallel_config(args, world_size: int) -> ParallelConfig:
    """One replica on all ranks."""
    t, p = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    parallel = ParallelConfig.for_world(world_size, t, p)
    if parallel.data_parallel_size > 1:
        raise UserError(f"--tensor-model-parallel-size {t} x --pipeline-model-parallel-size {p} is {t * p}, but there "
                        f"are {world_size} ranks, and a text comes from one copy of the model. Start {t * p} ranks, or "
                        "share the model out over more of them.")
    return parallel


def sampling(args) -> Sampling:
    """Raises UserError for --greedy beside what leaves a choice."""
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None}
    if args.greedy and given:
        raise UserError(f"--greedy takes the likeliest token, whatever {option(next(iter(given)))} says. Leave one of "
                        "them out.")
    return Sampling(**({"temperature": 0.0} if args.greedy else given), seed=args.seed)


def check_top_k(top_k: int | None, model: ModelConfig) -> None:
    """Raises UserError if there are not so many words."""
    if top_k is not None and top_k > model.vocab_size:
        raise UserError(f"--top-k is {top_k}, but the model knows {model.vocab_size:,} words. Choose at most as many, "
                        "or leave it out.")
