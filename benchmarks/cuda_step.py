"""The speed of a training step on one GPU, beside PyTorch and the GPU's peak.

    python benchmarks/cuda_step.py                  # with CuPy, nvidia-cudnn-frontend and a CUDA build of PyTorch
    python benchmarks/cuda_step.py --work h512      # a small model, for which a GPU waits for Python

The 1.2B model of Shoeybi et al. 2019, table 1 (h 1536, L 40, a 16, s 1024, V 51,200), 8 samples a step, bfloat16, no
dropout, no recompute, the optimizer included; or a smaller one. In each round ours, with and without a CUDA graph,
PyTorch as it is, and PyTorch with `torch.compile`, also with CUDA graphs, run one after another, since they do not fit
into a GPU's memory together. The program prints medians over all rounds: ms; tokens/s; TFLOP/s of the model
(72 B s L h^2 (1 + s/(6h) + V/(12 L h)), Korthikanti et al. 2022, equation 7) and their share of the peak; how many
times as fast ours is; and the time of our step, without a graph, by kind of work.
"""
import json
import sys
from contextlib import closing
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from programs import head, parse, parser_of, row
from turns import Contender, output_of, program
from works import GPU_WORKS, Work

from mpi_impl.comm.device import gpus_here
from mpi_impl.launch.entry import run_alone
from reference.config import ModelConfig, require_positive
from reference.costs.flops import iteration_flops, utilization
from reference.errors import UserError

PEAK = 989e12        # FLOP/s of bfloat16 without sparsity: NVIDIA's data sheets of H100 SXM and H200
OURS = "ours", "ours, a graph"
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend", "torch")


def main() -> None:
    parser = parser_of("cuda_step", __doc__)
    parser.add_argument("--peak", type=float, default=PEAK, metavar="FLOPS",
                        help="the GPU's, in FLOP/s (default: 989e12, an H100's or H200's)")
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch out")
    parser.add_argument("--work", choices=tuple(GPU_WORKS), default="1.2B", help="the model (default: 1.2B)")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer, for a smaller GPU")
    options = parse(parser, rounds=(2, "of each contender"), steps=(20, "that count in a round"))
    require_positive("peak", options.peak)
    work = GPU_WORKS[options.work]
    if options.layers is not None:
        require_positive("layers", options.layers)
        work = work._replace(L=options.layers)
    gpus = gpus_here()
    if not options.no_peer:
        check_torch()
    print(f"{date.today()}, {gpus[0][1]}, {', '.join(versions())}\n"
          f"{work}, bfloat16\n\n{head('', 'ms', 'tokens/s', 'model TFLOP/s', 'of the peak')}", flush=True)
    flops = iteration_flops(ModelConfig(work.L, work.h, work.a, work.V, work.s), work.b, work.s)
    times = measure(work, options)
    for who, seconds in times.items():
        print(row(who, f"{seconds * 1e3:.2f}", f"{work.tokens / seconds:,.0f}", f"{flops / seconds / 1e12:,.0f}",
                  f"{utilization(flops, seconds, 1, options.peak):.1%}"))
    for ours in OURS:
        for who in [who for who in times if who not in OURS]:
            print(f"\n{ours}: {times[who] / times[ours]:.2f} times as fast as {who}")
    print(f"\nWhere the time of our step goes, without a graph:\n\n{where(work)}")


def check_torch() -> None:
    """Raise UserError without a PyTorch that has CUDA."""
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch is not installed. Install a build for CUDA, or leave it out with --no-peer.") from None
    if not torch.cuda.is_available():
        raise UserError("This PyTorch sees no GPU. Install a build for CUDA, or leave it out with --no-peer.")


def versions() -> list[str]:
    """Return the versions of everything that takes part, as far as it is installed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def measure(work: Work, options) -> dict[str, float]:
    """Return the seconds of a step of each contender: the median over all rounds."""
    times: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for who, command in commands(work, options.no_peer).items():
            with closing(Contender(who, [command], {"WORLD_SIZE": "1"}, 1)) as contender:
                contender.turn(6)                        # which compile, fill the memory pool, and record
                times.setdefault(who, []).extend(contender.turn(options.steps))
            print(f"{who}: {median(times[who]) * 1e3:.1f} ms a step", file=sys.stderr, flush=True)
    return {who: median(found) for who, found in times.items()}


def commands(work: Work, alone: bool) -> dict[str, list[str]]:
    """Return the command of each contender."""
    ours = [*program("shardlab_gpt"), work.argument, "1", "--cuda"]
    eager = [*program("pytorch_gpt"), work.argument, "--cuda"]
    found = dict(zip(OURS, (ours, [*ours, "--graph"])))
    return found if alone else found | {"PyTorch eager": eager, "PyTorch compiled": [*eager, "--compile"],
                                        "PyTorch compiled, graphs": [*eager, "--compile", "--graph"]}


def where(work: Work) -> str:
    """Return a table of the kinds of work in our step."""
    times = json.loads(output_of([*commands(work, True)["ours"], "--where"]).splitlines()[-1])
    whole = times.pop("step")
    lines = [row(kind, f"{ms:.1f}", f"{ms / whole:.0%}") for kind, ms in times.items()]
    return "\n".join([head("kind of work", "ms", "of the step"), *lines, row("together", f"{whole:.1f}", "")])


if __name__ == "__main__":
    run_alone(main)
