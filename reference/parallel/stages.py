"""The stages of each pipeline rank, and their layers."""
from reference.config import ModelConfig, ParallelConfig
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.parallel.layout import Layout
from reference.schedules.actions import Schedule
from reference.schedules.generators import make


def schedule_of(parallel: ParallelConfig, m: int) -> Schedule:
    """Return the configured schedule for m microbatches. Raise UserError if it does not take that number."""
    return make(parallel.pipeline_schedule, parallel.pipeline_model_parallel_size, m,
                parallel.virtual_pipeline_size)


def stages_of_ranks(c: ModelConfig, parallel: ParallelConfig) -> list[dict[int, range]]:
    """Return, for each pipeline rank, its stages and their layers. Raise UserError if there are too few layers."""
    p = parallel.pipeline_model_parallel_size
    fewest = p if parallel.pipeline_schedule == "interleaved" else 1
    placement = schedule_of(parallel, m=fewest).placement()      # any m gives the same
    stages = sum(map(len, placement))
    if stages > c.num_layers:
        fewer = ("" if stages == p else ", a schedule with one stage on each rank"
                 if parallel.virtual_pipeline_size is None else
                 ", a larger --num-layers-per-virtual-pipeline-stage")
        raise UserError(f"--num-layers is {c.num_layers}, but the {parallel.pipeline_schedule} schedule has {stages} "
                        f"stages, {stages // p} on each of --pipeline-model-parallel-size {p} ranks, and every stage "
                        f"needs a layer. Choose more layers{fewer}, or a smaller --pipeline-model-parallel-size.")
    return [{stage: layers_of_stage(stage, stages, c.num_layers) for stage in held} for held in placement]


def layers_of_stage(stage: int, stages: int, num_layers: int) -> range:
    """Return the contiguous layers of a stage. The first stages get one layer more if the number does not divide.

    (The last stage also computes the logits, so it gets no extra layer.)
    """
    each, more = divmod(num_layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def layers_of_rank(stages: dict[int, range]) -> list[int]:
    """Return all layers of a rank's stages, ascending."""
    return [layer for stage in sorted(stages) for layer in stages[stage]]


def layouts_of_ranks(c: ModelConfig, parallel: ParallelConfig) -> list[Layout]:
    """Return the flat buffers of a pipeline's ranks."""
    return [layout_of(model_tensors(c, layers_of_rank(stages)), parallel) for stages in stages_of_ranks(c, parallel)]


def layout_of(tensors, parallel: ParallelConfig) -> Layout:
    """Return the flat buffer of a rank that holds its shards of these tensors."""
    return Layout(tensors, parallel.tensor_model_parallel_size, parallel.bucket_size, parallel.shards,
                  parallel.expert_model_parallel_size, parallel.whole_matrices)


def edges_between_ranks(c: ModelConfig, p: ParallelConfig) -> int:
    """Count the edges between ranks: p v - 1 if no two neighbouring stages are on the same rank."""
    rank_of = {stage: r for r, stages in enumerate(stages_of_ranks(c, p)) for stage in stages}
    return sum(rank_of[stage] != rank_of[stage + 1] for stage in range(len(rank_of) - 1))
