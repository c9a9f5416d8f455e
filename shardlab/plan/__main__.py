"""The fastest way to shard a model over a cluster, found before a single GPU-hour is spent:

    python -m shardlab.plan --num-gpus 512 --preset gpt2-8.3b --global-batch-size 512 --hardware dgx-2h

It tries all plans, drops those that do not fit into memory, and ranks the others by the time of a step, by the papers'
formulas. A rank of each plan that is shown takes a step without data: its memory must suffice, too. One process.
shardlab/plan/scaling_study.py compares the formulas with measurements on the papers' clusters.
"""
import textwrap
from collections.abc import Sequence
from functools import cache, partial

from tqdm import tqdm

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.tables import aligned
from reference.config import ModelConfig, option
from reference.costs.flops import utilization
from reference.costs.operator_search import fastest_of_each_size, gpt_graph, megatron_choices, sums
from reference.costs.parameters import parameters
from reference.costs.step_time import flops_of_step, flops_per_second
from reference.errors import UserError
from shardlab.plan import profiles
from shardlab.plan.candidates import PlanSearch, Timed, check, shape_words
from shardlab.plan.confirmation import predicted_bytes
from shardlab.plan.launch_line import WIDTH, launch_line
from shardlab.plan.options import PlanOptions, model_of, parse
from shardlab.plan.reasons import reasons

SILENCE = 5.0       # seconds before a bar appears, and between its changes
LETTERS = {"t": "ranks that share each layer", "p": "stages of the pipeline", "d": "replicas",
           "c": "ranks that share a sequence", "e": "ranks that share the experts", "v": "stages on a rank",
           "b": "samples in a microbatch", "m": "microbatches in a step", "ZeRO": "its stage",
           "sequence": "split or whole, outside the sharded regions", "recompute": "what a backward computes again",
           "GB": "on a device, by the papers' formulas with our bytes an element",
           "predicted": "the same, by a step without data",
           "idle": "waiting in the pipeline", "MFU": "share of the peak that the model's own FLOPs reach"}
RULES = "Narayanan et al. 2021 (arXiv 2104.04473, section 3) give three rules:"


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    args = PlanOptions(**given)
    job = PlanSearch(model_of(given), args.num_gpus, args.global_batch_size, profiles.load(args.hardware),
                     partial(tqdm, delay=SILENCE, mininterval=SILENCE, leave=False), cache(predicted_bytes), args.best)
    if args.operators:
        if others := [option(name) for name in ("best", "plot") if name in given]:
            raise UserError(f"--operators prints one table, and draws nothing: leave {' and '.join(others)} out.")
        print(operators_text(job))
        return
    check(job)
    best = job.best
    print(f"{summary(job)}\n\n{table(job, best)}\n\n{legend(job, best)}\n\n{RULES}")
    print("\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in reasons(job)))
    print(f"\n{launch_line(best[0].plan, args.preset, job.hardware)}\n\n{corpus(job.model)}")
    if args.plot:
        draw(args.plot, job, best)


# ---- output ---------------------------------------------------------------------------------------------------------


def summary(job: PlanSearch) -> str:
    return (f"{size_of(job.model)} on {job.n:,} of {job.hardware.name}, {job.B:,} samples of "
            f"{job.model.max_position_embeddings:,} tokens a step\n"
            f"of {len(job.plans):,} plans {len(job.fitting):,} fit into the {job.memory / 1e9:,.0f} GB that a model "
            f"gets of a device; the fastest of each {shape_words(job.model)}:")


def size_of(model: ModelConfig) -> str:
    n = parameters(model)
    return f"{n / 1e9:,.2f} billion parameters" if n >= 1e8 else f"{n / 1e6:,.2f} million parameters"


def corpus(model: ModelConfig) -> str:
    return textwrap.fill(f"Add --data-path, and your corpus's tokenizer: the plan counts on {model.vocab_size:,} "
                         "tokens. Without them it trains on Python's own source.", WIDTH)


def table(job: PlanSearch, best: Sequence[Timed]) -> str:
    contexts, experts = any(one.shape[3] > 1 for one in best), job.model.experts is not None
    rows = [["t", "p", "d", *["c"] * contexts, *["e"] * experts, "v", "b", "m", "ZeRO", "sequence", "recompute", "GB",
             "predicted", "s/step", "idle", "TFLOP/s", "MFU"]]
    for one in best:
        p, sizes = one.plan.parallel, (sum(job.needs(one.plan)), job.predict(one.plan, job.hardware))
        rows.append([*map(str, one.shape[:3 + contexts]), *[str(p.expert_model_parallel_size)] * experts,
                     str(p.virtual_pipeline_size or 1), str(one.plan.b), str(one.plan.m),
                     str(p.zero_stage), "split" if p.sequence_parallel else "whole", p.recompute.granularity,
                     *map(gigabytes, sizes), f"{one.seconds:.3g}", f"{one.time.idle / one.seconds:.1%}",
                     f"{flops_per_second(one.plan, one.seconds) / 1e12:.3g}",
                     f"{utilization(flops_of_step(one.plan), one.seconds, job.n, job.hardware.peak):.1%}"])
    return aligned(rows, left=())


def legend(job: PlanSearch, best: Sequence[Timed]) -> str:
    """Explain the letters that the table has."""
    shown = {"c": any(one.shape[3] > 1 for one in best), "e": job.model.experts is not None}
    return textwrap.fill("; ".join(f"{name}: {text}" for name, text in LETTERS.items() if shown.get(name, True)), WIDTH)


def operators_text(job: PlanSearch) -> str:
    """Return the fastest choices that fit, if any do, beside those of Megatron and of replicas, as far as sizes allow.

    Raises UserError unless the model is a GPT.
    """
    graph = gpt_graph(job.model, job.B, job.n, job.hardware)
    fastest = min(fastest_of_each_size(graph), key=lambda one: one.memory > job.memory)
    columns = [["", *graph.operators, "s/step", "GB"]]
    for title, choices in {"fastest": dict(fastest.choices), "Megatron's": megatron_choices(graph),
                           "replicas": dict.fromkeys(graph.operators, "s" * len(graph.axes))}.items():
        columns += [[title, *map(choices.__getitem__, graph.operators), f"{cost.seconds:.3g}", gigabytes(cost.memory)]
                    for cost in sums(graph.costs, choices)]
    return f"""{aligned(list(zip(*columns)), left=range(4))}

A letter for the devices of a server, and one for the servers: s samples, p positions, f features (of attention: heads),
c columns of a matrix, r its rows, . nothing is split. GB: parameters, gradients and optimizer states on a device, where
a model gets {job.memory / 1e9:,.0f}; activations are not counted."""


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.3f}"


def draw(path: str, job: PlanSearch, best: Sequence[Timed]) -> None:
    from mpi_impl.runtime.pictures import save
    from shardlab.plan.picture import draw_plans  # matplotlib takes a second to import

    title = f"{size_of(job.model)} on {job.n:,} of {job.hardware.name}, {job.B:,} samples a step"
    save(draw_plans(job, best, title), path)
    print(f"\nthe plans are drawn in {path}")


if __name__ == "__main__":
    run_alone(main)
