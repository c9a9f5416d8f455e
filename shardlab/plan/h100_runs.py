"""Published runs on H100s beside our formulas' predictions. No number of the profile dgx-h100 was set for them."""
from collections.abc import Iterator
from itertools import product

from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.hardware import Hardware
from reference.costs.plans import Plan
from reference.costs.published import FSDP, H100_PEAK, LLAMA_3, MEGATRON_CORE, TORCHTITAN, FullyShardedRun, LongRun
from reference.costs.step_time import flops_per_second, step_time
from shardlab.plan.candidates import divisors
from shardlab.plan.published import Row, Share, Table, fits, scheduled

SELECTIVE = Recompute("selective")      # fused attention keeps no scores

GPT_3 = ModelConfig(96, 12_288, 96, 131_072, 4096, hidden_dropout=0.0, attention_dropout=0.0)

LLAMA_8B = ModelConfig(32, 4096, 32, 128_256, 8192, "rope", untie_embeddings_and_output_weights=True,
                       hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", swiglu=True,
                       ffn_hidden_size=14_336, num_query_groups=8, add_bias_linear=False)


def h100_tables(hardware: Hardware) -> list[Table]:
    return [table(hardware) for table in (llama_3, megatron_core, fsdp_scaling)]


def rate(plan: Plan, hardware: Hardware) -> float:
    """Return the FLOP/s of a GPU, without recomputed work."""
    return flops_per_second(plan, step_time(plan, hardware).total)


# ---- Llama 3 405B ---------------------------------------------------------------------------------------------------


def llama_3(hardware: Hardware) -> Table:
    rows = [Share(f"n {run.gpus}, c {run.c}", run.teraflops,
                  max(rate(plan, hardware) for plan in plans_of_llama(run)) / 1e12, 0.10) for run in LLAMA_3]
    return Table("Meta 2024 (Llama 3), table 4: TFLOP/s of a GPU", "", rows)


def plans_of_llama(run: LongRun) -> Iterator[Plan]:
    """List plans of a row, which prints neither v nor b, for several v and b = 1."""
    for v in (1, 2, 4, 7):
        yield Plan(run.model, run.parallel(**scheduled(v), zero_stage=1, recompute=SELECTIVE), run.samples)


# ---- GPT-3 175B -----------------------------------------------------------------------------------------------------


def megatron_core(hardware: Hardware) -> Table:
    """Compare strong scaling of GPT-3 with B = 1152. The README prints no t, p or v: ours are the fastest that fit."""
    rows = []
    for n, of_peak in MEGATRON_CORE.items():
        found = max(rate(plan, hardware) for plan in plans_of_gpt_3(n) if fits(plan, hardware))
        rows.append(Share(f"n {n}", of_peak / 100, found / H100_PEAK, 0.10))
    return Table("Megatron-Core's README: share of the peak, GPT-3 175B", "%", rows)


def plans_of_gpt_3(n: int) -> Iterator[Plan]:
    """List plans with t = 4 or 8, b = 1, ZeRO-1 and interleaved stages."""
    for t, p in product((4, 8), (4, 6, 8, 12)):
        d, rest = divmod(n, t * p)
        for v in divisors(96 // p)[1:] if not rest and 1152 % (d * p) == 0 else ():
            yield Plan(GPT_3, ParallelConfig(t, p, d, **scheduled(v), zero_stage=1 if d > 1 else 0,
                                             sequence_parallel=True, recompute=SELECTIVE), 1152 // d)


# ---- FSDP -----------------------------------------------------------------------------------------------------------


def fsdp_scaling(hardware: Hardware) -> Table:
    """Compare the rate of a GPU with its rate among fewer, for models that are given on several numbers of them.

    Only runs with the same b and m are compared, and a model's fewest GPUs are 100 %.
    """
    rows: list[Row] = []
    runs = sorted(FSDP, key=lambda run: run.gpus)
    for run in runs:
        base = next(one for one in runs if (one.billions, one.b, one.m) == (run.billions, run.b, run.m))
        if base is not run:
            found = rate(plan_of_fsdp(run), hardware) / rate(plan_of_fsdp(base), hardware)
            rows.append(Row(f"{run.billions}B, n {run.gpus} to {base.gpus}", run.of_peak / base.of_peak, found, 0.03))
    few, many = TORCHTITAN
    plans = [Plan(LLAMA_8B, ParallelConfig(1, 1, n, zero_stage=3, recompute=SELECTIVE), 1, 2) for n in (many, few)]
    found = rate(plans[0], hardware) / rate(plans[1], hardware)
    rows += [Row(f"Llama 8B, n {many} to {few}, {how}", after / before, found, 0.03)
             for how, before, after in zip(("eager", "compiled"), TORCHTITAN[few], TORCHTITAN[many])]
    return Table("MosaicML and torchtitan: FSDP on more GPUs", "%", rows)


def plan_of_fsdp(run: FullyShardedRun) -> Plan:
    return Plan(run.model, ParallelConfig(1, 1, run.gpus, zero_stage=3,
                                          recompute=Recompute("full") if run.recompute else SELECTIVE), run.m, run.b)
