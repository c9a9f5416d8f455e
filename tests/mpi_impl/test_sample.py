"""Sampling from a trainer: its model's own text, by the seed, alike on every topology."""
from dataclasses import replace
from functools import partial

import pytest

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.programs.sample import TEMPERATURE, TOP_P, sample
from mpi_impl.training.trainer import Trainer
from reference.config import ExpertsConfig, ModelConfig, ParallelConfig
from reference.generation.decoding import Sampling, generate
from reference.optimizer import OptimizerConfig
from reference.precision import Precision
from reference.training import trainer as training
from tests.deep import every_other_deep, one_fast_of
from tests.training_theorems import connected

MODEL = ModelConfig(1, 16, 4, 5, 6, init_method_std=0.2, make_vocab_size_divisible_by=3)    # 5 words, padded


def sample_tokens(group, count, seed, t=1, p=1, schedule="1f1b", model=MODEL, **choices):
    chunks = 2 if schedule == "interleaved" else None
    config = ParallelConfig.for_world(group.size, t, p, pipeline_schedule=schedule, virtual_pipeline_size=chunks,
                                      **choices)
    with connected(group, config) as topology:
        trainer = Trainer(ModelState(model, topology, 1, Precision("float64")), OptimizerConfig(1e-2, 5))
        return sample(trainer, [2], count, seed)


@pytest.mark.parametrize("n, t, e, zero_stage", [(4, 1, 2, 0), (4, 2, 2, 3)])
def test_experts_that_are_dealt_out_say_the_same(ranks, n, t, e, zero_stage):
    """The replicas that share experts sample together."""
    model = replace(MODEL, experts=ExpertsConfig(4, 2, moe_ffn_hidden_size=8))
    whole = ranks.run(1, partial(sample_tokens, model=model), 6, 7)[0]
    several = partial(sample_tokens, model=model, expert_model_parallel_size=e, zero_stage=zero_stage)
    assert ranks.run(n, several, 6, 7, t) == [whole] * n


def test_the_ranks_agree_and_the_seed_decides(ranks):
    one = ranks.run(1, sample_tokens, 40, 7)[0]
    for n in (2, 4):
        assert ranks.run(n, sample_tokens, 40, 7, n) == [one] * n
    assert ranks.run(1, sample_tokens, 40, 8)[0] != one
    assert set(one) <= set(range(5)) and len(set(one)) > 1


@pytest.mark.parametrize("untied, t, p, schedule", one_fast_of(3, (
    (untied, *one) for untied in (False, True) for one in [
        (1, 3, "1f1b"), (2, 2, "gpipe"), (2, 4, "zb-h1"), (1, 2, "interleaved"), (2, 2, "interleaved"),
        (1, 3, "zb-v"), (2, 2, "dualpipe-v")])))
def test_a_pipeline_samples_what_one_rank_does(ranks, t, p, schedule, untied):
    """It does on one replica or two; the context grows, and then slides. With rope all stages know the positions."""
    model = replace(MODEL, num_layers=7, untie_embeddings_and_output_weights=untied,
                    position_embedding_type="rope" if untied else "learned_absolute")
    one = ranks.run(1, sample_tokens, 15, 7, 1, 1, "1f1b", model)[0]
    n = 2 * t * p if 2 * t * p <= 8 else t * p
    assert ranks.run(n, sample_tokens, 15, 7, t, p, schedule, model) == [one] * n and len(set(one)) > 1


@pytest.mark.parametrize("t, p, schedule, offload, stage", every_other_deep(
    (*place, offload, stage) for i, place in enumerate([(2, 1, "1f1b"), (2, 2, "1f1b"), (2, 2, "zb-v")])
    for offload in (False, True) for stage in ((1, 3) if (i + offload) % 2 else (3, 1))))
def test_samples_do_not_depend_on_what_a_rank_keeps(ranks, stage, offload, t, p, schedule):
    """A context has any number of positions: with sequence parallelism, too, sampling does not cut it."""
    model = replace(MODEL, num_layers=4)
    one = ranks.run(1, sample_tokens, 10, 7, 1, 1, "1f1b", model)[0]
    choices = dict(sequence_parallel=True, zero_stage=stage, cpu_offload=offload)
    assert ranks.run(2 * t * p, sample_tokens_with, choices, 10, 7, t, p, schedule, model) == [one] * (2 * t * p)


def sample_tokens_with(group, choices, *args):
    return sample_tokens(group, *args, **choices)


def test_the_text_is_the_textbooks(ranks):
    p = training.Trainer(MODEL, OptimizerConfig(1e-2, 5), 1, Precision("float64")).params
    sampling = Sampling(TEMPERATURE, top_p=TOP_P, seed=3)
    assert ranks.run(1, sample_tokens, 40, 3)[0] == generate([[2]], 40, p, MODEL, sampling)[0]
