"""The speed of a training step on one GPU, next to PyTorch and the GPU's peak.

    python benchmarks/cuda_step.py                          # with CuPy, nvidia-cudnn-frontend and a CUDA PyTorch
    python benchmarks/cuda_step.py --work h256,llama        # others; for small ones a GPU waits for Python

Works are the 1.2B model of Shoeybi et al. 2019, table 1 (h 1536, L 40, a 16, s 1024, V 51,200), 8 samples a step;
smaller GPTs; a Llama; and a Mixtral, with 2 of 8 experts. A step is timed from its start until the GPU has ended it:
forward, backward and AdamW with the same betas and decay, in bfloat16, without dropout, recompute or clipping, on one
batch that is on the GPU. Ours also computes the norm of the gradient, and copies it and the loss to the host. Its graph
ends with the gradients; norm and AdamW are launched after it. PyTorch does neither, and "the step a graph" includes
AdamW.

PyTorch takes part in its fastest modes (contenders/pytorch_gpu.py). Contenders start side by side, as many as fit into
the GPU's memory; those of max-autotune compile alone, since they time kernels. Then they take turns. One that fails
loses only its own figures. The program prints medians over all rounds in ms, the least and the largest round's;
tokens/s; TFLOP/s of the model (Korthikanti et al. 2022, equation 7; here for any model) and their share of the peak;
and how many times as fast ours is.
"""
import importlib.util
import json
import time
from argparse import Namespace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median

from gpu_rounds import WAYS, Rounds, command_of, ways_of
from models import model_of
from programs import head, parse, parser_of, row
from turns import output_of
from works import GPU_WORKS, Work

from mpi_impl.comm.device import gpus_here
from mpi_impl.launch.entry import run_alone
from reference.config import require_positive
from reference.costs.flops import iteration_flops, utilization
from reference.errors import UserError

PEAK = 989e12        # FLOP/s of bfloat16 without sparsity: NVIDIA's data sheets of H100 SXM and H200
OURS = "ours", "graph"
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-cudnn-frontend", "torch", "triton")


def main() -> None:
    parser = parser_of("cuda_step", __doc__)
    parser.add_argument("--peak", type=float, default=PEAK, metavar="FLOPS",
                        help="the GPU's, in FLOP/s (default: 989e12, an H100's or H200's)")
    parser.add_argument("--work", default="1.2B", metavar="NAMES",
                        help=f"models, separated by commas, of {', '.join(GPU_WORKS)} (default: 1.2B)")
    parser.add_argument("--only", default=",".join(WAYS), metavar="NAMES",
                        help=f"contenders, separated by commas, of {', '.join(WAYS)} (default: all, in this order)")
    parser.add_argument("--layers", type=int, metavar="N", help="fewer, for a smaller GPU")
    parser.add_argument("--seconds", type=float, default=0.7, help="that a turn takes, about (default: 0.7)")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS",
                        help="stop after this time, and print what was measured (default: 3600)")
    parser.add_argument("--patience", type=float, default=120.0, metavar="SECONDS",
                        help="a contender has failed that needs more to start, to compile, or for a turn "
                             "(default: 120)")
    parser.add_argument("--json", metavar="FILE", help="append each turn and each failure to a file, as lines of JSON")
    parser.add_argument("--where", action="store_true", help="also measure where the time of our step goes")
    options = parse(parser, rounds=(3, "of each contender"))
    deadline = time.monotonic() + options.limit
    works, keys = chosen(options)
    gpu, memory = gpus_here()[0][1], free_memory()
    print(f"{date.today()}, {gpu}, {', '.join(versions())}; bfloat16", flush=True)
    for name, work in works.items():
        if time.monotonic() < deadline:
            rounds = Rounds(name, work, options, deadline)
            rounds.measure([key for key in keys if key in ways_of(work)], memory)
            print(f"\n{table(rounds, options.peak)}", flush=True)
        else:
            print(f"\n{name}: not measured, since the time of --limit is over", flush=True)
    if options.where:
        for name, work in works.items():
            print(f"\nWhere the time of our step of {name} goes, without a graph:\n\n{where(work)}", flush=True)


def chosen(options: Namespace) -> tuple[dict[str, Work], list[str]]:
    """Return the works and the contenders of the command line. Raises UserError if one cannot be measured."""
    for name in ("peak", "limit", "patience"):
        require_positive(name, getattr(options, name))
    if not options.seconds > 0:
        raise UserError(f"--seconds is {options.seconds}, but must be more than 0.")
    works = {name: GPU_WORKS[name] for name in names_of("--work", options.work, GPU_WORKS)}
    keys = names_of("--only", options.only, WAYS)
    if options.layers is not None:
        require_positive("layers", options.layers)
        works = {name: work._replace(L=options.layers) for name, work in works.items()}
    if any(key not in OURS for key in keys) and importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed. Install a build for CUDA, or leave it out with "
                        f"--only {','.join(OURS)}.")
    return works, keys


def names_of(option: str, text: str, known) -> list[str]:
    """Return the names in a list with commas. Raises UserError if one is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"{option} has {name!r}, which does not exist. Choose among {', '.join(known)}.")
    return list(dict.fromkeys(names))


def free_memory() -> float:
    """Return the bytes of the first GPU that are free."""
    import cupy
    return cupy.cuda.Device(0).mem_info[0]


def versions() -> list[str]:
    """Return the versions of everything that takes part, as far as it is installed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def table(rounds: Rounds, peak: float) -> str:
    """Return the table of a work: the figures of each contender, or its error, and how fast ours is."""
    work = rounds.work
    flops = iteration_flops(model_of(work), work.b, work.s)
    lines = [head(f"{rounds.name}: {work}", "ms", "least and largest round", "tokens/s", "model TFLOP/s",
                  "of the peak")]
    times = {key: median(sum(found, [])) for key, found in rounds.times.items()}
    for key, seconds in times.items():
        each = [1e3 * median(found) for found in rounds.times[key]]
        lines.append(row(WAYS[key].label, f"{seconds * 1e3:.2f}", f"{min(each):.2f} to {max(each):.2f}",
                         f"{work.tokens / seconds:,.0f}", f"{flops / seconds / 1e12:,.0f}",
                         f"{utilization(flops, seconds, 1, peak):.1%}"))
    lines += [f"{WAYS[key].label}: {error}" for key, error in rounds.errors.items()]
    return "\n".join(lines + ratios(times))


def ratios(times: dict[str, float]) -> list[str]:
    """Return how many times as fast our faster way is as PyTorch's fastest: with weights in float32, and of all."""
    ours = min((key for key in times if key in OURS), key=times.__getitem__, default=None)
    lines = []
    for who, peers in (("best of PyTorch with float32 weights", [key for key in times if WAYS[key].float32]),
                       ("best of all of PyTorch", list(times))):
        best = min((key for key in peers if key not in OURS), key=times.__getitem__, default=None)
        if ours and best:
            lines.append(f"ours / {who}: {times[best] / times[ours]:.2f} ({WAYS[ours].label} / {WAYS[best].label})")
    return lines


def where(work: Work) -> str:
    """Return a table of the kinds of work in our step."""
    times = json.loads(output_of([*command_of(WAYS["ours"], work), "--where"]).splitlines()[-1])
    whole = times.pop("step")
    lines = [row(kind, f"{ms:.1f}", f"{ms / whole:.0%}") for kind, ms in times.items()]
    return "\n".join([head("kind of work", "ms", "of the step"), *lines, row("together", f"{whole:.1f}", "")])


if __name__ == "__main__":
    run_alone(main)
