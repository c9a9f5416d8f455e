"""A corpus made ready for training, on all cores: `python -m mpi_impl.data.prepare --input TEXTS --output-prefix OUT`.

    read          text files, folders of them, JSON lines (mpi_impl/data/corpus.py says how)
    normalize     line ends, control characters, Unicode's spellings (clean.py)
    tokenize      by a tokenizer that is given, or trained on this corpus and saved as OUT.tokenizer.json
    drop          documents under --min-tokens, then those that repeat an earlier one (near_duplicates.py)
    write         OUT.bin and OUT.idx, and OUT.dropped.jsonl, which names each document that was dropped, and why

Input that is not text (bytes that are not UTF-8, lines that are not JSON, empty files) is dropped, counted and named in
the same way; with --strict the first of it ends the run.

The corpus may be larger than memory. It is divided into chunks (chunks.py), and a worker encodes one at a time, a
document at a time. Memory holds the lengths of all documents, and the results of near_duplicates.py; a single document
must fit (256 MiB at most). This is one program with many workers: it needs no MPI, and is started without mpirun.

A run may be killed at any moment. Each finished chunk is in the folder OUT.preparing, and the same command continues
from there; the folder is removed when all is written. The results do not depend on the number of workers, nor on
interruptions.
"""
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypedDict

import numpy as np
import tokenizers
from tqdm import tqdm

from mpi_impl.data.corpus import BAD_KINDS
from mpi_impl.data.indexed import IndexedDataset, token_dtype, write_indexed
from mpi_impl.data.prepare.chunks import Part, Source, chunks, documents, sources
from mpi_impl.data.prepare.dropped import NEAR_DUPLICATE, Dropped
from mpi_impl.data.prepare.encoded_chunk import ChunkReport, encode_chunk, read_finished, tokenizer_of
from mpi_impl.data.prepare.encoded_corpus import EncodedCorpus, chunk_folder
from mpi_impl.data.prepare.near_duplicates import NearDuplicates, near_duplicates
from mpi_impl.data.prepare.options import PreparationOptions, Recipe, parse
from mpi_impl.data.prepare.workers import map_in_order
from mpi_impl.data.tokenizer_choice import TRAINED, report_shortage
from mpi_impl.launch.option_fields import filled
from mpi_impl.runtime.files import LARGEST, check_folder, check_writable, folder_aside, replacing
from mpi_impl.runtime.formats import read_json
from mpi_impl.runtime.rank_environment import launched_rank_and_size
from mpi_impl.runtime.tables import count
from reference.config import option
from reference.errors import UserError

VERSION = 3             # increase it when the same corpus and options begin to give other files
CHUNK = 1 << 20         # bytes at least,
CHUNKS = 1000           # and no more of them than this, or a few
TRAINED_ON = 10**9      # bytes: on a larger corpus a tokenizer is trained on evenly spread chunks of about this size

SECONDS = 0.2, 30.0     # between two reports of progress, on a terminal and elsewhere

def main(argv: list[str] | None = None) -> None:
    launched = launched_rank_and_size()
    if launched and launched[1] > 1:
        raise UserError("mpi_impl.data.prepare is a single program, which starts --workers of its own. Start it "
                        "without mpirun.")
    args = parse(argv)
    try:
        Preparation(args).run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. The same command continues from here.\n")
        sys.exit(130)
    except OSError as error:
        raise UserError(f"{error.filename or args.output_prefix} cannot be used: {error.strerror}. Check that there is "
                        "room, and that you may use it; the same command continues from here.") from error


class PlanFile(TypedDict):
    """The facts that determine all output of a preparation, stored in its work folder."""

    version: int
    tokenizers: str
    options: dict[str, Any]
    tokenizer: str          # its fingerprint, and the token that ends a document
    sources: list[Source]


class Preparation:
    """A run, or the rest of one that was interrupted."""

    def __init__(self, args: PreparationOptions):
        self.args, self.prefix = args, args.output_prefix
        self.recipe = filled(Recipe, args)
        self.tokenizer = tokenizer_of(self.recipe)      # whose faults are reported first
        self.sources = sources(args.input or [None], "--input")
        self.size = sum(source.size for source in self.sources)
        self.plan = list(chunks(self.sources, max(CHUNK, self.size // CHUNKS)))
        self.work = Path(f"{self.prefix}.preparing")
        self.corpus = EncodedCorpus(self.work, self.plan)
        self.dropped = Dropped()

    def run(self) -> None:
        began = time.monotonic()
        print(f"preparing {count(len(self.sources), 'file')}, {self.size / 1e6:,.1f} MB", flush=True)
        self.begin()
        if self.tokenizer is None:
            self.train()
        encoded = self.encode()
        duplicates = None
        if self.recipe.jaccard:
            print(f"comparing {count(self.corpus.starts[-1], 'document')}", flush=True)
            duplicates = near_duplicates(self.corpus.signatures(), self.recipe.jaccard)
        self.write(duplicates)
        print(self.describe(time.monotonic() - began, encoded))
        self.end()

    # ---- the work folder ----

    def begin(self) -> None:
        """Make the work folder, or find that of the same preparation. Raise UserError for anything else."""
        for path in self.args.input or ():
            if Path(path).is_dir() and Path(self.prefix).resolve().is_relative_to(Path(path).resolve()):
                raise UserError(f"--output-prefix {self.prefix} lies in the folder --input {path}, whose files are "
                                "read as texts. Write elsewhere.")
        check_folder(str(self.work.parent))
        for suffix in ".dropped.jsonl", ".tokenizer.json":
            check_writable(self.prefix + suffix)
        if self.work.exists():
            self.check_plan(self.begun())
            return
        for suffix in ".bin", ".idx":
            if os.path.exists(self.prefix + suffix):
                raise UserError(f"{self.prefix}{suffix} exists. Give another --output-prefix, or remove it.")
        with folder_aside(str(self.work.parent)) as temporary:
            aside = Path(temporary, self.work.name)
            aside.mkdir()
            (aside / "plan.json").write_text(json.dumps(self.plan_of()), "utf-8")
            aside.rename(self.work)

    def begun(self) -> PlanFile:
        """Read the plan in the work folder. Raise UserError if there is none."""
        try:
            return read_json(str(self.work / "plan.json"), PlanFile, LARGEST)
        except UserError as error:
            raise UserError(f"{self.work} is not the folder of an interrupted preparation. Remove it, or give another "
                            f"--output-prefix. ({error})") from error

    def end(self) -> None:
        """Remove the work folder, so that no part of it remains."""
        with folder_aside(str(self.work.parent)) as temporary:
            self.work.rename(Path(temporary, self.work.name))

    def plan_of(self) -> PlanFile:
        """Return the facts that determine all output."""
        tokenizer = f"{self.tokenizer.fingerprint}, {self.tokenizer.eod}" if self.tokenizer else "trained here"
        return {"version": VERSION, "tokenizers": tokenizers.__version__, "options": asdict(self.recipe),
                "tokenizer": tokenizer, "sources": self.sources}

    def check_plan(self, begun: PlanFile) -> None:
        """Raise UserError if the work folder is another preparation's."""
        plan, advice = self.plan_of(), f"Undo that to continue it, or remove {self.work} to start over."
        for name, value in plan["options"].items():
            if (before := begun["options"].get(name)) != value:
                raise UserError(f"{self.work} was begun with {option(name)} {before}, and now it is {value}. {advice}")
        if changes := set(begun["sources"]) ^ set(plan["sources"]):
            raise UserError(f"{self.work} was begun with other texts: {min(changes).file} was added, removed or "
                            f"changed. {advice}")
        if begun != plan:
            raise UserError(f"{self.work} was begun with another version of this program or its tokenizer. {advice}")

    # ---- the work ----

    def train(self) -> None:
        """Train the tokenizer, unless it has been; the workers then read it from its file."""
        file, size = self.work / "tokenizer.json", self.recipe.size_to_train
        trained = TRAINED[self.recipe.tokenizer_type]
        if not file.exists():
            tokenizer = trained.train(self.texts(f"training a {size:,}-token {trained.method}"), size)
            tokenizer.save(f"{file}.new")
            os.replace(f"{file}.new", file)
        self.tokenizer = trained.load(file)
        self.recipe = replace(self.recipe, tokenizer_model=str(file), vocab_size=None)
        report_shortage(self.tokenizer, size, partial(print, flush=True))

    def texts(self, what: str) -> Iterator[str]:
        """Yield the texts that a tokenizer is trained on."""
        plan = self.plan[:: -(-self.size // TRAINED_ON) or 1]
        with bar_of(what, sum(map(size_of, plan))) as bar:
            for chunk in plan:
                for part in chunk:
                    yield from (document.text for document in documents(part) if document.text)
                bar.update(size_of(chunk))

    def encode(self) -> list[int]:
        """Encode the chunks that are not done, and return their numbers."""
        missing = [number for number in range(len(self.plan)) if self.read_finished(number) is None]
        made = map_in_order(encode_chunk, min(self.args.workers, max(1, len(missing))),
                            [chunk_folder(self.work, number) for number in missing],
                            [self.plan[number] for number in missing], [self.recipe] * len(missing))
        with bar_of("encoding", sum(size_of(self.plan[number]) for number in missing)) as bar:
            waited = set(missing)
            for number, chunk in enumerate(self.plan):
                report = next(made) if number in waited else self.read_finished(number)
                assert report is not None
                self.add(report)
                bar.update(size_of(chunk) if number in waited else 0)
        return missing

    def read_finished(self, number: int) -> ChunkReport | None:
        """Return the report of a chunk, if that is done."""
        return read_finished(chunk_folder(self.work, number), len(self.plan[number]))

    def add(self, report: ChunkReport) -> None:
        """Add the report of the next chunk. Raise UserError with --strict for the first bad text in it."""
        self.corpus.append(report)
        for part, line, kind, why in report.dropped if self.args.strict else ():
            if kind in BAD_KINDS:
                place = self.corpus.place(len(self.corpus.reports) - 1, part, line)
                raise UserError(f"{place} {why}. Correct it, or leave out --strict to count such texts and continue.")

    def write(self, duplicates: NearDuplicates | None) -> None:
        """Write the results, each completely or not at all, the index last."""
        kept = np.ones(self.corpus.starts[-1], bool) if duplicates is None else duplicates.original < 0
        assert self.tokenizer is not None
        self.publish("dropped.jsonl", lambda file: self.dropped.write(file, self.corpus, duplicates))
        if not kept.any():
            self.end()
            found = "\n".join(["No document is left.", str(self.dropped)])
            raise UserError(f"{found}\nOnly {self.prefix}.dropped.jsonl was written. Give more text, or a "
                            "smaller --min-tokens.")
        if (trained := self.work / "tokenizer.json").exists():
            self.publish("tokenizer.json", lambda file: file.write(trained.read_text("utf-8")))
        vocab_size = self.tokenizer.vocab_size
        size = sum(report.tokens for report in self.corpus.reports) * token_dtype(vocab_size).itemsize
        with bar_of("writing", size) as bar:
            write_indexed(self.prefix, self.left(kept, bar), vocab_size)

    def left(self, kept: np.ndarray, bar: tqdm) -> Iterator[list[np.ndarray]]:
        """Yield the encoded documents that are kept."""
        for document, keep in zip(self.corpus.documents(), kept, strict=True):
            if keep:
                yield document
            bar.update(sum(sequence.nbytes for sequence in document))

    def publish(self, suffix: str, write: Callable[[TextIO], object]) -> None:
        """Write a file next to the tokens, which appears when it is complete."""
        with replacing(f"{self.prefix}.{suffix}") as aside, open(aside, "w", encoding="utf-8", newline="\n") as file:
            write(file)

    # ---- the report ----

    def describe(self, seconds: float, encoded: list[int]) -> str:
        """Describe the documents found, the documents dropped, and the time."""
        result = IndexedDataset(self.prefix)
        found = self.corpus.starts[-1] + self.dropped.counts.total() - self.dropped.counts[NEAR_DUPLICATE]
        kept = len(result.document_indices) - 1
        before = len(self.plan) - len(encoded)
        speed = sum(size_of(self.plan[number]) for number in encoded) / 1e6 / seconds
        dropped = [str(self.dropped), f"each of these is named in {self.prefix}.dropped.jsonl"]
        return "\n".join([
            *(dropped if self.dropped.counts else ()),
            f"kept {kept:,} of {count(found, 'document')}, {count(len(result.tokens), 'token')}: "
            f"{self.prefix}.bin and .idx, {result.tokens.nbytes / 1e6:,.1f} MB",
            f"{seconds:,.1f} seconds, {speed:,.1f} MB/s" + (
                f", and {count(before, 'chunk')} of {len(self.plan):,} were done before" if before else "")])


def size_of(chunk: list[Part]) -> int:
    """Return the size of a chunk in bytes."""
    return sum(part.size for part in chunk)


def bar_of(what: str, size: int) -> tqdm:
    """Return a bar of the progress of work on so many bytes."""
    pause = SECONDS[0 if sys.stdout.isatty() else 1]
    return tqdm(desc=what, total=size, unit="B", unit_scale=True, leave=False, file=sys.stdout, mininterval=pause)
