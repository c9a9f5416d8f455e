"""The command that trains by a plan, to be copied."""
import re
import shlex
import textwrap
from typing import Any

from mpi_impl.launch.option_fields import declared
from mpi_impl.runtime.advice import typed
from reference.config import ModelConfig, option
from reference.costs.hardware import Hardware
from reference.costs.plans import HALF, Plan
from shardlab.programs.options import OPTIONS
from shardlab.programs.presets import PRESETS

SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")      # that every model needs
WIDTH = 110     # characters of a line
NOT_PLANNED = ("vocab_size", "make_vocab_size_divisible_by")                    # the corpus's tokenizer decides


def launch_line(plan: Plan, preset: str | None, hardware: Hardware) -> str:
    """Return the command. A file names several servers; a profile in 16 bits is a GPU's."""
    ranks = plan.parallel.world_size
    hosts = ["--hostfile", "hosts"] if ranks > hardware.server else []
    start = [typed("python"), "-m", "mpi_impl.launch", "-n", str(ranks), *hosts]
    program = ["-m", f"mpi_impl.pretrain_{plan.model.architecture}"]
    gpu = hardware.element_bytes == HALF
    precision = [f"--{hardware.half}"] if gpu and not preset else []        # presets choose their own
    device = ["--device", "cuda"] if gpu else []
    groups = [start, program, model_options(plan, preset) + precision + device, plan_options(plan, preset)]
    return " \\\n    ".join(line for group in groups for line in wrapped(group))


def wrapped(words: list[str]) -> list[str]:
    """Return lines of words, none longer than WIDTH. No option is parted from its value."""
    glued = re.sub(" (?!-)", "\0", shlex.join(words))
    return [line.replace("\0", " ") for line in textwrap.wrap(glued, WIDTH, break_long_words=False,
                                                              break_on_hyphens=False)]


def model_options(plan: Plan, preset: str | None) -> list[str]:
    """Return the model's options: the sizes, and what differs from the program's defaults, or from the preset."""
    kind = OPTIONS[plan.model.architecture]
    known = {name: one.default for name, one in declared(kind).items()} | (
        PRESETS[plan.model.architecture][preset] if preset else dict.fromkeys(SIZES))
    found = {name: value for name, value in as_options(plan.model).items()
             if name in known and value != known[name] and value is not None and value is not False}
    if not preset:
        del found["max_position_embeddings"]        # the default is the sequence length
    return (["--preset", preset] if preset else []) + arguments(found)


def as_options(c: ModelConfig) -> dict[str, Any]:
    """Return a model's fields under the options' names."""
    found = {name: value for name, value in vars(c).items() if name not in NOT_PLANNED}
    return found | (vars(c.experts) if c.experts else {}) | {
        "seq_length": c.max_position_embeddings, "group_query_attention": c.num_query_groups is not None,
        "disable_bias_linear": not c.add_bias_linear}


def plan_options(plan: Plan, preset: str | None) -> list[str]:
    """Return the options without defaults, and those that differ from the program's defaults or the preset's."""
    p = plan.parallel
    sizes = {"tensor_model_parallel_size": p.tensor_model_parallel_size,
             "pipeline_model_parallel_size": p.pipeline_model_parallel_size, "micro_batch_size": plan.b,
             "global_batch_size": plan.m * plan.b * p.data_parallel_size}
    if p.virtual_pipeline_size:
        stages = p.pipeline_model_parallel_size * p.virtual_pipeline_size
        sizes["num_layers_per_virtual_pipeline_stage"] = plan.model.num_layers // stages
    if p.context_parallel_size > 1:
        sizes["context_parallel_size"] = p.context_parallel_size
    if p.expert_model_parallel_size > 1:
        sizes["expert_model_parallel_size"] = p.expert_model_parallel_size
    if p.zero_stage:
        sizes["zero_stage"] = p.zero_stage
    if p.num_distributed_optimizer_instances > 1:
        sizes["num_distributed_optimizer_instances"] = p.num_distributed_optimizer_instances
    default = PRESETS[plan.model.architecture][preset].get("recompute_granularity", "none") if preset else "none"
    found = arguments(sizes) + (["--sequence-parallel"] if p.sequence_parallel else [])
    if p.context_parallel_size > 1:
        found += ["--cp-comm-type", p.cp_comm_type]
    if p.recompute.granularity != default:
        found += ["--recompute-granularity", p.recompute.granularity]
    return found


def arguments(options: dict[str, Any]) -> list[str]:
    return [argument for name, value in options.items()
            for argument in ((option(name),) if value is True else (option(name), str(value)))]
