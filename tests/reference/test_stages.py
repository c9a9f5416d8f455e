"""The placement of layers: each is on one rank, in order, and no rank has many more than another."""
from hypothesis import given, strategies as st

from reference.config import ModelConfig, ParallelConfig
from reference.parallel.stages import layers_of_stage
from reference.schedules.generators import SCHEDULES

TRAINING = [name for name in SCHEDULES if name != "forward-only"]


def model(layers):
    return ModelConfig(layers, 4, 1, 10, 4)


@st.composite
def pipelines(draw, most=8):
    name = draw(st.sampled_from(TRAINING))
    return ParallelConfig(pipeline_model_parallel_size=draw(st.integers(1, most)), pipeline_schedule=name,
                          virtual_pipeline_size=draw(st.integers(1, 3)) if name == "interleaved" else None)


@given(st.integers(1, 30), st.integers(0, 60))
def test_stages_divide_the_layers_evenly(stages, more):
    """Each layer is in one stage, in order; sizes differ by one at most, and the earlier ones are the larger."""
    layers = stages + more
    found = [layers_of_stage(stage, stages, layers) for stage in range(stages)]
    assert [layer for held in found for layer in held] == list(range(layers))
    sizes = [len(held) for held in found]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
