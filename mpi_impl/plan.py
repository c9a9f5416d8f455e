"""How to share a model out over a cluster, before a single GPU-hour is spent:

    python -m mpi_impl.plan --num-gpus 512 --preset gpt2-8.3b --global-batch-size 512 --hardware dgx-2h

All ways are looked at, those that do not fit into memory are dropped, and the others ranked by how long a step takes.
Formulas alone: one process, no ranks. How near they come to what was measured: mpi_impl/experiments/scaling_study.py
for the papers' clusters, benchmarks/predict.py for the machine at hand.
"""
import argparse
from collections.abc import Sequence

from mpi_impl.launching.entry import ArgumentParser, run_alone
from mpi_impl.planning import profiles
from mpi_impl.planning.candidates import PLAYED, PlanSearch, Timed, check
from mpi_impl.planning.launch_line import launch_line
from mpi_impl.planning.reasons import reasons
from mpi_impl.programs.presets import PRESETS
from mpi_impl.runtime.outputs import check_outputs
from mpi_impl.runtime.tables import aligned
from reference.config import ARCHITECTURES, ModelConfig, option
from reference.costs.flops import utilization
from reference.costs.parameters import parameters
from reference.costs.step_time import flops_of_step, flops_per_second
from reference.errors import UserError

SIZES = {"num_layers": "L", "hidden_size": "H", "num_attention_heads": "A", "seq_length": "S"}
VOCABULARY = {"gpt": 51_200, "bert": 30_592}     # padded, as in the papers


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    job = PlanSearch(model_of(args), args.num_gpus, args.global_batch_size, profiles.load(args.hardware))
    check(job)
    best = job.best[:args.best]
    print(f"{summary(job)}\n\n{table(job, best)}\n")
    print("\n".join(reasons(job)))
    print(f"\n{launch_line(best[0].plan, args.preset, job.hardware)}\n\n{corpus(job.model)}")
    if args.plot:
        draw(args.plot, job, best)


# ---- options --------------------------------------------------------------------------------------------------------


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="mpi_impl.plan", description="Find the fastest way to share a model out over GPUs.")
    p.add_argument("--num-gpus", type=int, required=True, metavar="N", help="or other devices, one for each rank")
    p.add_argument("--global-batch-size", type=int, required=True, metavar="B", help="samples of a step")
    p.add_argument("--hardware", default="dgx-a100", metavar="NAME",
                   help=f"{', '.join(profiles.known())}, or a file as benchmarks/calibrate.py writes it "
                        "(default: dgx-a100)")
    p.add_argument("--preset", choices=[name for models in PRESETS.values() for name in models],
                   help="a model of the first paper; or give the sizes:")
    for name, metavar in SIZES.items():
        p.add_argument(option(name), type=int, metavar=metavar)
    p.add_argument("--vocab-size", type=int, metavar="V", help="default: 51200, and 30592 for a BERT")
    p.add_argument("--best", type=int, default=6, metavar="N",
                   help=f"how many plans to show (default: 6; at most {PLAYED})")
    p.add_argument("--plot", metavar="FILE", help="draw their memory and their time")
    return p


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser().parse_args(argv)
    if not 1 <= args.best <= PLAYED:
        raise UserError(f"--best is {args.best}, but must be at least 1, and at most {PLAYED}.")
    check_outputs(args)
    return args


def model_of(args: argparse.Namespace) -> ModelConfig:
    """Return the model of the preset, or of the sizes, which come first. Raises UserError if one is missing."""
    architecture = next((one for one, models in PRESETS.items() if args.preset in models), "gpt")
    preset = PRESETS[architecture].get(args.preset, {})
    sizes: dict[str, int] = {name: preset[name] for name in SIZES if name in preset}
    sizes |= {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if missing := [name for name in SIZES if name not in sizes]:
        raise UserError(f"Which model? Without --preset it needs {', '.join(map(option, missing))}.")
    words = VOCABULARY[architecture] if args.vocab_size is None else args.vocab_size
    return ModelConfig(sizes["num_layers"], sizes["hidden_size"], sizes["num_attention_heads"], words,
                       sizes["seq_length"], architecture=architecture, heads=ARCHITECTURES[architecture][0])


# ---- what it says ---------------------------------------------------------------------------------------------------


def summary(job: PlanSearch) -> str:
    return (f"{size_of(job.model)} on {job.n:,} of {job.hardware.name}, {job.B:,} samples of "
            f"{job.model.max_position_embeddings:,} tokens a step\n"
            f"of {len(job.plans):,} plans {len(job.fitting):,} fit into the {job.memory / 1e9:,.0f} GB that a model "
            f"gets of a device; the fastest of each t x p x d:")


def size_of(model: ModelConfig) -> str:
    n = parameters(model)
    return f"{n / 1e9:,.2f} billion parameters" if n >= 1e8 else f"{n / 1e6:,.2f} million parameters"


def corpus(model: ModelConfig) -> str:
    return (f"Add --data-path, and your corpus's tokenizer: the plan counts on {model.vocab_size:,} tokens. Without "
            "them it trains on Python's own source.")


def table(job: PlanSearch, best: Sequence[Timed]) -> str:
    rows = [["t", "p", "d", "v", "b", "m", "ZeRO", "sequence", "recompute", "GB", "s/step", "idle", "TFLOP/s", "MFU"]]
    for one in best:
        p = one.plan.parallel
        rows.append([*map(str, one.shape), str(p.virtual_pipeline_size or 1), str(one.plan.b), str(one.plan.m),
                     str(p.zero_stage), "cut" if p.sequence_parallel else "whole", p.recompute.granularity,
                     gigabytes(sum(one.plan.memory)), f"{one.seconds:.3g}", f"{one.time.idle / one.seconds:.1%}",
                     f"{flops_per_second(one.plan, one.seconds) / 1e12:.3g}",
                     f"{utilization(flops_of_step(one.plan), one.seconds, job.n, job.hardware.peak):.1%}"])
    return aligned(rows, left=())


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.3f}"


def draw(path: str, job: PlanSearch, best: Sequence[Timed]) -> None:
    from mpi_impl.planning.picture import draw_plans  # matplotlib takes a second to import
    from mpi_impl.runtime.pictures import save

    title = f"{size_of(job.model)} on {job.n:,} of {job.hardware.name}, {job.B:,} samples a step"
    save(draw_plans(job, best, title), path)
    print(f"\nthe plans are drawn in {path}")


if __name__ == "__main__":
    run_alone(main)
