"""The growth of a step's time with the sizes, beside the growth of its operation count.

    .venv/bin/python benchmarks/cpu_scaling.py [--plot benchmarks/cpu_scaling.svg]

It varies one size of a base model at a time: h, L, s, b, m, and the ranks of a tensor group. The sizes take turns, and
a step's time is a median over the turns. The picture shows it beside the count of the step's FLOPs (works.py), scaled
to agree at the largest size: time above that line does not shrink with the work. The program prints both exponents: how
the time grows over the second half of the sizes, and how the count does.
"""
from math import log

from matplotlib.figure import Figure
from turns import Contender, launched, median_times
from works import Work

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.pictures import save
from mpi_impl.runtime.rank_environment import thread_settings

BASE = Work(h=256, L=4, a=4, s=128, b=4, V=2048)
SIZES = {"h": (64, 128, 256, 512, 768), "L": (1, 2, 4, 8, 16), "s": (32, 64, 128, 256, 512), "b": (1, 2, 4, 8, 16),
         "m": (1, 2, 4, 8), "ranks": (1, 2)}
TURNS = 5


def main() -> None:
    parser = ArgumentParser(prog="cpu_scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw them there")
    options = parser.parse_args()
    check_outputs(options)     # now, and not after minutes
    found = {name: measure(name, sizes) for name, sizes in SIZES.items()}
    if options.plot:
        save(plot(found), options.plot)


def measure(name: str, sizes) -> list[tuple[float, float]]:
    """Return seconds and FLOPs of a step at each size."""
    times = median_times((contender(name, size) for size in sizes), TURNS, lambda one: len(one.turn(2)))
    pairs = list(zip(times.values(), (flops(name, size) for size in sizes)))
    half = min(len(sizes) // 2, len(sizes) - 2)
    print(f"{name:>5}: " + "  ".join(f"{size}: {1e3 * seconds:.0f} ms" for size, (seconds, _) in zip(sizes, pairs)))
    time, count = (exponent(sizes[half:], values[half:]) for values in zip(*pairs))
    print(f"       from {sizes[half]} on time grows as {name}^{time:.2f}, the count as {name}^{count:.2f}", flush=True)
    return pairs


def exponent(sizes, values) -> float:
    return log(values[-1] / values[0]) / log(sizes[-1] / sizes[0])


def contender(name: str, size: int) -> Contender:
    work, m, ranks = at(name, size)
    return Contender(f"{name} = {size}", [launched(ranks, "shardlab_gpt", work.argument, str(m))], thread_settings({}),
                     ranks)


def at(name: str, size: int) -> tuple[Work, int, int]:
    """Return the base with one size changed: the work of a microbatch, the number of microbatches, and ranks."""
    work = BASE._replace(**{name: size}) if name in BASE._fields else BASE
    return work, size if name == "m" else 1, size if name == "ranks" else 1


def flops(name: str, size: int) -> float:
    """Return the FLOPs of each rank."""
    work, m, ranks = at(name, size)
    return work.flops * m / ranks


def plot(found) -> Figure:
    figure = Figure((11, 6), layout="constrained")
    for axes, (name, pairs) in zip(figure.subplots(2, 3).flat, found.items()):
        sizes, (times, counts) = SIZES[name], zip(*pairs)
        axes.plot(sizes, [1e3 * seconds for seconds in times], "o-", label="a step, measured")
        axes.plot(sizes, [1e3 * times[-1] * count / counts[-1] for count in counts], "--", color="gray",
                  label="as the FLOPs grow")
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="ms", xticks=sizes, xticklabels=sizes)
        axes.minorticks_off()
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run_alone(main)
