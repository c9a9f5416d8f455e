"""Descriptions of a topology in a few words, such as `t 2, p 2, d 2, zb-h1, ZeRO-2, sequence parallel`."""
from reference.config.parallel_config import ParallelConfig


def describe(p: ParallelConfig) -> str:
    """Describe a topology, its schedule, and how it saves memory."""
    schedule = p.pipeline_schedule if p.pipeline_model_parallel_size > 1 else ""
    return ", ".join(filter(None, [describe_sizes(p), schedule, describe_savings(p)]))


def describe_sizes(p: ParallelConfig) -> str:
    """Return `t 2, p 4, d 1`, and other sizes that are not 1."""
    always = {"t": p.tensor_model_parallel_size, "p": p.pipeline_model_parallel_size, "d": p.data_parallel_size}
    others = {"c": p.context_parallel_size, "e": p.expert_model_parallel_size, "v": p.virtual_pipeline_size or 1}
    found = always | {letter: size for letter, size in others.items() if size > 1}
    return ", ".join(f"{letter} {size}" + f" ({p.cp_comm_type})" * (letter == "c") for letter, size in found.items())


def describe_savings(p: ParallelConfig) -> str:
    """Return `ZeRO-1, sequence parallel, full recompute`; "" where everything is held."""
    instances = p.num_distributed_optimizer_instances
    found = {f"ZeRO-{p.zero_stage}" + f" in {instances} instances" * (instances > 1): p.zero_stage > 0,
             "offloaded": p.cpu_offload, "sequence parallel": p.sequence_parallel,
             f"{p.recompute.granularity} recompute": p.recompute.granularity != "none"}
    return ", ".join(words for words, there in found.items() if there)
