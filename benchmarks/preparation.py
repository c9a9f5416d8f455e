"""The speed of preparing a corpus, beside a program written as Megatron-LM's tools/preprocess_data.py is.

    .venv/bin/python benchmarks/preparation.py      # needs rensa

Both read the same JSON lines (the source of Python's standard library, several times, a file in each line), encode them
with the same byte-level BPE by the same library `tokenizers`, in the same number of processes with one thread each, and
write Megatron's .bin and .idx. The benchmark checks that the files are identical, byte for byte. A time is that of the
whole command. The contenders take turns.

"shardlab" is `mpi_impl.data.prepare --jaccard 0`, which also normalizes each text, and continues after an interruption.
"near-duplicates" is its default, `--jaccard 0.7`, which the peer cannot do.
"""
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from programs import head, parse, parser_of, row
from turns import output_of, program

from mpi_impl.data.corpus import Corpus
from mpi_impl.data.indexed import IndexedDataset
from mpi_impl.data.prepare.clean import normalize
from mpi_impl.data.tokenizer import ByteLevelBPETokenizer
from mpi_impl.launch.entry import run_alone
from reference.errors import UserError

WORKERS, VOCABULARY, TRAINED_ON = (1, 2), 8192, 1 << 22     # tokens, and characters


def main() -> None:
    options = parse(parser_of("preparation", __doc__), turns=(5, "of each contender"),
                    copies=(3, "of the standard library in the corpus"))
    with tempfile.TemporaryDirectory(dir=".", prefix="preparation-") as name:
        folder = Path(name)
        write_corpus(folder, options.copies)
        size = (folder / "corpus.jsonl").stat().st_size / 1e6
        print(f"{size:,.0f} MB of JSON lines, a vocabulary of {VOCABULARY:,}; tokens/s, medians of {options.turns} "
              "turns each, taken in turn\n")
        print(head("processes", "shardlab", "Megatron-LM's way", "ratio", "near-duplicates"), flush=True)
        for workers in WORKERS:
            print(measure(folder, workers, options.turns), flush=True)


def write_corpus(folder: Path, copies: int) -> None:
    """Write normalized documents, which the peer does not change either, and a tokenizer that is trained on some."""
    texts = [text for text in map(normalize, Corpus(None).documents()) if text]
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for text in texts * copies:
            file.write(json.dumps({"text": text}) + "\n")
    some = texts[:max(1, TRAINED_ON * len(texts) // sum(map(len, texts)))]
    ByteLevelBPETokenizer.train(some, VOCABULARY).save(folder / "tokenizer.json")


def measure(folder: Path, workers: int, turns: int) -> str:
    """Return the row of the table for this number of processes."""
    ours = [sys.executable, "-m", "mpi_impl.data.prepare", "--input", str(folder / "corpus.jsonl"), "--min-tokens", "0",
            "--tokenizer-model", str(folder / "tokenizer.json"), "--workers", str(workers)]
    theirs = [*program("preprocess_data"), str(folder / "corpus.jsonl"), str(folder / "tokenizer.json")]
    commands: list[Callable[[str], list[str]]] = [
        lambda prefix: [*ours, "--jaccard", "0", "--output-prefix", prefix],
        lambda prefix: [*theirs, prefix, str(workers)],
        lambda prefix: [*ours, "--output-prefix", prefix]]
    times: list[list[float]] = [[] for _ in commands]
    for turn in range(turns):
        prefixes = [folder / f"{workers}-{turn}-{number}" for number in range(len(commands))]
        for command, prefix, found in zip(commands, prefixes, times, strict=True):
            found.append(seconds(command(str(prefix))))
        same_files(prefixes[0], prefixes[1])
    tokens = len(IndexedDataset(prefixes[0]).tokens)
    speed, peer, whole = (tokens / median(found) for found in times)
    return row(workers, f"{speed:,.0f}", f"{peer:,.0f}", f"**{speed / peer:.2f}**", f"{whole:,.0f}")


def seconds(command: list[str]) -> float:
    """Return the seconds of a command, with one thread for each of its processes."""
    began = time.perf_counter()
    output_of(command, TOKENIZERS_PARALLELISM="false")
    return time.perf_counter() - began


def same_files(ours: Path, theirs: Path) -> None:
    """Raise UserError unless both have written the same tokens and the same index."""
    for suffix in ".bin", ".idx":
        if Path(f"{ours}{suffix}").read_bytes() != Path(f"{theirs}{suffix}").read_bytes():
            raise UserError(f"{ours}{suffix} and {theirs}{suffix} differ: these programs have not done the same work.")


if __name__ == "__main__":
    run_alone(main)
