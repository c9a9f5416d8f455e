"""The theorems of layers, model and training again, with arrays on a device, our CUDA kernels and cuBLAS's products.

On a GPU if there is one (`./run.sh test-cuda`), which ranks share; else in the emulation.
"""
import pytest
from hypothesis import given, settings, strategies as st

from reference.config import ExpertsConfig, ModelConfig, Recompute
from tests import rank_theorems as theorems, training_theorems
from tests.deep import one_fast_of
from tests.gpu import device
from tests.mpi_impl.test_half import in_halves, smooth_cases
from tests.strategies import Case, cases, recomputes
from tests.test_spy_layers import SMALL

pytestmark = device.needs_somewhere
FEW = settings(max_examples=10)
THEOREMS = [theorems.row_parallel_equals_whole, theorems.mlp_equals_whole, theorems.attention_equals_whole,
            theorems.block_equals_whole, theorems.embedding_equals_whole, theorems.logits_equal_whole,
            theorems.masked_lm_equals_whole, theorems.loss_equals_whole]
EXPERTS = ExpertsConfig(4, 2, moe_layer_freq=2, moe_shared_expert_intermediate_size=2, moe_aux_loss_coeff=0.1,
                        moe_z_loss_coeff=0.1, moe_expert_capacity_factor=4)


def on_a_gpu(group, theorem, *arguments):
    with device.gpu(group.rank) as wrap:
        theorem(group, *arguments, wrap=wrap)


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda f: f.__name__)
@FEW
@given(case=st.one_of(SMALL))
def test_layers(ranks, theorem, case):
    ranks.run(case.t, on_a_gpu, theorem, case, timeout=device.LIMIT)


@FEW
@given(cases(sizes=st.integers(1, 4)), st.booleans())
def test_column_parallel(ranks, case, gather_output):
    ranks.run(case.t, on_a_gpu, theorems.column_parallel_equals_whole, case, gather_output, timeout=device.LIMIT)


@FEW
@given(st.one_of(SMALL), recomputes())
def test_model(ranks, case, recompute):
    ranks.run(case.t, on_a_gpu, theorems.model_equals_whole, case, recompute, timeout=device.LIMIT)


@settings(max_examples=6)
@given(smooth_cases())
def test_a_block_in_halves(ranks, case):
    """Output, input gradient and weight gradients, within roundings of the format."""
    ranks.run(case.t, block_in_halves, case, timeout=device.LIMIT)


def block_in_halves(group, case):
    with device.gpu(group.rank) as wrap:
        in_halves(group, theorems.block_equals_whole, case, 12, wrap)


BERT = {"architecture": "bert", "heads": ("lm", "sop")}
ROPE = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}


@pytest.mark.parametrize("t, p, d, schedule, stage, offload, recompute, choices", one_fast_of(5, [
    (2, 2, 1, "zb-h1", 3, True, Recompute("full"), {}), (1, 1, 2, "1f1b", 1, False, Recompute(), {"experts": EXPERTS}),
    (2, 1, 2, "1f1b", 2, False, Recompute("selective"), BERT), (1, 1, 1, "1f1b", 0, False, Recompute(), {}),
    (1, 2, 2, "zb-v", 2, False, Recompute("full", "block", 1), ROPE)]))
def test_training(ranks, t, p, d, schedule, stage, offload, recompute, choices):
    """The main theorem, dropout on: losses, gradients and weights of one process. Experts are dealt out to replicas."""
    model = ModelConfig(4, 8, 2, 11, 6, make_vocab_size_divisible_by=4, **choices)
    case = Case(t, model, 2, 6, seed=3, sequence_parallel=t > 1)
    plan = training_theorems.Plan(p, schedule, None, t == 1, bucket_size=200, zero_stage=stage, cpu_offload=offload,
                                  recompute=recompute, e=d if "experts" in choices else 1)
    ranks.run(t * p * d, on_a_gpu, training_theorems.training_equals_one_process, case, 2, p, 0.05, plan,
              timeout=device.LIMIT)


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_training_with_context_parallelism(ranks, way):
    """By blocks of keys, which have kernels of their own."""
    case = Case(1, ModelConfig(2, 8, 2, 11, 4, make_vocab_size_divisible_by=4), 2, 4, seed=3)
    plan = training_theorems.Plan(zero_stage=1, c=2, cp_comm_type=way)
    ranks.run(2, on_a_gpu, training_theorems.training_equals_one_process, case, 2, 1, 0.05, plan, timeout=device.LIMIT)
