"""Sampling from a trainer: its model's own text, by the seed, identical on every topology."""
from dataclasses import replace

import pytest

from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ExpertsConfig, ModelConfig, ParallelConfig
from reference.generation.decoding import Sampling, generate
from reference.optimizers.adam import OptimizerConfig
from reference.precision import Precision
from reference.training import trainer as training
from shardlab.programs.sample import TEMPERATURE, TOP_P, sample
from tests.training_theorems import connected

MODEL = ModelConfig(7, 16, 4, 5, 6, init_method_std=0.2, make_vocab_size_divisible_by=3)    # 5 words, padded
ROPE = replace(MODEL, untie_embeddings_and_output_weights=True, position_embedding_type="rope")
EXPERTS = replace(MODEL, num_layers=1, experts=ExpertsConfig(4, 2, moe_ffn_hidden_size=8))


def sample_tokens(group, model, count, seed, choices):
    with connected(group, ParallelConfig.for_world(group.size, **{"t": 1} | choices)) as topology:
        trainer = Trainer(ModelState(model, topology, 1, Precision("float64")), OptimizerConfig(1e-2, 5))
        return sample(trainer, [2], count, seed)


@pytest.mark.parametrize("n, model, choices", [
    (1, MODEL, dict()), (8, ROPE, dict(t=2, p=2, pipeline_schedule="interleaved", virtual_pipeline_size=2)),
    (6, ROPE, dict(p=3, pipeline_schedule="zb-v")),
    (4, MODEL, dict(t=2, sequence_parallel=True, zero_stage=3, cpu_offload=True)),
    (4, EXPERTS, dict(t=2, expert_model_parallel_size=2, zero_stage=3))])
def test_every_topology_samples_the_textbooks_text(ranks, n, model, choices):
    """On one replica or two, whatever a rank keeps; the context grows, and then slides. The seed decides."""
    p = training.Trainer(model, OptimizerConfig(1e-2, 5), 1, Precision("float64")).params
    expected = generate([[2]], 15, p, model, Sampling(TEMPERATURE, top_p=TOP_P, seed=7))[0]
    assert ranks.run(n, sample_tokens, model, 15, 7, choices) == [expected] * n and len({*expected}) > 1
    assert ranks.run(n, sample_tokens, model, 15, 8, choices)[0] != expected
