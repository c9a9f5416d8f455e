"""Plans and hardware for the tests of the planner and of the formulas under it."""
from dataclasses import replace

from hypothesis import strategies as st

from reference.config import RECOMPUTE, ModelConfig, ParallelConfig, Recompute
from reference.costs.hardware import Hardware, Link, Passes
from reference.costs.plans import Plan
from tests.strategies import instances

FREE = Link(latency=0.0, bandwidth=1e40)

# What is not a product takes no time: a test turns on the part that it is about.
IDEAL = Hardware("ideal", "", peak=1e12, memory=80e9, reserved=0.0, bandwidth=1e12, element_bytes=2,
                 efficiency=((1.0, 1.0),), attention=(1.0, 1.0),
                 passes=Passes((0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), optimizer=0.0,
                 overhead=(0.0, 0.0), server=8, inside=FREE, between=FREE)

# Everything takes some time, and a small model's share of each part is seen.
REAL = replace(IDEAL, name="real", efficiency=((8.0, 0.1), (64.0, 0.5), (512.0, 0.7)), attention=(0.4, 0.5),
               passes=Passes((9.0, 11.0), (8.0, 10.0), (4.0, 7.0), (3.0, 5.0), (8.0, 6.0)), optimizer=30.0,
               overhead=(2e-8, 3e-8), inside=Link(2e-8, 3e11), between=Link(5e-8, 2e11), server=4, hidden=0.2,
               jitter=0.03, memory=8e6, reserved=1e6)


def model_of(L: int, a: int = 4, head: int = 8, s: int = 16, V: int = 96) -> ModelConfig:
    """Return a GPT with V tokens; where t divides V, none are padded."""
    return ModelConfig(L, a * head, a, V, s, make_vocab_size_divisible_by=1)


@st.composite
def plans(draw, even: bool = False, most_m: int = 5):
    """Draw plans of a small GPT: any t, p, d, v, m and b. With `even`, all stages have the same number of layers."""
    t, p, d, b = (draw(st.sampled_from(some)) for some in ((1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2)))
    v = draw(st.sampled_from((None, 2, 3))) if p > 1 else None
    groups = draw(st.integers(1, most_m))
    m = groups * p if v else draw(st.integers(1, most_m * p))
    stages = p * (v or 1)
    L = stages * draw(st.integers(1, 2)) if even else draw(st.integers(stages, 2 * stages + 1))
    sharded = t > 1 and draw(st.booleans())
    stage = draw(st.integers(0, 3 if d > 1 else 0))
    parallel = ParallelConfig(
        t, p, d, "interleaved" if v else "1f1b", v, zero_stage=stage,
        num_distributed_optimizer_instances=draw(instances(d, stage)),
        sequence_parallel=sharded, keep_gathered_inputs=sharded and draw(st.booleans()),
        scatter_gather_tensors_in_pipeline=sharded or draw(st.booleans()),
        recompute=Recompute(draw(st.sampled_from(RECOMPUTE))))
    return Plan(model_of(L, draw(st.sampled_from((4, 8))), draw(st.sampled_from((4, 32)))), parallel, m, b)
