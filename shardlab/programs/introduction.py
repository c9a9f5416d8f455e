"""The description of a training run before its first step."""
from mpi_impl.comm.hosts import Hosts
from mpi_impl.comm.mpi_library import library
from reference.config import ModelConfig, ParallelConfig
from reference.costs.parameters import parameters
from reference.parallel.stages import layouts_of_ranks, stages_of_ranks
from shardlab.programs.options import NAMES
from shardlab.programs.settings import PretrainingSettings


def introduction(settings: PretrainingSettings, model: ModelConfig, hosts: Hosts) -> str:
    """Describe how the ranks share the work, their hosts, how they save memory, and the model."""
    p, t = settings.parallel, settings.parallel.tensor_model_parallel_size
    sizes = [layout.size for layout in layouts_of_ranks(model, p)]
    held = f"{sizes[0]:,} on each rank" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,} on a rank"
    placed = f"{hosts.describe(t)}\n" if hosts.several else ""
    return (f"{p.world_size} ranks ({library()}): tensor parallel {t}{contexts(p)}{pipelining(p, model)} x "
            f"data parallel {p.data_parallel_size}; a step is {settings.microbatches} x "
            f"{settings.args.micro_batch_size} samples on each replica\n{placed}"
            f"{saving(p, settings.precision.half, settings.args.offload_folder)}"
            f"{NAMES[model.architecture]} of {parameters(model):,} parameters, {held}; vocabulary "
            f"{model.vocab_size:,}, padded to {model.padded_vocab_size(t):,}; {settings.precision.compute}"
            f"{slow_attention(settings, model)}")


def contexts(p: ParallelConfig) -> str:
    """Describe how the positions of a sample are dealt out."""
    return f" x context parallel {p.context_parallel_size} ({p.cp_comm_type})" if p.context_parallel_size > 1 else ""


def pipelining(p: ParallelConfig, model: ModelConfig) -> str:
    """Describe a pipeline: its schedule, and the numbers of layers of its stages, in order."""
    if p.pipeline_model_parallel_size == 1:
        return ""
    layers = {stage: len(held) for stages in stages_of_ranks(model, p) for stage, held in stages.items()}
    return (f" x pipeline parallel {p.pipeline_model_parallel_size} ({p.pipeline_schedule}; layers of the stages: "
            f"{' '.join(str(layers[stage]) for stage in sorted(layers))})")


def slow_attention(settings: PretrainingSettings, model: ModelConfig) -> str:
    """Say that dropout keeps cuDNN from computing attention on a GPU (kernels/cuda/flash.py)."""
    if settings.args.device == "cpu" or not settings.precision.half or not model.attention_dropout:
        return ""
    return (f"\nattention drops probabilities (--attention-dropout {model.attention_dropout:g}), and cuDNN would drop "
            "others: so attention is by slower kernels; with 0 it is cuDNN's")


def saving(p: ParallelConfig, half: bool, offload_folder: str | None) -> str:
    """Describe the ways in which a rank saves memory, and their cost."""
    found = []
    if p.sequence_parallel:
        found.append("sequence parallel (the gathered inputs are " + (
            "kept: 8 b s h (t-1)/t elements a layer)" if p.keep_gathered_inputs else
            "gathered again in the backward: 10 b s h (t-1)/t elements a layer)"))
    if p.zero_stage:
        sharded = ", ".join(("optimizer states", "gradients", "parameters")[:p.zero_stage])
        owners = f"the replicas shard {sharded}" if p.replicas > 1 else "one replica owns all"
        if p.num_distributed_optimizer_instances > 1:
            owners = (f"in {p.num_distributed_optimizer_instances} instances of {p.instance_size} replicas, each "
                      f"of which shards {sharded}")
        place = f"; shards in {offload_folder or 'host memory'}" if p.cpu_offload else ""
        found.append(f"ZeRO-{p.zero_stage} ({owners}{place})")
    if p.recompute.selective:
        found.append("attention's core recomputed" + (", as it is in 16 bits anyway" if half else ""))
    if p.recompute.granularity == "full":
        found.append(f"layers recomputed ({p.recompute.method}, {p.recompute.num_layers})")
    return "; ".join(found) + "\n" if found else ""
