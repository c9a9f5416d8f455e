"""Muon in the textbook: what Newton-Schulz does to singular values, whose matrices it sees, and who owns them."""
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from reference.config import MUON_TP_MODES, ModelConfig, OptimizerConfig
from reference.errors import UserError
from reference.models.model import model_tensors
from reference.muon import (COEFFICIENTS, is_matrix, matrices, multiplications, newton_schulz, orthogonalized,
                            sharded_orthogonalized)
from reference.optimizer import adam_update
from reference.parallel.layout import Layout, deal_out
from reference.parallel.zero import ZeroTrainer
from reference.params import leaves, shard, weight
from reference.precision import Precision
from reference.training.trainer import Trainer
from tests.cases import ExactCase, close
from tests.muon_theorems import muon_is_its_definition
from tests.strategies import cases

C = OptimizerConfig(0.1, 10, optimizer="muon")
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
LLAMA = ModelConfig(1, 8, 4, 11, 4, normalization="RMSNorm", swiglu=True, add_bias_linear=False, num_query_groups=2,
                    position_embedding_type="rope", ffn_hidden_size=6)


@given(SHAPES, st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_newton_schulz_maps_each_singular_value_by_itself(shape, seed, steps):
    x = np.random.default_rng(seed).normal(size=shape)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt((s * s).sum())
    for _ in range(steps):
        s = sum(factor * s**power for factor, power in zip(COEFFICIENTS, (1, 3, 5), strict=True))
    close(newton_schulz(x, steps), u * s @ v, 1e-5)         # eps is in the norm


def test_five_rounds_bring_all_singular_values_near_one():
    """Those that are not below a hundredth of the norm; and whatever the magnitude of all is."""
    u, v = (np.linalg.qr(np.random.default_rng(i).normal(size=(8, 8)))[0] for i in range(2))
    x = u * np.linspace(0.02, 1, 8) @ v
    for magnitude in (1e-3, 1, 1e6):
        values = np.linalg.svd(newton_schulz(magnitude * x, 5), compute_uv=False)
        assert values.min() > 0.6 and values.max() < 1.3
    assert np.array_equal(newton_schulz(0 * x, 5), 0 * x)


@given(cases(sizes=st.sampled_from([1, 2, 4]), architectures=("gpt", "bert"), experts=1), st.booleans())
def test_an_update_is_its_definition(case, nesterov):
    muon_is_its_definition(case, nesterov)


@given(cases(sizes=st.sampled_from([1, 2, 3]), exact=True), st.sampled_from(MUON_TP_MODES), st.integers(1, 3))
def test_shards_are_orthogonalized_as_the_whole(case, mode, steps):
    """The same formulas, where several ranks hold copies of one shard, too."""
    c = replace(C, muon_tp_mode=mode, muon_num_ns_steps=steps)
    for name, tensor in leaves(model_tensors(case.model)):
        if is_matrix(tensor):
            x = case.array(name, *tensor.shape)
            y = orthogonalized(x, tensor, c)
            shards = [shard(x, tensor, case.t, rank) for rank in range(case.t)]
            for rank, found in enumerate(sharded_orthogonalized(shards, tensor, c)):
                close(found, shard(y, tensor, case.t, rank))


def test_copies_of_a_shard_count_once():
    """Four ranks share two heads of keys and values."""
    case = ExactCase(4, LLAMA, 1, 4, seed=1)
    tensor = dict(leaves(model_tensors(LLAMA)))["blocks.0.attention.w_kv"]
    assert tensor.copies(4) == 2
    x, c = case.array("w", *tensor.shape), replace(C, muon_tp_mode="distributed")
    found = sharded_orthogonalized([shard(x, tensor, 4, rank) for rank in range(4)], tensor, c)
    for rank in range(4):
        close(found[rank], shard(orthogonalized(x, tensor, c), tensor, 4, rank))


def test_matrices_are_the_weights_inside_the_layers():
    """And no table, no router, no head; each of Q, K, V, of the sides of a gate and of the experts is one."""
    def names(model):
        return {name: [m.shape for m in matrices(np.zeros(tensor.shape), tensor)]
                for name, tensor in leaves(model_tensors(model)) if is_matrix(tensor)}

    assert names(ModelConfig(1, 8, 2, 11, 4)) == {
        "blocks.0.attention.w_qkv": 3 * [(8, 8)], "blocks.0.attention.w_out": [(8, 8)],
        "blocks.0.mlp.w_in": [(8, 32)], "blocks.0.mlp.w_out": [(32, 8)]}
    assert names(LLAMA) == {
        "blocks.0.attention.w_q": [(8, 8)], "blocks.0.attention.w_kv": 2 * [(8, 4)],
        "blocks.0.attention.w_out": [(8, 8)], "blocks.0.mlp.w_in": 2 * [(8, 6)], "blocks.0.mlp.w_out": [(6, 8)]}
    of_bert = ModelConfig(1, 8, 2, 11, 4, architecture="bert", heads=("lm", "sop"))
    assert names(of_bert).keys() == names(ModelConfig(1, 8, 2, 11, 4)).keys()


def test_adam_moves_all_else():
    """Exactly as it does without Muon."""
    case = ExactCase(1, LLAMA, 1, 4, seed=1)
    trainer = Trainer(case.model, C, 1, Precision("float64"))
    before = {name: x.copy() for name, x in leaves(trainer.params)}
    _, _, grads = trainer.step(replace(case).batch("0", 2))
    for (name, x), (_, grad), (_, tensor), (_, v) in zip(*map(leaves, (trainer.params, grads, trainer.tensors,
                                                                       trainer.v)), strict=True):
        expected, m = before[name], np.zeros_like(grad)
        adam_update(expected, grad, m, np.zeros_like(grad), 1, 0.1, tensor.decay, C)
        assert np.array_equal(x, expected) != is_matrix(tensor), name
        assert v.any() != is_matrix(tensor)


# ---- owners ---------------------------------------------------------------------------------------------------------


@given(cases(share_layers=False), st.integers(1, 10_000), st.integers(1, 5))
def test_an_owner_has_whole_matrices(case, bucket_size, parts):
    """Each matrix has one owner, and none computes more than an even share and the costliest matrix."""
    layout = Layout(model_tensors(case.model), case.t, bucket_size, parts, whole_matrices=True)
    owned = [[piece.of for piece in layout.pieces(rank) if piece.of.matrix] for rank in range(parts)]
    names = [segment.name for own in owned for segment in own]
    assert sorted(names) == sorted(name for name, tensor in leaves(layout.tensors) if is_matrix(tensor))
    for rank in range(parts):
        pieces = [piece for piece in layout.pieces(rank) if piece.of.matrix]
        assert all(piece.in_buffer == piece.of.slice for piece in pieces)
        assert all(piece.in_shard.start >= layout.adam_size for piece in pieces)
        assert all(piece.in_shard.stop <= layout.shard_size for piece in pieces)
    costs = [[multiplications(segment.tensor) for segment in own] for own in owned]
    assert max(map(sum, costs)) <= sum(map(sum, costs)) / parts + max(map(max, filter(None, costs)))


def test_the_costliest_is_dealt_out_first():
    layout = Layout({"blocks": {i: weight((n, n), 1.0, split=1) for i, n in enumerate((4, 3, 3, 2, 2))}},
                    parts=2, whole_matrices=True)
    found = deal_out(layout.segments, [0, 0])
    assert [[segment.shape[0] for segment in own] for own in found] == [[4], [3, 3, 2, 2]]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices, error", [
    (dict(optimizer="sgd"), "--optimizer is 'sgd', but must be one of adam, muon"),
    (dict(muon_tp_mode="blockwise"), "orthogonalizes each rank's shard"),
    (dict(muon_tp_mode="both"), "must be one of duplicated, distributed"),
    (dict(muon_scale_mode="large"), "--muon-scale-mode is 'large'"),
    (dict(muon_num_ns_steps=0), "--muon-num-ns-steps is 0"),
    (dict(muon_momentum=1.0), "--muon-momentum is 1.0")])
def test_values_that_make_no_sense_are_refused(choices, error):
    with pytest.raises(UserError, match=error):
        OptimizerConfig(0.1, 10, **choices)


def test_the_trainer_of_zero_is_adams():
    with pytest.raises(UserError, match="Muon needs whole matrices"):
        ZeroTrainer(LLAMA, C, 1, "float64", d=2, stage=1)
