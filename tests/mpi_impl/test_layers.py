"""Sharded layers on real ranks: each equals the unsharded one in its output, input gradient and every weight gradient.
"""
import weakref
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from mpi_impl.models import gpt, stage
from mpi_impl.models.units import Unit
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.config import ModelConfig, Recompute
from reference.layer_context import LayerContext
from reference.models.gpt import gpt_tensors
from reference.optimizer import OptimizerConfig
from reference.parallel.layout import map_units
from reference.precision import Precision
from tests import rank_theorems as theorems
from tests.reference.test_recompute import arrays_in
from tests.strategies import ANY_MODEL, Case, cases, recomputes
from tests.textbook_theorems import shards_are_of_one_whole
from tests.training_theorems import Plan, connected


@given(cases(), st.booleans())
def test_column_parallel_linear(ranks, case, gather_output):
    ranks.run(case.t, theorems.column_parallel_equals_whole, case, gather_output)


@given(cases())
def test_row_parallel_linear(ranks, case):
    ranks.run(case.t, theorems.row_parallel_equals_whole, case)


@given(cases())
def test_mlp(ranks, case):
    ranks.run(case.t, theorems.mlp_equals_whole, case)


@given(cases(architectures=ANY_MODEL), st.booleans(), st.booleans())
def test_attention(ranks, case, causal, selective):
    """With padding and without, dropout on."""
    ranks.run(case.t, theorems.attention_equals_whole, case, causal, Recompute("selective" if selective else "none"))


@given(cases(architectures=ANY_MODEL), st.booleans())
def test_block(ranks, case, selective):
    """In both orders of norms and residual connections."""
    ranks.run(case.t, theorems.block_equals_whole, case, Recompute("selective" if selective else "none"))


@given(cases(architectures=ANY_MODEL))
def test_embedding(ranks, case):
    """With token types and without."""
    ranks.run(case.t, theorems.embedding_equals_whole, case)


@given(cases())
def test_logits(ranks, case):
    ranks.run(case.t, theorems.logits_equal_whole, case)


@given(cases())
def test_head_for_masked_words(ranks, case):
    ranks.run(case.t, theorems.masked_lm_equals_whole, case)


@given(cases(), st.sampled_from([1.0, 1000.0]))
def test_cross_entropy(ranks, case, scale):
    ranks.run(case.t, theorems.loss_equals_whole, case, scale)


@given(cases(integers=True, activation="relu", hidden_dropout=0.5), st.booleans())
def test_linear_parts_agree_exactly_on_integers(ranks, case, gather_output):
    """Sums and products of small whole numbers are exact in any order, so there is nothing left to forgive."""
    ranks.run(case.t, integers_agree_exactly, case, gather_output)


def integers_agree_exactly(group, case, gather_output):
    theorems.column_parallel_equals_whole(group, case, gather_output, tolerance=0.0)
    theorems.row_parallel_equals_whole(group, case, tolerance=0.0)
    theorems.mlp_equals_whole(group, case, tolerance=0.0)
    theorems.embedding_equals_whole(group, case, tolerance=0.0)
    theorems.logits_equal_whole(group, case, tolerance=0.0)


@given(cases(architectures=ANY_MODEL), recomputes())
def test_model(ranks, case, recompute):
    """In one microbatch, dropout on, whatever is kept of the activations."""
    ranks.run(case.t, theorems.model_equals_whole, case, recompute)


@pytest.mark.parametrize("architecture", ANY_MODEL)
def test_padding_in_the_vocabulary_stays_0(ranks, architecture):
    """Exactly, in weights and moments, when the model is trained: rows of the table, and BERT's bias for words."""
    model = ModelConfig(1, 12, 3, 10, 4, make_vocab_size_divisible_by=3, architecture=architecture)
    ranks.run(3, padding_stays_0, Case(3, model, 2, 4, seed=1))


def padding_stays_0(group, case):
    with connected(group, Plan().parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision("float64")),
                          OptimizerConfig(0.1, 9, weight_decay=0.1))
        for step in range(3):
            trainer.step([case.batch(str(step), case.b)], case.b)
        for state in trainer.state.optimizer_states.values():
            theorems.first_checks(group, state.flat, lambda everyone: shards_are_of_one_whole(
                list(map(trainer.state.layout.views, everyone)), trainer.state.layout.tensors, group.size))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("selective"), Recompute("full"),
                                       Recompute("full", "uniform", 2), Recompute("full", "block", 2)], ids=str)
def test_what_recompute_keeps(ranks, recompute, cut):
    model = ModelConfig(3, 16, 4, 10, 14)
    ranks.run(2, only_inputs_are_kept, Case(2, model, 3, 14, seed=1, sequence_parallel=cut), recompute)


def only_inputs_are_kept(group, case, recompute):
    """Check that a recomputed group of layers keeps only its input x [b, s, h], and a layer with selective recompute
    nothing of size s^2.

    Everything else must be freed as soon as the group's forward is over.
    """
    c, share = case.model, theorems.Share(group, gpt_tensors(case.model), case.params(gpt_tensors(case.model)), case)
    tokens = case.ids("tokens", case.b, case.s)
    made: dict[int, list] = {}
    groups = recompute.groups(range(c.num_layers))

    def watched(x, block, c, region, context, block_forward=stage.block_forward):
        over = [layer for layers, again in groups for layer in layers if again and layers[-1] < context.dropout.layer]
        assert not any(ref() is not None for layer in over for ref in made[layer])
        y, cache = block_forward(x, block, c, region, context)
        made[context.dropout.layer] = [weakref.ref(array) for array in arrays_in(cache)]
        return y, cache

    with mock.patch.object(stage, "block_forward", watched):
        _, cache = gpt.gpt_forward(tokens, map_units(Unit, share.p), c, tokens, share.region,
                                   LayerContext(case.dropout, recompute))
    for kept, (layers, again) in zip(cache.layers, groups, strict=True):
        assert kept.layers == layers
        squares = [array for array in arrays_in(kept) if array.shape[-2:] == (case.s, case.s)]
        assert bool(squares) == (recompute.granularity == "none" or recompute.granularity == "full" and not again)
        if again:
            whole = case.s // (group.size if case.sequence_parallel else 1)
            assert kept.caches is None
            assert {array.size for array in arrays_in(kept)} == {case.b * whole * c.hidden_size}
