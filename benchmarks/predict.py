"""Is the planner right? The step time that it predicts beside the one that ranks take, for many topologies.

    .venv/bin/python benchmarks/predict.py

One GPT, one batch, on 1 to 8 ranks: every way to share it out that is on the list below. Where there is a core for each
rank, the time is the wall's, and messages take what calibrate.py finds; where ranks outnumber cores it is the virtual
clock's (mpi_impl/comm/clock.py), on which messages take what its link says.

The machine is measured before each turn of all topologies. But one that others use, too, may be twice as fast a minute
later, and ranks that share a core slow one another down. So before each step all ranks do the same small piece of work,
and the profile is taken as many times as fast or slow as that was: `predicted` is what the planner says of the machine
as it was then.
"""
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import machine
from calibrate import profile
from steps import Measured, step_seconds

from mpi_impl.comm.clock import INFINIBAND
from mpi_impl.entry import ArgumentParser, run_alone
from mpi_impl.files import check_picture
from mpi_impl.planning.candidates import shape_of
from mpi_impl.pool import Pool
from mpi_impl.rank_environment import cores
from mpi_impl.reports.tables import aligned
from reference.config import ModelConfig, ParallelConfig, Recompute, number_of_microbatches, require_positive
from reference.hardware import Hardware
from reference.plans import Plan
from reference.step_time import step_time

MODEL = ModelConfig(num_layers=8, hidden_size=256, num_attention_heads=8, vocab_size=2048, max_position_embeddings=128,
                    hidden_dropout=0.0, attention_dropout=0.0)
B, LIMIT = 16, 300.0        # samples of a step; seconds that the ranks have for a turn

# t, p, d, b, and what else.
TOPOLOGIES: list[tuple[int, int, int, int, dict]] = [
    (1, 1, 1, 4, {}), (2, 1, 1, 4, {}), (1, 2, 1, 4, {}), (1, 1, 2, 4, {}),
    (4, 1, 1, 4, {}), (1, 4, 1, 2, {}), (1, 1, 4, 4, {}), (2, 2, 1, 4, {}), (2, 1, 2, 4, {}), (1, 2, 2, 2, {}),
    (8, 1, 1, 4, {}), (1, 8, 1, 1, {}), (1, 1, 8, 2, {}), (2, 2, 2, 2, {}), (4, 2, 1, 4, {}), (2, 4, 1, 2, {}),
    (4, 1, 1, 4, {"sequence_parallel": True}), (2, 2, 1, 4, {"recompute": Recompute("full")}),
    (1, 4, 1, 2, {"pipeline_schedule": "interleaved", "virtual_pipeline_size": 2}), (1, 1, 4, 2, {"zero_stage": 1}),
]


def main(argv: Sequence[str] | None = None) -> None:
    p = ArgumentParser(prog="predict", description="Set the planner's step times beside measured ones.")
    p.add_argument("--turns", type=int, default=3, metavar="N", help="of each topology (default: 3)")
    p.add_argument("--steps", type=int, default=5, metavar="N", help="of each turn (default: 5)")
    p.add_argument("--plot", metavar="FILE", help="draw them there")
    args = p.parse_args(argv)
    for name in ("turns", "steps"):
        require_positive(name, getattr(args, name))
    if args.plot:
        check_picture(args.plot)
    plans, calibrations, ranks = list(map(plan_of, TOPOLOGIES)), [], max(2, cores())

    def calibrate(pool: Pool) -> None:
        calibrations.extend(pool.run(ranks, machine.measure, timeout=LIMIT)[:1])

    turns = measure(plans, args.turns, args.steps, list(map(is_virtual, plans)), calibrate)
    hardware, usual = profile(calibrations, ranks), median(one["probe",] for one in calibrations)
    measured = [median(one.step for one in found) for found in turns]
    predicted = [median(step_time(plan, slowed(on_clock(hardware, plan), one.probe / usual)).total for one in found)
                 for plan, found in zip(plans, turns)]
    print(f"\n{table(plans, predicted, measured)}\n\n{verdict(predicted, measured)}")
    if args.plot:
        from pictures import draw_predictions     # matplotlib takes a second to import
        from mpi_impl.reports.pictures import save
        save(draw_predictions([named(plan) for plan in plans], predicted, measured), args.plot)


def plan_of(topology: tuple[int, int, int, int, dict]) -> Plan:
    t, p, d, b, choices = topology
    return Plan(MODEL, ParallelConfig(t, p, d, **choices), number_of_microbatches(B, b, d), b)


def is_virtual(plan: Plan) -> bool:
    return plan.parallel.world_size > cores()


def on_clock(hardware: Hardware, plan: Plan) -> Hardware:
    """On the virtual clock messages take what its link says."""
    return replace(hardware, inside=INFINIBAND, between=INFINIBAND) if is_virtual(plan) else hardware


def slowed(hardware: Hardware, times: float) -> Hardware:
    """A device on which all takes so many times as long; messages do not."""
    return replace(hardware, peak=hardware.peak / times, bandwidth=hardware.bandwidth / times,
                   overhead=(hardware.overhead[0] * times, hardware.overhead[1] * times))


def measure(plans: Sequence[Plan], turns: int, steps: int, virtual: Sequence[bool],
            before: Callable[[Pool], object] | None = None) -> list[list[Measured]]:
    """The step of each plan, by the wall's clock or the virtual one, in each turn.

    What is to be done `before` each turn gets a pool with a rank for each core, and at least two.
    """
    found: list[list[Measured]] = [[] for _ in plans]
    most = max(plan.parallel.world_size for plan in plans)
    with Pool(max(2, cores())) as few, Pool(most) as many:      # the ones sleep while the others work
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns}", end=" ", flush=True)
            if before:
                before(few)
            for plan, fake, times in zip(plans, virtual, found, strict=True):
                times += (many if fake else few).run(plan.parallel.world_size, step_seconds, plan, fake, steps,
                                                     timeout=LIMIT)[:1]
                print(".", end="", flush=True)
            print()
    return found


# ---- what it says ---------------------------------------------------------------------------------------------------


def named(plan: Plan) -> str:
    p = plan.parallel
    more = {"sequence parallel": p.sequence_parallel, f"ZeRO-{p.zero_stage}": p.zero_stage,
            "full recompute": p.recompute.granularity == "full",
            f"v {p.virtual_pipeline_size}": p.virtual_pipeline_size}
    t, stages, d = shape_of(plan)
    return ", ".join([f"t {t}, p {stages}, d {d}, b {plan.b}", *(word for word, there in more.items() if there)])


def table(plans: Sequence[Plan], predicted: Sequence[float], measured: Sequence[float]) -> str:
    rows = [["topology", "clock", "predicted", "measured", "off by"]]
    rows += [[named(plan), "virtual" if is_virtual(plan) else "wall", f"{1e3 * p:.1f} ms", f"{1e3 * m:.1f} ms",
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
