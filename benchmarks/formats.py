"""The cost of rounding: the demo's loss curves in float32, bfloat16 and float16, from several seeds.

    .venv/bin/python benchmarks/formats.py --plot benchmarks/formats.svg

Each run is `shardlab demo` with another seed and in another format, on two ranks that divide the samples, which is the
same training and takes less time than 8 ranks on two cores. In 16 bits the first step is rounded otherwise, and from
there on a run goes its own way, as it does with other data: one seed tells nothing. So the table has for each format
the mean over the seeds of the difference to float32, and the standard error of that mean.
"""
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from programs import head, parse, parser_of, row
from turns import output_of

from mpi_impl.launch.entry import run_alone

RANKS = "-n 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1".split()
FORMATS = {"float32": [], "bfloat16": ["--bf16"], "float16": ["--fp16"]}


class Curves(NamedTuple):
    """The losses of a run, by iteration."""

    training: dict[int, float]
    validation: dict[int, float]

    @property
    def last(self) -> float:
        """Return the validation's loss at the end."""
        return self.validation[max(self.validation)]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(parser_of("formats", __doc__), argv, plot="draw the curves there",
                    seeds=(4, "of each format"), iters=(500, "iterations of a run"))
    found: dict[str, list[Curves]] = {form: [] for form in FORMATS}
    print(head("seed", *(f"{form}, validation" for form in FORMATS)), flush=True)
    for seed in range(1, options.seeds + 1):
        for form in FORMATS:
            found[form].append(trained(seed, options.iters, FORMATS[form]))
        print(row(seed, *(f"{curves[-1].last:.4f}" for curves in found.values())), flush=True)
    print(row("difference to float32", *differences(found)))
    if options.plot:
        from pictures import draw_formats  # matplotlib takes a second to import

        from mpi_impl.runtime.pictures import save
        save(draw_formats(found), options.plot)


def trained(seed: int, iterations: int, flags: list[str]) -> Curves:
    """Run the demo, and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        output_of([sys.executable, "-m", "shardlab", "demo", *RANKS, "--seed", str(seed), *flags,
                   "--train-iters", str(iterations), "--eval-interval", str(iterations), "--sample-tokens", "0",
                   "--metrics-file", str(metrics), "--save", folder, "--ledger", f"{folder}/ledger.json",
                   "--plot", f"{folder}/loss.png", "--report", f"{folder}/report.html"])
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Curves(*({one["iteration"]: one[name] for one in rows if name in one}
                    for name in ("lm_loss", "validation_loss")))


def differences(found: Mapping[str, Sequence[Curves]]) -> list[str]:
    """Return for each format the mean difference to float32 at the end, and its standard error."""
    cells = []
    for curves in found.values():
        differ = [one.last - other.last for one, other in zip(curves, found["float32"])]
        error = stdev(differ) / len(differ) ** 0.5 if len(differ) > 1 else float("nan")
        cells.append(f"{mean(differ):+.4f} ± {error:.4f}")
    return ["", *cells[1:]]


if __name__ == "__main__":
    run_alone(main)
