"""The options of mpi_impl.data.prepare, checked before anything is read or written."""
import os
from collections.abc import Sequence

from mpi_impl.data.tokenizer_choice import TokenizerChoice
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.runtime.advice import check_installed
from mpi_impl.runtime.files import check_name
from mpi_impl.runtime.outputs import OptionPath, paths_read, refuse_shared
from mpi_impl.runtime.rank_environment import cores
from reference.errors import UserError


@option_group
class WorkOptions:
    """The work."""

    input: tuple[str, ...] | None = option_field(
        None, "text files, folders of them, or JSON lines, each with a document under the key \"text\" (default: the "
        "source of Python's own standard library)", "PATH")
    output_prefix: str = option_field(help="OUT.bin and OUT.idx are written, for --data-path OUT", metavar="OUT")
    workers: int = option_field(cores(), "processes (default: one for each core)", "N")
    strict: bool = option_field(False, "end at the first text that cannot be read")


@option_group
class Recipe(TokenizerChoice):
    """The documents."""

    split_sentences: bool = option_field(False, "keep the borders of sentences, as BERT needs them; documents then "
                                         "have no end-of-document token")
    min_tokens: int = option_field(128, "drop shorter documents", "N")
    jaccard: float = option_field(
        0.7, "drop a document that is at least this similar to an earlier one; 0: drop none", "J")


@option_group
class PreparationOptions(WorkOptions, Recipe):
    """Options of mpi_impl.data.prepare. Those of the recipe determine the result for a document."""


def parse(argv: Sequence[str] | None) -> PreparationOptions:
    """Parse the options. Raise UserError for impossible ones."""
    given = parse_given("mpi_impl.data.prepare", "Make a corpus ready for training.", PreparationOptions, argv)
    args = PreparationOptions(**given)
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} leaves nobody to work. Give 1 or more.")
    if not os.path.basename(args.output_prefix):
        raise UserError(f"--output-prefix {args.output_prefix!r} does not name a file. Give the beginning of the "
                        "files' names, such as runs/corpus.")
    check_name(args.output_prefix)
    for suffix in ".bin", ".idx", ".dropped.jsonl", ".tokenizer.json":
        if os.path.exists(path := args.output_prefix + suffix):
            refuse_shared(OptionPath("output_prefix", path), paths_read(vars(args)), "reads")
    if args.min_tokens < 0:
        raise UserError(f"--min-tokens is {args.min_tokens}, but must not be negative. Give 0 to keep short documents.")
    if not 0 <= args.jaccard <= 0.99:
        raise UserError(f"--jaccard {args.jaccard:g} is out of range. Give a similarity up to 0.99, such as 0.7, or 0 "
                        "to keep near-duplicates.")
    if args.jaccard:
        check_installed("rensa", "--jaccard", " Or give --jaccard 0 to keep near-duplicates.")
    return args
