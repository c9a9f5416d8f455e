"""The whole model: its gradients, its stages, its shards, and what makes it a language model."""
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.models.gpt import (GPT, gpt_backward, gpt_forward, gpt_join, gpt_logits, gpt_stage, gpt_tensors,
                                  has_embedding, has_head)
from reference.params import leaves, tree_map
from tests import textbook_theorems as theorems
from tests.strategies import cases, close, recomputes, trees_close


def batch(case):
    return case.ids("tokens", case.b, case.s), case.ids("targets", case.b, case.s)


@settings(max_examples=settings().max_examples // 2)
@given(cases(sizes=st.just(1)))
def test_gradients_agree_with_central_differences(case):
    """Of every tensor, one element at a random place and one direction through all of its elements; dropout on."""
    c, p, (tokens, targets) = case.model, case.params(gpt_tensors(case.model)), batch(case)
    dloss, rng, step = case.array("dloss", case.b, case.s), np.random.default_rng(case.seed), 1e-5
    # ReLU's corner would be hit now and then, and the norm of two nearly equal numbers bends within a step.
    c = replace(c, activation="gelu", layernorm_epsilon=0.1)
    _, cache = gpt_forward(tokens, p, c, targets, case.dropout)
    _, grads = gpt_backward(dloss, p, cache, c)
    for (name, x), (_, grad) in zip(leaves(p), leaves(grads), strict=True):
        for direction in (rng.normal(size=x.shape), one_place(rng, x.shape)):
            saved = x.copy()
            x[...] = saved + step * direction
            above = (gpt_forward(tokens, p, c, targets, case.dropout)[0] * dloss).sum()
            x[...] = saved - step * direction
            below = (gpt_forward(tokens, p, c, targets, case.dropout)[0] * dloss).sum()
            x[...] = saved
            numeric, exact = (above - below) / (2 * step), (grad * direction).sum()
            assert abs(numeric - exact) < 1e-5 * max(1, abs(exact)), name


def one_place(rng, shape):
    direction = np.zeros(shape)
    direction[tuple(rng.integers(0, n) for n in shape)] = 1
    return direction


@given(cases(), recomputes())
def test_shards_equal_the_whole(case, recompute):
    """Dropout on, whatever is kept of the activations."""
    theorems.gpt_equals_whole(case, recompute)


@given(cases(sizes=st.just(1)), st.data())
def test_stages_in_a_row_are_the_whole(case, data):
    """Cut between any layers: same loss; same gradients, those of a tied table being the sum over its two copies."""
    c, tensors, (tokens, targets) = case.model, gpt_tensors(case.model), batch(case)
    p, dloss = case.params(tensors), case.array("dloss", case.b, case.s)
    loss, cache = gpt_forward(tokens, p, c, targets)
    _, grads = gpt_backward(dloss, p, cache, c)

    cuts = sorted(data.draw(st.sets(st.integers(1, c.num_layers - 1)))) if c.num_layers > 1 else []
    ranges = [range(a, b) for a, b in zip([0, *cuts], [*cuts, c.num_layers], strict=True)]
    values, x, stages, caches = dict(leaves(p)), tokens, [], []
    for layers in ranges:
        stages.append(pick(gpt_tensors(c, layers), values))
        x, cache = gpt_forward(x, stages[-1], c, targets)
        caches.append(cache)
    close(x, loss)
    dx, found = dloss, {}
    for stage, cache in zip(reversed(stages), reversed(caches), strict=True):
        dx, stage_grads = gpt_backward(dx, stage, cache, c)
        for name, grad in leaves(stage_grads):
            found[name] = found.get(name, 0) + grad
    assert dx is None and found.keys() == values.keys()
    for name, grad in leaves(grads):
        close(found[name], grad, 1e-10)


def pick(tensors, values) -> GPT:
    named = iter(name for name, _ in leaves(tensors))
    return tree_map(lambda _: values[next(named)], tensors)


@given(cases(sizes=st.just(1), num_layers=5), st.data())
def test_joined_parts_are_the_whole(case, data):
    """However layers are dealt out to ranks, in whatever order the parts come: every tensor is back in its place.

    Of the two copies of a tied word table the one beside layer 0 counts.
    """
    c, p = case.model, case.params(gpt_tensors(case.model))
    home = data.draw(st.lists(st.integers(0, 4), min_size=c.num_layers, max_size=c.num_layers))
    held = [[layer for layer in range(c.num_layers) if home[layer] == r] for r in set(home)]
    parts = [tree_map(np.copy, pick(gpt_tensors(c, layers), dict(leaves(p))))
             for layers in data.draw(st.permutations(held))]
    for part in parts:
        if not has_embedding(part) and part.embedding.word is not None:
            part.embedding.word[...] = np.nan
    joined = gpt_join(parts)
    trees_close(joined, p, 0.0)
    assert list(joined.blocks) == list(range(c.num_layers))


@given(cases(sizes=st.just(1), num_layers=4), st.sets(st.integers(0, 3), min_size=1))
def test_a_stage_is_a_view_of_its_rank(case, layers):
    """The same arrays, with the blocks of its own layers alone; what it holds tells what it does."""
    c, p = case.model, case.params(gpt_tensors(case.model))
    stage = gpt_stage(p, sorted(layers))
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
