"""The textbook's theorems, on floats: sharded and unsharded, dealt out or not, are one formula.

`theorems_of` has a line for each. test_exact_theorems.py runs the same lines on numbers without rounding.
"""
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from reference.batches import BERTBatch, SpanBatch
from reference.config import Recompute
from reference.layer_context import LayerContext
from reference.models.bert import bert_forward, bert_tensors
from reference.models.model import model_backward, model_forward, model_tensors
from reference.models.stage import has_embedding, join_stages
from reference.parallel.pipeline import pipeline_gradients, split_into_stages
from reference.parallel.stages import layers_of_stage
from reference.params import leaves, tree_map
from reference.schedules.generators import SCHEDULES
from reference.training.trainer import loss_and_gradients
from tests import experts_theorems, textbook_theorems as theorems
from tests.cases import take
from tests.context_theorems import attention_over_ranks_equals_one_go, model_over_ranks_equals_whole
from tests.reference import test_zero
from tests.reference.test_context_attention import WAY, context_cases, models_over_ranks
from tests.reference.test_schedules import schedules
from tests.strategies import ANY_MODEL, cases, close, recomputes, trees_close

BOOL, COUNT, DATA = st.booleans(), st.integers(1, 3), st.data()
BERT, ANY = dict(architectures=("bert",)), dict(architectures=ANY_MODEL)
EXPERTS = dict(experts=1, **ANY)


# ---- theorems of this file alone ------------------------------------------------------------------------------------


def attention(case, causal, selective):
    theorems.attention_equals_whole(case, causal, Recompute("selective" if selective else "none"))


def block(case, selective):
    theorems.block_equals_whole(case, Recompute("selective" if selective else "none"))


def joined_parts(case, data):
    """However layers are dealt out to ranks, in whatever order the parts come, every tensor is back in its place.

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


def pipeline_equals_one_process(schedule, case):
    """Check the loss and all gradients, all copies of a tied table and of a shared block among them.

    Dropout is on: each microbatch has the masks of its samples, wherever and whenever it is worked on.
    """
    p, m = case.params(model_tensors(case.model)), schedule.microbatches
    whole = case.batch("", m * case.b)
    batches = [take(whole, slice(i * case.b, (i + 1) * case.b)) for i in range(m)]
    layers = [layers_of_stage(stage, schedule.stages, case.model.num_layers) for stage in range(schedule.stages)]
    loss, grads = pipeline_gradients(batches, split_into_stages(p, layers, case.model), schedule, case.model,
                                     case.dropout)
    expected_loss, expected = loss_and_gradients(whole, p, case.model, case.dropout)
    close(np.stack([loss]), np.stack([expected_loss]))
    trees_close(join_stages(grads), expected, 1e-10)
    for stage in grads:
        if case.model.share_layers:
            trees_close(stage.blocks.shared, expected.blocks.shared, 1e-10)
        if stage.embedding.word is not None:
            close(stage.embedding.word, expected.embedding.word, 1e-10)


SAMPLES = 5


def dealt_batch(case, order, cuts):
    """Losses and gradients of the parts add up to those of the whole, if each weighted sum is divided by the weight of
    the whole, however uneven the masks are, and where a part has none.
    """
    c, p, batch = case.model, case.params(model_tensors(case.model)), case.batch("", SAMPLES)
    totals = [max(weights.sum(), 1) for weights in batch.weights_of_heads(c.heads)]
    loss, grads = 0, []
    for samples in np.split(np.array(order), sorted(cuts)):
        part = take(batch, list(samples))
        losses, cache = model_forward(None, p, c, part)
        shares = [weights / total for weights, total in zip(part.weights_of_heads(c.heads), totals, strict=True)]
        loss += sum((x * share).sum() for x, share in zip(losses, shares, strict=True))
        grads.append(model_backward(shares, p, cache, c)[1])
    expected, expected_grads = loss_and_gradients(batch, p, c)
    close(np.stack([loss]), np.stack([expected]))
    trees_close(tree_map(lambda *each: sum(each), *grads), expected_grads)


def padding_of_any_content(case):
    """Losses of real positions and all gradients stay the same to the last bit, with dropout."""
    c, p, batch, other = case.model, case.params(bert_tensors(case.model)), *(case.batch(i, case.b) for i in "01")
    batch, real = without_padded_targets(case, batch)
    changed = batch._replace(**{name: np.where(real, getattr(batch, name), getattr(other, name))
                                for name in ("tokens", "token_types", "targets") if name in batch._fields})
    losses = [bert_forward(None, p, c, one, LayerContext(case.dropout))[0] for one in (batch, changed)]
    for loss, again in zip(*losses, strict=True):
        assert (again == loss)[real if loss.ndim == 2 and isinstance(batch, BERTBatch) else ...].all()
    same_loss_and_gradients(case, batch, changed, p)


def without_padded_targets(case, batch):
    """Give the targets of padding no weight; return the batch, and a mask of the real positions."""
    real = np.arange(case.s) < batch.lengths[:, None]
    return batch._replace(weights=batch.weights * real) if isinstance(batch, BERTBatch) else batch, real


def targets_without_weight(case):
    """Targets of tokens that were not masked, and questions that only fill a batch, change nothing to the last bit."""
    p, batch, other = case.params(bert_tensors(case.model)), case.batch("0", case.b), case.batch("1", case.b)
    name = "targets" if isinstance(batch, BERTBatch) else "answers"
    weights, elsewhere = batch.weights, getattr(other, name)
    if isinstance(batch, SpanBatch):       # padding has no score, so it is no answer even of a question without weight
        weights, elsewhere = weights[:, None], elsewhere % batch.lengths[:, None]
    changed = batch._replace(**{name: np.where(weights, getattr(batch, name), elsewhere)})
    same_loss_and_gradients(case, batch, changed, p)


def same_loss_and_gradients(case, batch, other, p):
    (loss, grads), (again, others) = (loss_and_gradients(one, p, case.model, case.dropout) for one in (batch, other))
    assert again == loss
    trees_close(others, grads, 0.0)


# ---- with floats, and exactly ---------------------------------------------------------------------------------------


def theorems_of(exact: bool) -> dict[str, tuple]:
    """Return each theorem with the strategies of its arguments, for cases of floats or of exact numbers."""
    def some(**choices):
        return cases(**(dict(sizes=st.sampled_from([1, 2, 3, 4]), exact=True) if exact else {}) | choices)

    def one(**choices):
        return some(sizes=st.just(1), **choices)

    def shared_layers(**choices):
        return st.integers(1, 4).flatmap(lambda layers: some(num_layers=layers, share_layers=True, **choices))

    def pipeline(schedule, data, experts=None):
        layers = schedule.stages + data.draw(st.integers(0, 1 if exact else 2))
        shared = experts is None and data.draw(st.booleans(), "share layers")
        case = data.draw(one(num_layers=layers, share_layers=shared, experts=experts, **ANY))
        pipeline_equals_one_process(schedule, case)

    training = schedules(set(SCHEDULES) - {"forward-only"}, most=3)

    def dealt_experts(data, e):
        experts_theorems.dealt_experts_equal_whole(data.draw(one(experts=e, **ANY)), e)

    def model_over_ranks(run):
        assume(run[0].model.heads != ("span",))       # in lockstep the textbook has positions in another order
        model_over_ranks_equals_whole(*run)

    zero = test_zero.zero_equals_one_process
    zero_choices = st.integers(1, 4), st.integers(1, 2), test_zero.STAGE, test_zero.BUCKET, st.sampled_from([0.0, 0.5])
    return {
        "column-parallel linear": (theorems.column_parallel_equals_whole, some(), BOOL),
        "row-parallel linear": (theorems.row_parallel_equals_whole, some()),
        "MLP": (theorems.mlp_equals_whole, some()),
        "attention": (attention, some(**ANY), BOOL, BOOL),
        "block": (block, some(**ANY), BOOL),
        "embedding": (theorems.embedding_equals_whole, some(**ANY)),
        "cross-entropy, also of logits in the thousands": (theorems.losses_agree, some(), st.sampled_from([1.0, 1e3])),
        "a model": (theorems.model_equals_whole, some(**ANY), recomputes()),
        "shared and unshared layers": (theorems.shared_equals_unshared, shared_layers(**ANY), recomputes()),
        "joined parts": (joined_parts, one(num_layers=5, **ANY), DATA),
        "pipeline": (pipeline, training, DATA),
        "replicas": (theorems.replicas_equal_one_process, one(), COUNT, COUNT),
        "ZeRO": (zero, one(**test_zero.SPREAD), *zero_choices),
        "experts by their definition": (experts_theorems.experts_are_their_definition, one(**EXPERTS)),
        "experts": (experts_theorems.experts_equal_whole, some(**EXPERTS)),
        "experts dealt out": (dealt_experts, DATA, COUNT if exact else st.integers(1, 4)),
        "a batch dealt in any way": (dealt_batch, one(**ANY), st.permutations(range(SAMPLES)),
                                     st.sets(st.integers(1, SAMPLES - 1))),
        "padding of any content": (padding_of_any_content, one(**BERT)),
        "targets without weight": (targets_without_weight, one(**BERT)),
        "attention over ranks": (attention_over_ranks_equals_one_go, context_cases(exact), WAY),
        "a model over ranks": (model_over_ranks, models_over_ranks(exact)),
    } | ({
        "shared layers": (theorems.model_equals_whole, shared_layers(), recomputes()),
        "a model with experts": (theorems.model_equals_whole, some(**EXPERTS), recomputes()),
        "replicas with experts": (theorems.replicas_equal_one_process, one(experts=1), COUNT, COUNT),
        "a pipeline with experts": (partial(pipeline, experts=1), training, DATA),
        "ZeRO with experts": (zero, one(experts=1, **test_zero.SPREAD), *zero_choices),
    } if exact else {})      # exact numbers are enough: floats take long here


def check(data, theorem, *strategies):
    theorem(*(data if strategy is DATA else data.draw(strategy) for strategy in strategies))


FLOATS = theorems_of(exact=False)


@pytest.mark.parametrize("name", FLOATS)
@given(data=DATA)
def test_holds(name, data):
    check(data, *FLOATS[name])


@settings(max_examples=settings().max_examples // 3)
@given(st.sampled_from([None, 1]).flatmap(lambda experts: cases(sizes=st.just(1), experts=experts, **ANY)))
def test_gradients_agree_with_central_differences(case):
    theorems.gradients_are_derivatives(case)
