"""Formulas for what is sent: the papers' statements. That the ranks send this: tests/mpi_impl/test_training.py."""
from dataclasses import replace

import pytest
from hypothesis import assume, given, strategies as st

from reference.config import ModelConfig, ParallelConfig
from reference.costs.parameters import parameters_of_stage
from reference.costs.traffic import PassCounts, edges, layouts_of_ranks, traffic
from reference.costs.volumes import pipeline_traffic, tensor_parallel_traffic
from reference.parallel.stages import layers_of_rank, schedule_of, stages_of_ranks
from reference.schedules.actions import Send, lower
from tests.reference.test_stages import pipelines

COUNT, SIZE = st.integers(0, 5), st.integers(1, 8)


@st.composite
def runs(draw):
    """Draw a model on a pipeline, and the sizes of a run."""
    t, parallel = draw(st.integers(1, 4)), draw(pipelines())
    stages = schedule_of(parallel, parallel.pipeline_model_parallel_size).stages
    model = ModelConfig(stages + draw(st.integers(0, 3)), 4 * t, t, draw(st.integers(1, 50)), 8,
                        untie_embeddings_and_output_weights=draw(st.booleans()),
                        position_embedding_type=draw(st.sampled_from(["rope", "learned_absolute"])),
                        make_vocab_size_divisible_by=draw(st.integers(1, 5)))
    parallel = replace(parallel, tensor_model_parallel_size=t, ddp_bucket_size=draw(st.integers(1, 1000)),
                       scatter_gather_tensors_in_pipeline=draw(st.booleans()))
    steps, m = draw(st.integers(1, 3)), parallel.pipeline_model_parallel_size * draw(st.integers(1, 3))
    return model, parallel, draw(SIZE), draw(SIZE), PassCounts(steps, steps * m, draw(COUNT), draw(COUNT))


def elements(lines, **like):
    return sum(line.elements for line in lines if all(getattr(line, field) == value for field, value in like.items()))


@given(runs())
def test_a_pipeline_sends_what_its_schedule_lowers_to(run):
    """Each Send has a message of b s h elements, or of 1/t of that from each of t ranks where they are scattered."""
    model, parallel, b, s, work = run
    m = work.microbatches // work.steps
    sends = [step for steps in lower(schedule_of(parallel, m)) for step in steps if isinstance(step, Send)]
    lines = [line for line in traffic(*run) if line.operation == "send" and line.phase != "evaluation"]
    assert sum(line.calls for line in lines) == work.steps * len(sends)
    t = parallel.tensor_model_parallel_size if parallel.scatter_gather_tensors_in_pipeline else 1
    assert all(line.elements == line.calls * pipeline_traffic(b, s, model.hidden_size, t) for line in lines)
    forward, backward = (elements(lines, phase=phase) for phase in ("forward", "backward"))
    assert forward == backward


@given(st.integers(2, 8), st.integers(1, 4))
def test_edges(p, v):
    """p - 1 in a row; p v - 1 interleaved, v times as many for 1/v of the bubble; in a V, where the turn costs nothing,
    2 (p - 1). A rank alone sends to nobody."""
    def count(p, name, chunks=None):
        parallel = ParallelConfig(pipeline_model_parallel_size=p, pipeline_schedule=name, virtual_pipeline_size=chunks)
        return edges(ModelConfig(64, 4, 1, 10, 4), parallel)

    assert [count(p, name) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")] == [p - 1] * 4
    assert count(p, "interleaved", v) == p * v - 1
    assert count(p, "zb-v") == count(p, "dualpipe-v") == 2 * (p - 1)
    assert count(1, "interleaved", v) == count(1, "zb-v") == count(1, "1f1b") == 0


@given(runs())
def test_scatter_and_gather_divide_by_t(run):
    """Ranks send 1/t between stages, and gather on the faster links as much as they would have sent."""
    model, parallel, *sizes = run
    t = parallel.tensor_model_parallel_size
    scattered, whole = (traffic(model, replace(parallel, scatter_gather_tensors_in_pipeline=scatter), *sizes)
                        for scatter in (True, False))
    for phase in ("forward", "backward", "evaluation"):
        sent = elements(whole, operation="send", phase=phase)
        assert t * elements(scattered, operation="send", phase=phase) == sent
        assert elements(scattered, operation="all_gather", phase=phase) == (sent if t > 1 else 0)
        assert elements(whole, operation="all_gather") == 0


@given(runs())
def test_a_layer_costs_what_the_paper_says(run):
    """8 b s h (t - 1)/t elements of a ring, a layer and microbatch (1909.08053, section 3), wherever the layer is."""
    model, parallel, b, s, work = run
    t = parallel.tensor_model_parallel_size
    layers = sum(elements(traffic(*run), group="tensor", phase=phase, reason=f"{branch} {end}")
                 for phase, end in (("forward", "output"), ("backward", "input")) for branch in ("attention", "mlp"))
    each = tensor_parallel_traffic(b, s, model.hidden_size, t)
    assert 2 * (t - 1) / t * layers == pytest.approx(each * model.num_layers * work.microbatches)


@given(runs())
def test_gradients_are_summed_once(run):
    """A step sums every parameter that a rank holds, whatever the buckets; an evaluation sums none."""
    model, parallel, _, _, work = run
    held = [parameters_of_stage(model, parallel.tensor_model_parallel_size, layers_of_rank(stages))
            for stages in stages_of_ranks(model, parallel)]
    assert [layout.size for layout in layouts_of_ranks(model, parallel)] == held
    assert elements(traffic(*run), reason="gradients") == work.steps * sum(held)


@given(runs())
def test_two_copies_of_a_tied_table_are_summed(run):
    """The first and the last rank of a pipeline sum them, if they are two and the logits read the embedding's table."""
    model, parallel, _, _, work = run
    first, last = (next(r for r, held in enumerate(stages_of_ranks(model, parallel)) if layer in layers_of_rank(held))
                   for layer in (0, model.num_layers - 1))
    two = first != last and not model.untie_embeddings_and_output_weights
    t = parallel.tensor_model_parallel_size
    words = model.padded_vocab_size(t) // t * model.hidden_size
    assert elements(traffic(*run), reason="tied embedding") == (2 * work.steps * words if two else 0)


@pytest.mark.parametrize("stage", range(4))
def test_a_skipped_step_publishes_no_parameters(stage):
    """With ZeRO-1 and 2 the replicas gather the updated parameters; all other messages of a step come before."""
    model, parallel = ModelConfig(2, 4, 1, 11, 4), ParallelConfig(1, 2, 2, zero_stage=stage)
    all_move, three_move = (traffic(model, parallel, 1, 4, PassCounts(5, 10, 0, 0, skipped)) for skipped in (0, 2))
    published = [line for line in all_move if (line.phase, line.reason) == ("optimizer", "parameters")]
    assert [line.calls > 0 for line in published] == [True] * (stage in (1, 2))
    assert three_move == [line._replace(calls=line.calls * 3 // 5, elements=line.elements * 3 // 5)
                          if line in published else line for line in all_move]


@given(runs())
def test_more_work_is_more_of_the_same(run):
    """Calls and elements are proportional to steps and microbatches; nothing is sent for nothing."""
    model, parallel, b, s, work = run
    twice = traffic(model, parallel, b, s, PassCounts(*(2 * count for count in work)))
    for line, double in zip(traffic(*run), twice, strict=True):
        assert double == line._replace(calls=2 * line.calls, elements=2 * line.elements)
    assume(work.evaluation_microbatches)
    none = traffic(model, parallel, b, s, work._replace(evaluations=0, evaluation_microbatches=0))
    assert elements(none, phase="evaluation") == 0 < elements(traffic(*run), phase="evaluation")
