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
from steps import OPTIONS, measure

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores
from mpi_impl.runtime.tables import aligned
from reference.config import ParallelConfig, number_of_microbatches
from reference.costs.plans import Plan
from reference.costs.step_time import flops_per_second

RANKS = (1, 2, 4, 8)
WIDTHS = {1: 256, 2: 384, 4: 512, 8: 704}       # of weak scaling by t: about n times as many FLOPs
B, LAYERS = 16, 8


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of("measured_scaling", __doc__), argv, **OPTIONS)
    strong, weak = scaling(args.turns, args.steps)
    print(f"\nstrong scaling: times as fast as one rank\n{table(strong, '{:.2f}')}\n\nweak scaling: FLOP/s of a rank, "
          f"beside one rank's\n{table(weak, '{:.0%}')}\n\nup to {cores()} ranks by the wall's clock, beyond by the "
          "virtual one")
    if args.plot:
        from pictures import draw_scaling  # matplotlib takes a second to import

        from mpi_impl.runtime.pictures import save
        save(draw_scaling(strong, weak, cores()), args.plot)


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
    t, p, d = (n if kind == one else 1 for one in "tpd")
    b = 1 if kind == "p" else 2
    return Plan(gpt(layers, width, 8, 256, 128), ParallelConfig(t, p, d), number_of_microbatches(batch, b, d), b)


def scaling(turns: int, steps: int) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]]]:
    """Return strong and weak scaling, by kind and ranks: the speedup, and a rank's FLOP/s as a fraction of one rank's.
    """
    keys = [(of, kind, n) for of in (strong_plan, weak_plan) for kind in "tpd" for n in RANKS]
    clocks = [n > cores() for _, _, n in keys]
    ones = [key for key in keys if key[2] == 1]             # by both clocks
    plans = [of(kind, n) for of, kind, n in [*keys, *ones]]
    virtual = [*clocks, *[True] * len(ones)]
    rates = {(*key, fake): median(one.probe * flops_per_second(plan, one.step) for one in found)
             for key, fake, plan, found in zip([*keys, *ones], virtual, plans, measure(plans, turns, steps, virtual))}

    def share(of, kind, n):
        virtual = n > cores()
        return rates[of, kind, n, virtual] / rates[of, kind, 1, virtual]

    return ({kind: {n: n * share(strong_plan, kind, n) for n in RANKS} for kind in "tpd"},
            {kind: {n: share(weak_plan, kind, n) for n in RANKS} for kind in "tpd"})


def table(curves: Mapping[str, Mapping[int, float]], form: str) -> str:
    return aligned([["ranks", *map(str, RANKS)],
                    *([kind, *map(form.format, found.values())] for kind, found in curves.items())])


if __name__ == "__main__":
    run_alone(main)
