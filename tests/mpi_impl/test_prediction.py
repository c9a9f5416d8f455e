"""What a rank predicts of a run, by a few steps without data: it is what the papers' formulas say, where they do, and
what many steps would say. That ranks send it: test_training.py; and hold it: test_memory.py.
"""
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.comm.ledger import RING
from mpi_impl.comm.topology import Place, rank_at
from reference.config import RECOMPUTE, ModelConfig, ParallelConfig, Recompute
from reference.costs.memory import most_in_flight
from reference.costs.parameters import parameters_of_stage
from reference.costs.volumes import PassCounts, pipeline_traffic, tensor_parallel_traffic
from reference.parallel.stages import layers_of_rank, schedule_of, stages_of_ranks
from reference.precision import Precision
from reference.schedules.actions import Send, lower
from shardlab.predict.predict import layer_bytes, observe, predict, predict_alone, sent_by_pipeline
from shardlab.predict.rank import ImaginedWorld, imagine_rank
from tests.deep import one_fast_of
from tests.reference.test_stages import pipelines
from tests.reference.test_step_time import dealt_plans

COUNT, SIZE = st.integers(0, 5), st.integers(1, 4)
FEWER = settings(max_examples=max(5, settings().max_examples // 3))


@st.composite
def runs(draw):
    """Draw a model on a pipeline, and how often it is run."""
    t, parallel = draw(st.integers(1, 3)), draw(pipelines(most=4))
    p = parallel.pipeline_model_parallel_size
    stages = schedule_of(parallel, p).stages
    model = ModelConfig(stages + draw(st.integers(0, 2)), 4 * t, t, draw(st.integers(1, 50)), 8,
                        untie_embeddings_and_output_weights=draw(st.booleans()),
                        position_embedding_type=draw(st.sampled_from(["rope", "learned_absolute"])),
                        make_vocab_size_divisible_by=draw(st.integers(1, 5)))
    parallel = replace(parallel, tensor_model_parallel_size=t, ddp_bucket_size=draw(st.integers(1, 1000)),
                       scatter_gather_tensors_in_pipeline=draw(st.booleans()))
    steps, m = draw(st.integers(1, 3)), p * draw(st.integers(1, 3))
    evaluations = draw(COUNT)
    return (ImaginedWorld(model, parallel, Precision("float64"), draw(SIZE), draw(SIZE), m),
            PassCounts(steps, steps * m, evaluations, evaluations * m))


def sent(world, work) -> dict:
    return sent_by_pipeline(predict_alone(world), work)


def elements(totals, **like):
    return sum(total.elements for entry, total in totals.items()
               if all(getattr(entry, field) == value for field, value in like.items()))


@FEWER
@given(runs())
def test_what_is_sent_is_what_the_papers_say(run):
    """Each Send of the schedule has a message of b s h elements, or of 1/t of that from each of t ranks where they are
    scattered. A layer costs 8 b s h (t - 1)/t elements of a ring a microbatch (1909.08053, section 3), wherever it is.
    A step sums every parameter that a rank holds, whatever the buckets; and the first and the last rank of a pipeline
    their copies of a table, if they are two and the logits read the embedding's.
    """
    world, work = run
    model, parallel, t = world.model, world.parallel, world.parallel.tensor_model_parallel_size
    sizes, totals = (world.micro_batch_size, world.seq_length, model.hidden_size), sent(world, work)

    sends = [step for steps in lower(schedule_of(parallel, world.microbatches)) for step in steps
             if isinstance(step, Send)]
    found = {entry: total for entry, total in totals.items()
             if entry.operation == "send" and entry.phase != "evaluation"}
    assert sum(total.calls for total in found.values()) == work.steps * len(sends)
    each = pipeline_traffic(*sizes, t if parallel.scatter_gather_tensors_in_pipeline else 1)
    assert all(total.elements == total.calls * each for total in found.values())
    assert elements(found, phase="forward") == elements(found, phase="backward")

    layers = sum(elements(totals, group="tensor", phase=phase, reason=f"{branch} {end}")
                 for phase, end in (("forward", "output"), ("backward", "input")) for branch in ("attention", "mlp"))
    assert 2 * (t - 1) / t * layers == pytest.approx(
        tensor_parallel_traffic(*sizes, t) * model.num_layers * work.microbatches)

    placement = [layers_of_rank(stages) for stages in stages_of_ranks(model, parallel)]
    assert elements(totals, reason="gradients") == work.steps * sum(
        parameters_of_stage(model, t, layers) for layers in placement)
    first, last = (next(r for r, layers in enumerate(placement) if layer in layers)
                   for layer in (0, model.num_layers - 1))
    two = first != last and not model.untie_embeddings_and_output_weights
    words = model.padded_vocab_size(t) // t * model.hidden_size
    assert elements(totals, reason="tied embedding") == (2 * work.steps * words if two else 0)


@FEWER
@given(dealt_plans(experts=True), st.integers(1, 2), st.sampled_from(RECOMPUTE))
def test_keys_values_and_tokens_travel_as_the_formulas_say(plan, p, recompute):
    """Between ranks with other positions, in all three ways, and between those with other experts, if the routers
    choose evenly. Both groups also agree on numbers of tokens, which are few, and integers.
    """
    plan = replace(plan, w=4, parallel=replace(plan.parallel, pipeline_model_parallel_size=p,
                                               recompute=Recompute(recompute)))
    world = ImaginedWorld(plan.model, plan.parallel, Precision("float32"), plan.b, 32, plan.m)
    sent = observe(imagine_rank(world, 0)).step.items()
    for group, expected in plan.exchanges._asdict().items():
        assert expected == pytest.approx(sum(
            4 * RING[one.operation](total.elements, one.group_size) for one, total in sent
            if (one.group, one.dtype) == (group, "float32") and one.phase in ("forward", "recompute", "backward")))


@FEWER
@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_rank_holds_as_many_microbatches_as_the_papers_say(schedule, p, v, groups):
    """Of each stage's layers, all alike, in the ranks between the first and the last: what one microbatch leaves there,
    times the most in flight.
    """
    v, p = (v, max(p, 2)) if schedule == "interleaved" else (1, p)
    parallel = ParallelConfig(1, p + 2, 1, schedule, v if schedule == "interleaved" else None)
    m = groups * (p + 2)
    world = ImaginedWorld(ModelConfig((p + 2) * v, 4, 1, 11, 4), parallel, Precision("float32"), 1, 4, m)
    layer = layer_bytes(replace(world, parallel=ParallelConfig(), microbatches=1))
    for rank in range(1, p + 1):
        held = predict(world, rank).held
        assert held.activations == layer * most_in_flight(schedule, p + 2, m, rank, v)


@FEWER
@given(pipelines(most=4), st.integers(1, 6), st.integers(0, 3))
def test_many_microbatches_add_what_few_add(parallel, times, stage):
    """A prediction from two short steps is that of the whole step, for every schedule and stage of ZeRO."""
    p = parallel.pipeline_model_parallel_size
    parallel = replace(parallel, data_parallel_size=2, zero_stage=stage, ddp_bucket_size=50)
    model = ModelConfig(schedule_of(parallel, p).stages, 4, 1, 11, 4)
    world = ImaginedWorld(model, parallel, Precision("float32"), 1, 4, times * p)
    for rank in {rank_at(Place(0, 0, 0, at), parallel) for at in (0, p - 1)}:
        assert predict(world, rank) == observe(imagine_rank(world, rank))


@pytest.mark.parametrize("form, options", one_fast_of(2, [
    ("bfloat16", {}), ("float32", {"architecture": "bert", "heads": ("lm", "sop")})]))
def test_many_samples_add_what_few_add(form, options):
    """A microbatch of more than 64 samples."""
    parallel = ParallelConfig(2, 2, 2, zero_stage=1)
    world = ImaginedWorld(ModelConfig(3, 8, 2, 11, 4, **options), parallel, Precision(form), 70, 4, 3)
    for rank in (0, 4):     # of both stages
        assert predict(world, rank) == observe(imagine_rank(world, rank))
