"""The papers' measurements beside our formulas' predictions: `python -m mpi_impl.experiments.scaling_study`.

Every figure is computed by `step_time` and `memory` of reference/costs/ from one profile of hardware for each
cluster: dgx-2h for Shoeybi et al. 2019, dgx-a100 for Narayanan et al. 2021 and Korthikanti et al. 2022, who used the
same one. A profile has a few numbers that were fitted to its papers; no row has any of its own. From table 2 of the
second paper only the ZeRO-3 runs of the smaller model were used for that. dgx-h100 (h100_runs.py) was fitted to no
run. Where a paper does not give a number of a run (b and v, in the second one), it is the one that makes the run
fastest.

It takes one process, and some seconds.
"""
from collections.abc import Iterable, Iterator, Sequence

from mpi_impl.experiments.h100_runs import h100_tables
from mpi_impl.experiments.published_rows import Row, Share, Table, describe
from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.plan.candidates import divisors
from mpi_impl.plan.profiles import load
from mpi_impl.runtime.outputs import check_outputs
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.hardware import Hardware
from reference.costs.layer_time import layer, sizes_of
from reference.costs.plans import Plan
from reference.costs.published import (HEADS, KORTHIKANTI, MEGATRON, OVERHEAD, PTD_P, STRONG_SCALING, TABLE_2,
                                       V100_REACHED, ZERO, Compared, PublishedRun, Recomputed, Scaled)
from reference.costs.step_time import flops_per_second, step_time
from reference.parallel.model_states import model_states

FULL = Recompute("full")        # as the first two papers, in all runs


def main(argv: Sequence[str] | None = None) -> None:
    p = ArgumentParser(prog="mpi_impl.experiments.scaling_study",
                       description="Set the papers' scaling studies beside our formulas' predictions.")
    p.add_argument("--plot", default="scaling_study.png", metavar="FILE", help="(default: scaling_study.png)")
    args = p.parse_args(argv)
    check_outputs(args)
    tables = study()
    print("\n\n".join(map(describe, tables)))
    rows = [row for table in tables for row in table.rows]
    print(f"\n{sum(row.meets for row in rows)} of {len(rows)} figures are within what is allowed")
    from mpi_impl.experiments.published_figures import draw_tables  # matplotlib takes a second to import
    from mpi_impl.runtime.pictures import save
    save(draw_tables(tables), args.plot)
    print(f"all are drawn in {args.plot}")


def study() -> list[Table]:
    v100, a100 = load("dgx-2h"), load("dgx-a100")
    return [*(table(v100) for table in (one_gpu, weak_scaling, replicated_scaling, strong_scaling, heads)),
            *(table(a100) for table in (end_to_end, beside_zero_3, zero_3, zero_3_larger, layer_overheads, iterations)),
            *map(zero_memory, ZERO), *h100_tables(load("dgx-h100"))]


# ---- Shoeybi et al. 2019 --------------------------------------------------------------------------------------------


def rate(plan: Plan, hardware: Hardware) -> float:
    """Return the FLOP/s of a GPU, including recomputed work."""
    return flops_per_second(plan, step_time(plan, hardware).total, "full")


def plan_of(model: ModelConfig, t: int, d: int = 1) -> Plan:
    """Return the plan for t and d with b = 8 and one microbatch per step."""
    return Plan(model, ParallelConfig(t, 1, d, recompute=FULL), m=1, b=8)


def one_gpu(hardware: Hardware) -> Table:
    found = rate(plan_of(MEGATRON[0].model, 1), hardware)
    return Table("Shoeybi et al. 2019, section 5.1: TFLOP/s of one GPU, without communication", "",
                 [Share("1.2B", V100_REACHED / 1e12, found / 1e12, 0.05)])


def weak_scaling(hardware: Hardware) -> Table:
    """Compare efficiencies of a model that grows with t: FLOP/s of a GPU relative to the smallest model's on one."""
    one = rate(plan_of(MEGATRON[0].model, 1), hardware)
    return Table("Shoeybi et al. 2019, figure 5: weak scaling, model parallel", "%", [
        Row(label(run), run.efficiency, rate(plan_of(run.model, run.t), hardware) / one, tolerance(run))
        for run in MEGATRON])


def replicated_scaling(hardware: Hardware) -> Table:
    one = rate(plan_of(MEGATRON[0].model, 1), hardware)
    rows = [Row(label(run), run.replicated, rate(plan_of(run.model, run.t, 64), hardware) / one, tolerance(run))
            for run in MEGATRON]
    return Table("Shoeybi et al. 2019, figure 5: the same with 64 replicas", "%", rows,
                 "Why: every row has 64 replicas, and each GPU reduces 2.1 to 2.5 GB of gradients. From t = 1 to 8 the "
                 "paper loses 4,\n12, 3 and 3 points by that, read off a figure; and nothing in the model makes t = 2 "
                 "so much worse than its neighbours.")


def label(run: Scaled) -> str:
    return f"{run.billions}B, t = {run.t}"


def tolerance(run: Scaled) -> float:
    """Return the tolerance. The paper's text gives the figure of the largest model."""
    return 0.03 if run is MEGATRON[-1] else 0.05


def strong_scaling(hardware: Hardware) -> Table:
    model = MEGATRON[0].model
    one = step_time(plan_of(model, 1), hardware).total
    return Table("Shoeybi et al. 2019, appendix D: strong scaling of 1.2B, times as fast", "", [
        Share(f"t = {t}", speedup, one / step_time(plan_of(model, t), hardware).total, 0.05)
        for t, speedup in STRONG_SCALING.items()])


def heads(hardware: Hardware) -> Table:
    one, largest = rate(plan_of(MEGATRON[0].model, 1), hardware), MEGATRON[-1]
    return Table("Shoeybi et al. 2019, appendix D: heads of the 8.3B model", "%", [
        Row(f"{a} heads", efficiency, rate(plan_of(largest._replace(a=a).model, largest.t), hardware) / one, 0.03)
        for a, efficiency in HEADS.items()])


# ---- Narayanan et al. 2021 ------------------------------------------------------------------------------------------


def end_to_end(hardware: Hardware) -> Table:
    rows = []
    for run in PTD_P:
        plan = fastest(run, hardware)
        v = plan.parallel.virtual_pipeline_size or 1
        name = f"{run.billions}B, t {run.t}, p {run.p}, n {run.gpus} (b {plan.b}, v {v})"
        rows.append(Share(name, run.teraflops, rate(plan, hardware) / 1e12, 0.10))
    return Table("Narayanan et al. 2021, table 1: TFLOP/s of a GPU", "", rows)


def fastest(run: PublishedRun, hardware: Hardware) -> Plan:
    """Return the fastest of the b and v with which it fits into memory."""
    fitting = [plan for plan in plans(run) if sum(plan.memory) <= hardware.memory - hardware.reserved]
    return min(fitting, key=lambda plan: step_time(plan, hardware, closed_form=True).total)


def plans(run: PublishedRun) -> Iterator[Plan]:
    """List plans with b from 1 to 16; v = 1 is 1F1B, more the interleaved schedule, which the paper used."""
    d = run.parallel.data_parallel_size
    for b in (b for b in (1, 2, 4, 8, 16) if run.B % (d * b) == 0):
        m = run.B // (d * b)
        for v in divisors(run.L // run.p) if run.p > 1 and m % run.p == 0 and run.L % run.p == 0 else [1]:
            yield Plan(run.model, ParallelConfig(run.t, run.p, d, "1f1b" if v == 1 else "interleaved",
                                                 None if v == 1 else v, recompute=FULL), m, b)


def beside_zero_3(hardware: Hardware) -> Table:
    """Compare PTD-P's rows of table 2, by the v that makes a step fastest: the paper does not print it."""
    rows = [compared(run, (Plan(run.model, ParallelConfig(
        run.t, run.p, d, "1f1b" if v == 1 else "interleaved", None if v == 1 else v, recompute=FULL), run.B // d, run.b)
        for v in divisors(run.L // run.p) if run.B // d % run.p == 0), hardware, 0.06)
        for run in TABLE_2 if run.t > 1 for d in [run.gpus // (run.t * run.p)]]
    return Table("Narayanan et al. 2021, table 2: TFLOP/s of a GPU, PTD-P (not used for the profile)", "", rows)


def zero_3(hardware: Hardware) -> Table:
    rows = sharded_rows("174.6", hardware, 0.03)
    return Table("Narayanan et al. 2021, table 2: ZeRO-3 alone, 174.6B (sets two numbers of the profile)", "", rows)


def zero_3_larger(hardware: Hardware) -> Table:
    rows = sharded_rows("529.6", hardware, 0.12)
    return Table("Narayanan et al. 2021, table 2: ZeRO-3 alone, 529.6B (not used for the profile)", "", rows)


def sharded_rows(billions: str, hardware: Hardware, allowed: float) -> list[Row]:
    """Compare the rows without model parallelism: one microbatch for each of n replicas."""
    return [compared(run, [Plan(run.model, ParallelConfig(1, 1, run.gpus, zero_stage=3, recompute=FULL), 1, run.b)],
                     hardware, allowed) for run in TABLE_2 if run.t == 1 and run.billions == billions]


def compared(run: Compared, possible: Iterable[Plan], hardware: Hardware, allowed: float) -> Row:
    found = max(rate(plan, hardware) for plan in possible)
    return Share(f"{run.billions}B, n {run.gpus}, b {run.b}", run.teraflops, found / 1e12, allowed)


# ---- Korthikanti et al. 2022 ----------------------------------------------------------------------------------------


def recomputing(run: Recomputed, recompute: str, sequence_parallel: bool) -> Plan:
    return Plan(run.model, ParallelConfig(8, run.p, 1, "interleaved" if run.v else "1f1b", run.v,
                                          sequence_parallel=sequence_parallel, recompute=Recompute(recompute)),
                run.B // run.b, run.b)


def saving(recompute: str, sequence_parallel: bool) -> str:
    return recompute + ", sequence parallel" * sequence_parallel


def layer_overheads(hardware: Hardware) -> Table:
    def seconds(recompute: str, sequence_parallel: bool) -> float:
        return layer(sizes_of(recomputing(KORTHIKANTI[0], recompute, sequence_parallel)), hardware).total.total

    plain = seconds("none", False)
    return Table("Korthikanti et al. 2022, table 4: what recompute adds to a layer of the 22B model", "%", [
        Row(saving(recompute, sequence), overhead, seconds(recompute, sequence) / plain - 1, 0.03)
        for (recompute, sequence), overhead in OVERHEAD.items()])


def iterations(hardware: Hardware) -> Table:
    rows = []
    for run in KORTHIKANTI:
        for published, recompute, sequence in ((run.full, "full", False), (run.selective, "selective", True)):
            found = step_time(recomputing(run, recompute, sequence), hardware).total
            rows.append(Share(f"{run.billions}B, {saving(recompute, sequence)}", published, found, 0.10))
    return Table("Korthikanti et al. 2022, table 5: seconds of an iteration", "", rows)


# ---- Rajbhandari et al. 2020 ----------------------------------------------------------------------------------------


def zero_memory(stage: int) -> Table:
    return Table(f"Rajbhandari et al. 2020, table 1: GB a device, 7.5B parameters, stage {stage}", "", [
        Share(f"d = {d}", published, sum(model_states(7_500_000_000, d, stage)) / 1e9, 0.03)
        for d, published in ZERO[stage].items()])


if __name__ == "__main__":
    run_alone(main)
