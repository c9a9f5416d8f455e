"""The cost of rounding: the demo's loss in float32, bfloat16 and float16, from several seeds.

    .venv/bin/python benchmarks/formats.py

Each run is `shardlab demo` with another seed and in another format, on two ranks that divide the samples, which is the
same training and takes less time than 8 ranks on two cores. In 16 bits the first step is rounded otherwise, and from
there on a run goes its own way, as it does with other data: one seed tells nothing. So the table has for each format
the mean over the seeds of the difference to float32, and the standard error of that mean.
"""
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from programs import head, parse, parser_of, row
from turns import output_of

from mpi_impl.launch.entry import run_alone

RANKS = "-n 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1".split()
FORMATS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser_of("formats", __doc__), argv, seeds=(4, "of each format"),
                    iters=(500, "iterations of a run"))
    losses: dict[str, list[float]] = {form: [] for form in FORMATS}
    print(head("seed", *(f"{form}, validation" for form in FORMATS)), flush=True)
    for seed in range(1, options.seeds + 1):
        for form, flags in FORMATS.items():
            losses[form].append(final_loss(seed, options.iters, flags))
        print(row(seed, *(f"{of_seeds[-1]:.4f}" for of_seeds in losses.values())), flush=True)
    print(row("difference to float32", "", *(difference(losses[form], losses["float32"])
                                             for form in FORMATS if form != "float32")))


def final_loss(seed: int, iterations: int, flags: list[str]) -> float:
    """Run the demo, and return its validation loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        output_of([sys.executable, "-m", "shardlab", "demo", *RANKS, "--seed", str(seed), *flags,
                   "--train-iters", str(iterations), "--eval-interval", str(iterations), "--sample-tokens", "0",
                   "--metrics-file", str(metrics), "--save", folder, "--ledger", f"{folder}/ledger.json",
                   "--plot", f"{folder}/loss.png", "--report", f"{folder}/report.html"])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["validation_loss"] for line in rows if "validation_loss" in line][-1]


def difference(losses: Sequence[float], others: Sequence[float]) -> str:
    """Return the mean difference over the seeds, and its standard error."""
    differences = [loss - other for loss, other in zip(losses, others, strict=True)]
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return f"{mean(differences):+.4f} ± {error:.4f}"


if __name__ == "__main__":
    run_alone(main)
