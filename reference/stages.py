"""Which layers each rank of a pipeline holds, and as which stages."""
from reference.config import ModelConfig, ParallelConfig
from reference.errors import UserError
from reference.schedules import Schedule, make


def schedule_of(p: ParallelConfig, m: int) -> Schedule:
    """The schedule that the configuration asks for, for m microbatches. Raises UserError if it does not take them."""
    return make(p.pipeline_schedule, p.pipeline_model_parallel_size, m, p.chunks)


def stages_of_ranks(c: ModelConfig, p: ParallelConfig) -> list[dict[int, range]]:
    """For each rank of a pipeline its stages, and the layers of each. Raises UserError if there are too few layers."""
    placement = schedule_of(p, p.pipeline_model_parallel_size).placement()
    count = sum(map(len, placement))
    return [{stage: layers_of_stage(stage, count, c.num_layers) for stage in stages} for stages in placement]


def layers_of_stage(stage: int, stages: int, num_layers: int) -> range:
    """The contiguous layers of a stage. What does not divide goes to the first stages, one layer more for each.

    (The last stage has the logits to compute as well, which is why it is not given more.) Raises UserError if there
    are fewer layers than stages.
    """
    if num_layers < stages:
        raise UserError(f"The pipeline has {stages} stages, but --num-layers is {num_layers}: every stage needs a "
                        "layer. Choose more layers, a smaller --pipeline-model-parallel-size, or fewer stages on each "
                        "rank.")
    each, more = divmod(num_layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def layers_of_rank(stages: dict[int, range]) -> list[int]:
    """All layers of a rank's stages, ascending."""
    return [layer for stage in sorted(stages) for layer in stages[stage]]
