"""The placement of layers: each is on one rank, in order, and no rank has many more than another."""
from hypothesis import given, strategies as st

from reference.config import ModelConfig, ParallelConfig
from reference.parallel.stages import edges_between_ranks, layers_of_stage
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


@given(st.integers(2, 8), st.integers(1, 4))
def test_edges(p, v):
    """p - 1 in a row; p v - 1 interleaved, v times as many for 1/v of the bubble; in a V, where the turn costs nothing,
    2 (p - 1). A rank alone sends to nobody."""
    def count(p, name, chunks=None):
        parallel = ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name, virtual_pipeline_size=chunks)
        return edges_between_ranks(ModelConfig(64, 4, 1, 10, 4), parallel)

    assert [count(p, name) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")] == [p - 1] * 4
    assert count(p, "interleaved", v) == p * v - 1
    assert count(p, "zb-v") == count(p, "dualpipe-v") == 2 * (p - 1)
    assert count(1, "interleaved", v) == count(1, "zb-v") == count(1, "1f1b") == 0
