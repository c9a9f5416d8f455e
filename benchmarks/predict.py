"""The step times that the planner predicts, beside those that ranks take, for many topologies.

    .venv/bin/python benchmarks/predict.py

They train one GPT on one batch, on 1 to 8 ranks, with every topology of the list below. If there is a core for each
rank, the time is the wall clock's, and messages take the time that calibrate.py finds. If ranks outnumber cores, it is
the virtual clock's (mpi_impl/comm/clock.py), on which messages take the time of its link.

The machine is measured before each turn of all topologies. But a machine that others use, too, may be twice as fast a
minute later, and ranks that share a core slow one another down. So before each step all ranks do the same small piece
of work, and the profile is scaled by its speed: `predicted` is the planner's prediction for the machine as it was then.
"""
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import machine
from calibrate import profile
from models import gpt
from programs import parse, parser_of
from steps import LIMIT, OPTIONS, measure

from mpi_impl.comm.clock import INFINIBAND
from mpi_impl.launch.entry import run_alone
from mpi_impl.launch.pool import Pool
from mpi_impl.runtime.rank_environment import cores
from mpi_impl.runtime.tables import aligned
from reference.config import ParallelConfig, Recompute, number_of_microbatches
from reference.costs.hardware import Hardware
from reference.costs.plans import Plan
from reference.costs.step_time import step_time
from shardlab.plan.candidates import in_words

MODEL = gpt(L=8, h=256, a=8, V=2048, s=128)
B = 16      # samples of a step

# t, p, d, b, and other choices of ParallelConfig.
TOPOLOGIES: list[tuple[int, int, int, int, dict]] = [
    (1, 1, 1, 4, {}), (2, 1, 1, 4, {}), (1, 2, 1, 4, {}), (1, 1, 2, 4, {}),
    (4, 1, 1, 4, {}), (1, 4, 1, 2, {}), (1, 1, 4, 4, {}), (2, 2, 1, 4, {}), (2, 1, 2, 4, {}), (1, 2, 2, 2, {}),
    (8, 1, 1, 4, {}), (1, 8, 1, 1, {}), (1, 1, 8, 2, {}), (2, 2, 2, 2, {}), (4, 2, 1, 4, {}), (2, 4, 1, 2, {}),
    (4, 1, 1, 4, {"sequence_parallel": True}), (2, 2, 1, 4, {"recompute": Recompute("full")}),
    (1, 4, 1, 2, {"pipeline_schedule": "interleaved", "virtual_pipeline_size": 2}), (1, 1, 4, 2, {"zero_stage": 1}),
]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of("predict", __doc__), argv, **OPTIONS)
    plans, calibrations, ranks = list(map(plan_of, TOPOLOGIES)), [], max(2, cores())

    def calibrate(pool: Pool) -> None:
        calibrations.extend(pool.run(ranks, machine.measure, timeout=LIMIT)[:1])

    turns = measure(plans, args.turns, args.steps, list(map(is_virtual, plans)), calibrate)
    hardware, usual = profile(calibrations, ranks), median(one["probe",] for one in calibrations)
    measured = [median(one.step for one in found) for found in turns]
    predicted = [median(step_time(plan, slow_down(on_clock(hardware, plan), one.probe / usual)).total for one in found)
                 for plan, found in zip(plans, turns)]
    print(f"\n{table(plans, predicted, measured)}\n\n{verdict(predicted, measured)}")
    if args.plot:
        from pictures import draw_predictions  # matplotlib takes a second to import

        from mpi_impl.runtime.pictures import save
        save(draw_predictions([in_words(plan) for plan in plans], predicted, measured), args.plot)


def plan_of(topology: tuple[int, int, int, int, dict]) -> Plan:
    t, p, d, b, choices = topology
    return Plan(MODEL, ParallelConfig(t, p, d, **choices), number_of_microbatches(B, b, d), b)


def is_virtual(plan: Plan) -> bool:
    return plan.parallel.world_size > cores()


def on_clock(hardware: Hardware, plan: Plan) -> Hardware:
    """Return the hardware of the plan's clock: on the virtual one messages take the time of its link."""
    return replace(hardware, inside=INFINIBAND, between=INFINIBAND) if is_virtual(plan) else hardware


def slow_down(hardware: Hardware, times: float) -> Hardware:
    """Return a device on which everything except messages takes this many times as long."""
    return replace(hardware, peak=hardware.peak / times, bandwidth=hardware.bandwidth / times,
                   overhead=(hardware.overhead[0] * times, hardware.overhead[1] * times))


# ---- output ---------------------------------------------------------------------------------------------------------


def table(plans: Sequence[Plan], predicted: Sequence[float], measured: Sequence[float]) -> str:
    rows = [["topology", "clock", "predicted", "measured", "off by"]]
    rows += [[in_words(plan), "virtual" if is_virtual(plan) else "wall", f"{1e3 * p:.1f} ms", f"{1e3 * m:.1f} ms",
              f"{p / m - 1:+.1%}"] for plan, p, m in zip(plans, predicted, measured, strict=True)]
    return aligned(rows, left=(0, 1))


def verdict(predicted: Sequence[float], measured: Sequence[float]) -> str:
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured)]
    pairs = list(combinations(range(len(measured)), 2))
    kept = sum((predicted[i] < predicted[j]) == (measured[i] < measured[j]) for i, j in pairs)
    return (f"median error {median(errors):.1%}, largest {max(errors):.1%}; of {len(pairs)} pairs of topologies "
            f"{kept / len(pairs):.0%} are in the right order")


if __name__ == "__main__":
    run_alone(main)
