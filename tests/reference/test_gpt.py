"""The whole model: its gradients, its stages, its shards, and what makes it a language model."""
import numpy as np
from hypothesis import given, settings, strategies as st

from reference.models.gpt import gpt_forward, gpt_logits, gpt_tensors
from reference.models.model import model_tensors
from reference.models.stage import has_embedding, has_head, join_stages, stage_of
from reference.params import leaves, tree_map
from tests import textbook_theorems as theorems
from tests.strategies import ANY_MODEL, cases, close, recomputes, trees_close


def batch(case):
    return case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s)


def shared_cases(**choices):
    """Draw cases of several layers that share their parameters."""
    return st.integers(1, 4).flatmap(lambda layers: cases(num_layers=layers, share_layers=True, **choices))


@settings(max_examples=settings().max_examples // 2)
@given(cases(sizes=st.just(1)))
def test_gradients_agree_with_central_differences(case):
    """Every tensor's gradient is right, with dropout."""
    theorems.gradients_are_derivatives(case)


@given(cases(), recomputes())
def test_shards_equal_the_whole(case, recompute):
    """Any Recompute gives the same, with dropout."""
    theorems.model_equals_whole(case, recompute)


@given(cases(sizes=st.just(1)), st.sets(st.integers(1, 2)))
def test_stages_in_a_row_are_the_whole(case, cuts):
    """Stages may begin at any layer."""
    theorems.stages_equal_whole(case, [cut for cut in cuts if cut < case.model.num_layers])


@settings(max_examples=settings().max_examples // 2)
@given(shared_cases(architectures=ANY_MODEL), recomputes())
def test_gradients_of_shared_layers_are_sums_over_layers(case, recompute):
    """A model whose layers all have the weights of one block computes the same, with dropout; and the gradients of its
    blocks, added up, are that block's. All others are equal.
    """
    theorems.shared_equals_unshared(case, recompute)


@settings(max_examples=settings().max_examples // 4)
@given(shared_cases(), recomputes())
def test_shards_of_shared_layers_equal_the_whole(case, recompute):
    theorems.model_equals_whole(case, recompute)


@given(cases(sizes=st.just(1), architectures=ANY_MODEL, num_layers=5), st.data())
def test_joined_parts_are_the_whole(case, data):
    """However layers are dealt out to ranks, in whatever order the parts come: every tensor is back in its place.

    Of the two copies of a tied word table the one beside layer 0 counts.
    """
    c, p = case.model, case.params(model_tensors(case.model))
    home = data.draw(st.lists(st.integers(0, 4), min_size=c.num_layers, max_size=c.num_layers))
    held = [[layer for layer in range(c.num_layers) if home[layer] == r] for r in set(home)]
    parts = [tree_map(np.copy, theorems.pick(model_tensors(c, layers), dict(leaves(p))))
             for layers in data.draw(st.permutations(held))]
    for part in parts:
        if not has_embedding(part) and part.embedding.word is not None:
            part.embedding.word[...] = -np.inf
    joined = join_stages(parts)
    trees_close(joined, p, 0.0)
    assert list(joined.blocks) == list(range(c.num_layers))


@given(cases(sizes=st.just(1), architectures=ANY_MODEL, num_layers=4), st.sets(st.integers(0, 3), min_size=1))
def test_a_stage_is_a_view_of_its_rank(case, layers):
    """The same arrays, with the blocks of its own layers alone; what it holds tells what it does."""
    c, p = case.model, case.params(model_tensors(case.model))
    stage = stage_of(p, sorted(layers))
    assert list(stage.blocks) == sorted(layers)
    assert all(stage.blocks[layer] is p.blocks[layer] for layer in layers)
    assert has_embedding(stage) == (0 in layers) and has_head(stage, c) == (3 in layers)


@given(cases(sizes=st.just(1)))
def test_the_future_is_hidden(case):
    """Changing a token changes no logits before it."""
    c, p = case.model, case.params(gpt_tensors(case.model))
    tokens = case.ids("tokens", case.b, case.s)
    changed = tokens.copy()
    n = case.seed % case.s
    changed[:, n] = (changed[:, n] + 1) % c.vocab_size
    close(gpt_logits(changed, p, c)[:, :n], gpt_logits(tokens, p, c)[:, :n])


@given(cases(sizes=st.just(1)))
def test_logits_and_loss_are_of_the_same_model(case):
    c, p, (tokens, targets) = case.model, case.params(gpt_tensors(case.model)), batch(case)
    logits = gpt_logits(tokens, p, c)
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    close(gpt_forward(tokens, p, c, targets)[0], expected)
