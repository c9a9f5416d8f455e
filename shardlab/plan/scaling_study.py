"""The papers' measurements beside our formulas' predictions: `python -m shardlab.plan.scaling_study`.

Every figure is computed by `step_time` and `memory` of reference/costs/ from one profile of hardware for each
cluster: dgx-2h for Shoeybi et al. 2019, dgx-a100 for Narayanan et al. 2021 and Korthikanti et al. 2022, who used the
same one. A profile has a few numbers that were fitted to its papers; no row has any of its own. From table 2 of the
second paper only the ZeRO-3 runs of the smaller model were used for that. dgx-h100 (h100_runs.py) was fitted to no
run. Where a paper does not give a number of a run (b and v, in the second one), it is the one that makes the run
fastest.

It takes one process, and some seconds.
"""
from collections.abc import Iterable, Iterator, Sequence

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.outputs import check_outputs
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.hardware import Hardware
from reference.costs.layer_time import layer, sizes_of
from reference.costs.plans import Plan
from reference.costs.published import (HEADS, KORTHIKANTI, MEGATRON, OVERHEAD, PTD_P, STRONG_SCALING, TABLE_2,
                                       V100_REACHED, ZERO, Compared, PublishedRun, Recomputed)
from reference.costs.step_time import flops_per_second, step_time
from reference.parallel.model_states import model_states
from shardlab.plan.candidates import divisors
from shardlab.plan.h100_runs import h100_tables
from shardlab.plan.profiles import load
from shardlab.plan.published import Row, Share, Table, describe, fits, scheduled

FULL = Recompute("full")        # as the first two papers, in all runs

WHY_64_REPLICAS = """\
Why: every row has 64 replicas, and each GPU reduces 2.1 to 2.5 GB of gradients. From t = 1 to 8 the paper loses 4,
12, 3 and 3 points by that, read off a figure; and nothing in the model makes t = 2 so much worse than its \
neighbours."""


def main(argv: Sequence[str] | None = None) -> None:
    p = ArgumentParser(prog="shardlab.plan.scaling_study",
                       description="Set the papers' scaling studies beside our formulas' predictions.")
    p.add_argument("--plot", default="scaling_study.png", metavar="FILE", help="(default: scaling_study.png)")
    args = p.parse_args(argv)
    check_outputs(args)
    tables = study()
    print("\n\n".join(map(describe, tables)))
    rows = [row for table in tables for row in table.rows]
    print(f"\n{sum(row.meets for row in rows)} of {len(rows)} figures are within what is allowed")
    from mpi_impl.runtime.pictures import save
    from shardlab.plan.published_figures import draw_tables  # matplotlib takes a second to import
    save(draw_tables(tables), args.plot)
    print(f"all are drawn in {args.plot}")


def study() -> list[Table]:
    a100 = load("dgx-a100")
    return [*shoeybi(load("dgx-2h")), *narayanan(a100), *korthikanti(a100), *rajbhandari(),
            *h100_tables(load("dgx-h100"))]


def rate(plan: Plan, hardware: Hardware) -> float:
    """Return the FLOP/s of a GPU, including recomputed work."""
    return flops_per_second(plan, step_time(plan, hardware).total, "full")


def shoeybi(hardware: Hardware) -> Iterator[Table]:
    def plan(model: ModelConfig, t: int, d: int = 1) -> Plan:
        return Plan(model, ParallelConfig(t, 1, d, recompute=FULL), m=1, b=8)

    paper, smallest, largest = "Shoeybi et al. 2019", MEGATRON[0].model, MEGATRON[-1]
    one = rate(plan(smallest, 1), hardware)
    yield Table(f"{paper}, section 5.1: TFLOP/s of one GPU, without communication", "",
                [Share("1.2B", V100_REACHED / 1e12, one / 1e12, 0.05)])
    for d, title, why in ((1, "weak scaling, model parallel", ""), (64, "the same with 64 replicas", WHY_64_REPLICAS)):
        yield Table(f"{paper}, figure 5: {title}", "%", [
            Row(f"{run.billions}B, t = {run.t}", run.efficiency if d == 1 else run.replicated,
                rate(plan(run.model, run.t, d), hardware) / one,
                0.03 if run is largest else 0.05)       # the text gives the figure of the largest model
            for run in MEGATRON], why)
    yield Table(f"{paper}, appendix D: strong scaling of 1.2B, times as fast", "", [
        Share(f"t = {t}", speedup, step_time(plan(smallest, 1), hardware).total
              / step_time(plan(smallest, t), hardware).total, 0.05) for t, speedup in STRONG_SCALING.items()])
    yield Table(f"{paper}, appendix D: heads of the 8.3B model", "%", [
        Row(f"{a} heads", efficiency, rate(plan(largest._replace(a=a).model, largest.t), hardware) / one, 0.03)
        for a, efficiency in HEADS.items()])


# ---- Narayanan et al. 2021 ------------------------------------------------------------------------------------------


def narayanan(hardware: Hardware) -> Iterator[Table]:
    """Compare tables 1 and 2. Where the paper does not print b or v, they are those that make a step fastest."""
    rows = []
    for run in PTD_P:
        fitting = (plan for b in (1, 2, 4, 8, 16) for plan in plans(run, b) if fits(plan, hardware))
        plan = min(fitting, key=lambda plan: step_time(plan, hardware, closed_form=True).total)
        name = (f"{run.billions}B, t {run.t}, p {run.p}, n {run.gpus} (b {plan.b}, v "
                f"{plan.parallel.virtual_pipeline_size or 1})")
        rows.append(Share(name, run.teraflops, rate(plan, hardware) / 1e12, 0.10))
    yield Table("Narayanan et al. 2021, table 1: TFLOP/s of a GPU", "", rows)
    title = "Narayanan et al. 2021, table 2:"
    yield Table(f"{title} TFLOP/s of a GPU, PTD-P (not used for the profile)", "", [
        compared(run, plans(run, run.b), hardware, 0.06) for run in TABLE_2 if run.t > 1])
    yield Table(f"{title} ZeRO-3 alone, 174.6B (sets two numbers of the profile)", "",
                sharded_rows("174.6", hardware, 0.03))
    yield Table(f"{title} ZeRO-3 alone, 529.6B (not used for the profile)", "", sharded_rows("529.6", hardware, 0.12))


def plans(run: PublishedRun | Compared, b: int) -> Iterator[Plan]:
    """List plans of a row for each v: 1 is 1F1B, more the interleaved schedule, which the paper used."""
    d = run.gpus // (run.t * run.p)
    m, rest = divmod(run.B, d * b)
    chunks = divisors(run.L // run.p) if run.p > 1 and m % run.p == 0 and run.L % run.p == 0 else [1]
    for v in chunks if not rest else []:
        yield Plan(run.model, ParallelConfig(run.t, run.p, d, **scheduled(v), recompute=FULL), m, b)


def sharded_rows(billions: str, hardware: Hardware, allowed: float) -> list[Row]:
    """Compare the rows without model parallelism: one microbatch for each of n replicas."""
    return [compared(run, [Plan(run.model, ParallelConfig(1, 1, run.gpus, zero_stage=3, recompute=FULL), 1, run.b)],
                     hardware, allowed) for run in TABLE_2 if run.t == 1 and run.billions == billions]


def compared(run: Compared, possible: Iterable[Plan], hardware: Hardware, allowed: float) -> Row:
    found = max(rate(plan, hardware) for plan in possible)
    return Share(f"{run.billions}B, n {run.gpus}, b {run.b}", run.teraflops, found / 1e12, allowed)


# ---- Korthikanti et al. 2022, Rajbhandari et al. 2020 ---------------------------------------------------------------


def korthikanti(hardware: Hardware) -> Iterator[Table]:
    def plan(run: Recomputed, recompute: str, sequence_parallel: bool) -> Plan:
        return Plan(run.model, ParallelConfig(8, run.p, 1, **scheduled(run.v), sequence_parallel=sequence_parallel,
                                              recompute=Recompute(recompute)), run.B // run.b, run.b)

    def seconds(recompute: str, sequence_parallel: bool) -> float:
        return layer(sizes_of(plan(KORTHIKANTI[0], recompute, sequence_parallel)), hardware).total.total

    yield Table("Korthikanti et al. 2022, table 4: what recompute adds to a layer of the 22B model", "%", [
        Row(recompute + ", sequence parallel" * sequence, overhead,
            seconds(recompute, sequence) / seconds("none", False) - 1, 0.03)
        for (recompute, sequence), overhead in OVERHEAD.items()])
    yield Table("Korthikanti et al. 2022, table 5: seconds of an iteration", "", [
        Share(f"{run.billions}B, {way}", published, step_time(plan(run, *choices), hardware).total, 0.10)
        for run in KORTHIKANTI for published, way, choices in (
            (run.full, "full", ("full", False)), (run.selective, "selective, sequence parallel", ("selective", True)))])


def rajbhandari() -> Iterator[Table]:
    for stage, by_replicas in ZERO.items():
        yield Table(f"Rajbhandari et al. 2020, table 1: GB a device, 7.5B parameters, stage {stage}", "", [
            Share(f"d = {d}", published, sum(model_states(7_500_000_000, d, stage)) / 1e9, 0.03)
            for d, published in by_replicas.items()])


if __name__ == "__main__":
    run_alone(main)
