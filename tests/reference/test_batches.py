"""Batches: a row has all of a sample, and the loss of a global batch does not depend on how it is dealt out."""
import numpy as np
from hypothesis import given, strategies as st

from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.models.model import batch_type, model_backward, model_forward, model_tensors
from reference.params import tree_map
from reference.training.trainer import loss_and_gradients
from tests.cases import take
from tests.strategies import ANY_MODEL, Case, cases, close, trees_close


@given(cases(sizes=st.just(1), architectures=("bert",)))
def test_a_sample_is_a_row(case):
    """A batch packs into rows of integers, each of the declared width, and each row unpacks to its own sample."""
    kind, batch = batch_type(case.model), case.batch("", case.b)
    rows = batch.pack()
    assert rows.shape == (case.b, kind.width(case.s)) and rows.dtype == np.int64
    one_by_one = zip(*(kind.unpack(row[None]) for row in rows))
    for unpacked in (kind.unpack(rows), kind(*(None if x[0] is None else np.concatenate(x) for x in one_by_one))):
        for one, other in zip(unpacked, batch, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_gpt_predicts_the_next_token():
    rows = np.arange(2 * GPTBatch.width(3)).reshape(2, -1)
    assert GPTBatch.unpack(rows).tokens.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert GPTBatch.unpack(rows).targets.tolist() == [[1, 2, 3], [5, 6, 7]]


@given(cases(sizes=st.just(1), architectures=ANY_MODEL))
def test_each_loss_has_its_weight(case):
    """Each head has one weight for each of its losses."""
    c, batch = case.model, case.batch("", case.b)
    losses, _ = model_forward(None, case.params(model_tensors(c)), c, batch)
    assert [loss.shape for loss in losses] == [weights.shape for weights in batch.weights_of_heads(c.heads)]


SAMPLES = 5


@given(cases(sizes=st.just(1), architectures=ANY_MODEL), st.permutations(range(SAMPLES)),
       st.sets(st.integers(1, SAMPLES - 1)))
def test_dealt_in_any_way_a_batch_has_one_loss(case, order, cuts):
    """Each part's weighted sum, divided by the weight of the whole: the parts' losses and gradients add up to it.

    However uneven the masks are, and where a part has none.
    """
    c, p, batch = case.model, case.params(model_tensors(case.model)), case.batch("", SAMPLES)
    totals = [max(weights.sum(), 1) for weights in batch.weights_of_heads(c.heads)]
    parts = [take(batch, list(samples)) for samples in np.split(np.array(order), sorted(cuts))]
    loss, grads = added([of_a_part(part, p, c, totals) for part in parts])
    expected, expected_grads = loss_and_gradients(batch, p, c)
    close(np.stack([loss]), np.stack([expected]))
    trees_close(grads, expected_grads)


def of_a_part(part, p, c, totals):
    """Compute one replica's share of the loss and of the gradients."""
    losses, cache = model_forward(None, p, c, part)
    shares = [weights / total for weights, total in zip(part.weights_of_heads(c.heads), totals, strict=True)]
    return sum((loss * share).sum() for loss, share in zip(losses, shares)), model_backward(shares, p, cache, c)[1]


def added(found):
    """Sum losses and gradients."""
    losses, grads = zip(*found, strict=True)
    return sum(losses), tree_map(lambda *each: sum(each), *grads)


def test_a_mean_of_means_is_another_number():
    """With one masked token on one replica and many on another, a mean of means gives that token half the weight."""
    model = ModelConfig(2, 8, 2, 20, 6, architecture="bert", heads=("lm",))
    case = Case(1, model, 2, 6, seed=3)
    p, batch = case.params(model_tensors(model)), case.batch("", 2)
    batch = batch._replace(weights=np.array([[1, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]]))
    loss, right = loss_and_gradients(batch, p, model)
    sum_of_means, wrong = added([loss_and_gradients(take(batch, slice(i, i + 1)), p, model) for i in range(2)])
    assert abs(sum_of_means / 2 - loss) > 1e-3 * loss
    assert abs(wrong.lm_head.bias / 2 - right.lm_head.bias).max() > 0.1 * abs(right.lm_head.bias).max()
