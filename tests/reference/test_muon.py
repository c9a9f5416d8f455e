"""Muon in the textbook: whose matrices it orthogonalizes, whole and in shards, and who owns them."""
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import MUON_TP_MODES, ModelConfig, OptimizerConfig
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.optimizers.adam import adam_update
from reference.optimizers.muon import (is_matrix, matrices, multiplications, newton_schulz, orthogonalized,
                                       sharded_orthogonalized, update_whole)
from reference.parallel.layout import Layout
from reference.parallel.zero import ZeroTrainer
from reference.params import leaves, shard
from tests.cases import close
from tests.muon_theorems import muon_is_its_definition
from tests.strategies import cases

C = OptimizerConfig(0.1, 10, optimizer="muon")
GPT = ModelConfig(1, 8, 4, 11, 4)
LLAMA = replace(GPT, normalization="RMSNorm", swiglu=True, add_bias_linear=False, num_query_groups=2,
                position_embedding_type="rope", ffn_hidden_size=6)


def test_five_rounds_bring_singular_values_near_one():
    """Those above a hundredth of the norm, whatever the magnitude of all is."""
    u, v = (np.linalg.qr(np.random.default_rng(i).normal(size=(8, 8)))[0] for i in range(2))
    for magnitude in (1e-3, 1e6):
        values = np.linalg.svd(newton_schulz(magnitude * u * np.linspace(0.02, 1, 8) @ v, 5), compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.3
    assert np.array_equal(newton_schulz(0 * u, 5), 0 * u)


@given(cases(sizes=st.sampled_from([1, 2, 4]), architectures=("gpt", "bert"), experts=1), st.booleans())
def test_an_update_is_its_definition(case, nesterov):
    muon_is_its_definition(case, nesterov)


@given(cases(sizes=st.sampled_from([1, 2, 3]), exact=True), st.sampled_from(MUON_TP_MODES), st.integers(1, 3))
def test_shards_are_orthogonalized_as_the_whole(case, mode, rounds):
    """The same formulas, where several ranks hold copies of one shard, too."""
    c = replace(C, muon_tp_mode=mode, muon_num_ns_steps=rounds)
    for name, tensor in leaves(model_tensors(case.model)):
        if is_matrix(tensor):
            x = case.array(name, *tensor.shape)
            y, shards = orthogonalized(x, tensor, c), [shard(x, tensor, case.t, rank) for rank in range(case.t)]
            for rank, found in enumerate(sharded_orthogonalized(shards, tensor, c)):
                close(found, shard(y, tensor, case.t, rank))


@pytest.mark.parametrize("model, shapes", [
    (GPT, {"attention.w_qkv": 3 * [(8, 8)], "attention.w_out": [(8, 8)], "mlp.w_in": [(8, 32)],
           "mlp.w_out": [(32, 8)]}),
    (LLAMA, {"attention.w_q": [(8, 8)], "attention.w_kv": 2 * [(8, 4)], "attention.w_out": [(8, 8)],
             "mlp.w_in": 2 * [(8, 6)], "mlp.w_out": [(6, 8)]})])
def test_matrices_are_the_weights_inside_the_layers(model, shapes):
    """Each of Q, K, V and of the sides of a gate is one. All else is Adam's."""
    assert shapes == {name.removeprefix("blocks.0."): [m.shape for m in matrices(np.zeros(tensor.shape), tensor)]
                      for name, tensor in leaves(model_tensors(model)) if is_matrix(tensor)}


@given(cases(architectures=("gpt", "bert"), experts=1))
def test_adam_moves_all_else(case):
    for name, tensor in leaves(model_tensors(case.model)):
        x, grad = case.array(name, *tensor.shape), case.array(f"gradient of {name}", *tensor.shape)
        (param, m, v), (expected, *moments) = ((x.copy(), np.zeros_like(x), np.zeros_like(x)) for _ in range(2))
        update_whole(param, grad, m, v, tensor, 1, 0.1, C)
        adam_update(expected, grad, *moments, 1, 0.1, tensor.decay, C)
        assert np.array_equal(param, expected) != is_matrix(tensor) and v.any() != is_matrix(tensor), name


@given(cases(), st.integers(1, 10_000), st.integers(1, 5))
def test_an_owner_has_whole_matrices(case, bucket_size, parts):
    """Each has one owner, in whose shard it lies behind what is Adam's. None computes more than an even share and the
    costliest matrix.
    """
    layout = Layout(model_tensors(case.model), case.t, bucket_size, parts, whole_matrices=True)
    owned = [[piece for piece in layout.pieces(rank) if piece.of.matrix] for rank in range(parts)]
    pieces = [piece for own in owned for piece in own]
    assert sorted(piece.of.name for piece in pieces) == sorted(
        name for name, tensor in leaves(layout.tensors) if is_matrix(tensor))
    for piece in pieces:
        assert piece.in_buffer == piece.of.slice
        assert layout.adam_size <= piece.in_shard.start and piece.in_shard.stop <= layout.shard_size
    largest = max(sum(piece.size for piece in own) for own in owned)
    assert layout.shard_size == layout.adam_size + largest, "a shard has room for the largest owner's matrices"
    costs = [sum(multiplications(piece.of.tensor) for piece in own) for own in owned]
    assert max(costs) <= sum(costs) / parts + max(multiplications(piece.of.tensor) for piece in pieces)


def test_the_trainer_of_zero_is_adams():
    with pytest.raises(UserError, match="Muon needs whole matrices"):
        ZeroTrainer(LLAMA, C, 1, "float64", d=2, stage=1)
