"""The command that trains by a plan, to be copied."""
import shlex

from mpi_impl.training.presets import PRESETS
from reference.plans import Plan


def launch_line(plan: Plan, preset: str | None, hosts: bool) -> str:
    """`hosts`: whether it takes several servers, whose names are in a file."""
    ranks = plan.parallel.world_size
    start = ["python", "-m", "mpi_impl.launch", "-n", str(ranks), *(["--hostfile", "hosts"] if hosts else [])]
    program = ["-m", f"mpi_impl.pretrain_{plan.model.architecture}"]
    groups = [start, program, model_options(plan, preset), plan_options(plan, preset)]
    return " \\\n    ".join(shlex.join(words) for words in groups)


def model_options(plan: Plan, preset: str | None) -> list[str]:
    c = plan.model
    if preset:
        return ["--preset", preset, "--device", "cuda"]
    sizes = {"num-layers": c.num_layers, "hidden-size": c.hidden_size, "num-attention-heads": c.num_attention_heads,
             "seq-length": c.max_position_embeddings}
    return [*words_of(sizes), "--bf16", "--device", "cuda"]


def plan_options(plan: Plan, preset: str | None) -> list[str]:
    """Those of the plan, where they are not the program's own defaults, or the preset's."""
    p = plan.parallel
    sizes = {"tensor-model-parallel-size": p.tensor_model_parallel_size,
             "pipeline-model-parallel-size": p.pipeline_model_parallel_size, "micro-batch-size": plan.b,
             "global-batch-size": plan.m * plan.b * p.data_parallel_size}
    if p.virtual_pipeline_size:
        stages = p.pipeline_model_parallel_size * p.virtual_pipeline_size
        sizes["num-layers-per-virtual-pipeline-stage"] = plan.model.num_layers // stages
    if p.zero_stage:
        sizes["zero-stage"] = p.zero_stage
    default = PRESETS[plan.model.architecture][preset].get("recompute_granularity", "none") if preset else "none"
    found = words_of(sizes) + (["--sequence-parallel"] if p.sequence_parallel else [])
    if p.recompute.granularity != default:
        found += ["--recompute-granularity", p.recompute.granularity]
    return found


def words_of(options: dict[str, int]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
