"""Weak and strong scaling of t, p and d on this machine: how much faster a step is on more ranks.

    .venv/bin/python benchmarks/measured_scaling.py [--plot benchmarks/measured_scaling.svg]

Strong scaling divides one GPT and one batch among 1 to 8 ranks. In weak scaling the work grows with the ranks: by t in
a wider model, by p in a deeper one, by d in a larger batch; it compares the FLOP/s of a rank with those of one rank
alone. If each rank has a core of its own, the time is the wall clock's. Otherwise it is the virtual clock's, on which
every rank has a device of its own, and messages take the time of a fast network. The baseline is one rank on the same
clock. A machine that others use, too, may be twice as fast a minute later: so each step is measured relative to a small
piece of work before it.
"""
from collections.abc import Mapping, Sequence
from statistics import median

from models import gpt
from programs import parse, parser_of
from steps import StepTimes, step_seconds

from mpi_impl.launch.entry import run_alone
from mpi_impl.launch.pool import Pool
from mpi_impl.runtime.rank_environment import cores
from mpi_impl.runtime.tables import aligned
from reference.config import ParallelConfig, number_of_microbatches
from reference.costs.plans import Plan
from reference.costs.step_time import flops_per_second

RANKS = (1, 2, 4, 8)
WIDTHS = {1: 256, 2: 384, 4: 512, 8: 704}       # of weak scaling by t: about n times as many FLOPs
B, LAYERS = 16, 8
LIMIT = 300.0   # seconds that ranks have for a turn
KINDS = {"t": ("tensor parallel", "#0072B2"), "p": ("pipeline", "#D55E00"), "d": ("data parallel", "#009E73")}
Curves = Mapping[str, Mapping[int, float]]      # by kind and number of ranks


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of("measured_scaling", __doc__), argv, plot="draw them there", turns=(3, "of each plan"),
                 steps=(4, "of each turn"))
    strong, weak = scaling(args.turns, args.steps)
    print(f"\nstrong scaling: times as fast as one rank\n{table(strong, '{:.2f}')}\n\nweak scaling: FLOP/s of a rank, "
          f"compared with one rank's\n{table(weak, '{:.0%}')}\n\nup to {cores()} ranks by the wall's clock, beyond by "
          "the virtual one")
    if args.plot:
        from mpi_impl.runtime.pictures import save
        save(draw(strong, weak, cores()), args.plot)


# ---- what is measured -----------------------------------------------------------------------------------------------


def strong_plan(kind: str, n: int) -> Plan:
    """Return the plan with the same model and batch for all."""
    return parallel_plan(LAYERS, 256, kind, n, B)


def weak_plan(kind: str, n: int) -> Plan:
    """Return the plan with work that grows with n."""
    layers, width = (n if kind == "p" else 4), (WIDTHS[n] if kind == "t" else 256)
    return parallel_plan(layers, width, kind, n, 4 * n if kind == "d" else 4)


def parallel_plan(layers: int, width: int, kind: str, n: int, batch: int) -> Plan:
    """Return the plan over n ranks of one kind. A pipeline has microbatches of one sample, the others of two.

    The GPT has heads for eight ranks, and a small vocabulary, so that a pipeline's last stage has little extra work.
    """
    t, p, d = (n if kind == letter else 1 for letter in KINDS)
    b = 1 if kind == "p" else 2
    return Plan(gpt(layers, width, 8, 256, 128), ParallelConfig(t, p, d), number_of_microbatches(batch, b, d), b)


def scaling(turns: int, steps: int) -> tuple[Curves, Curves]:
    """Return strong and weak scaling: the speedup, and a rank's FLOP/s as a fraction of one rank's."""
    keys = [(make, kind, n, n > cores()) for make in (strong_plan, weak_plan) for kind in KINDS for n in RANKS]
    keys += [(make, kind, 1, True) for make, kind, n, _ in keys if n == 1]             # one rank by both clocks
    plans = [make(kind, n) for make, kind, n, _ in keys]
    times = measure(plans, turns, steps, [virtual for *_, virtual in keys])
    rates = {key: median(step.probe * flops_per_second(plan, step.step) for step in steps_of_plan)
             for key, plan, steps_of_plan in zip(keys, plans, times)}

    def share(make, kind, n):
        virtual = n > cores()
        return rates[make, kind, n, virtual] / rates[make, kind, 1, virtual]

    return ({kind: {n: n * share(strong_plan, kind, n) for n in RANKS} for kind in KINDS},
            {kind: {n: share(weak_plan, kind, n) for n in RANKS} for kind in KINDS})


# ---- the time of a plan's step --------------------------------------------------------------------------------------


def measure(plans: Sequence[Plan], turns: int, steps: int, virtual: Sequence[bool]) -> list[list[StepTimes]]:
    """Measure the step of each plan, by the wall's clock or the virtual one, in each turn."""
    times: list[list[StepTimes]] = [[] for _ in plans]
    with Pool(max(2, cores())) as few, Pool(max(RANKS)) as many:      # one pool sleeps while the other one works
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns}", end=" ", flush=True)
            for plan, is_virtual, times_of_plan in zip(plans, virtual, times, strict=True):
                pool = many if is_virtual else few
                times_of_plan += pool.run(plan.parallel.world_size, step_seconds, plan, is_virtual, steps,
                                          timeout=LIMIT)[:1]
                print(".", end="", flush=True)
            print()
    return times


# ---- output ---------------------------------------------------------------------------------------------------------


def table(curves: Curves, form: str) -> str:
    return aligned([["ranks", *map(str, RANKS)],
                    *([kind, *map(form.format, curve.values())] for kind, curve in curves.items())])


def draw(strong: Curves, weak: Curves, cores: int):
    """Draw speedups by kind of parallelism and ranks, and FLOP/s of a rank as a fraction of one rank's."""
    from matplotlib.figure import Figure  # takes a second to import

    from shardlab.report.charts import finish
    figure = Figure((10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, curves, ideal, title in (
            (left, strong, RANKS, "strong scaling: times as fast as one rank"),
            (right, weak, [1] * len(RANKS), "weak scaling: FLOP/s of a rank, beside one rank's")):
        axes.plot(RANKS, ideal, color="#B0B0B0", linestyle="--", linewidth=1, label="ideal")
        for kind, curve in curves.items():
            name, color = KINDS[kind]
            axes.plot(list(curve), list(curve.values()), color=color, label=name, zorder=2)
            for n, value in curve.items():
                axes.plot(n, value, "o", color=color, markersize=7, zorder=3,
                          markerfacecolor=color if n <= cores else "white")
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, map(str, RANKS))
        finish(axes, "ranks; full circles: wall clock, hollow ones: virtual clock", title, "both")
    left.set_yscale("log", base=2)
    left.set_yticks(RANKS, map(str, RANKS))
    right.set_ylim(0, 1.15)
    left.legend(frameon=False)
    return figure


if __name__ == "__main__":
    run_alone(main)
