"""Dropout: every part's mask is a slice of one whole mask, draws are fair and independent, gradients are right."""
from dataclasses import replace
from unittest import mock

import numpy as np
from hypothesis import given, strategies as st

from reference import ops
from reference.config import ModelConfig
from reference.layer_context import LayerContext
from reference.models.gpt import gpt_forward, gpt_tensors
from reference.params import HOST, initialize
from reference.positions import SequencePart, deal, zigzag
from reference.random.dropout import Dropout, Site
from tests.reference.test_ops import RATES, SEEDS, draw


def model(n=6, a=3, d=2, hidden=0.4, attention=0.4):
    return ModelConfig(num_layers=2, hidden_size=a * d, num_attention_heads=a, vocab_size=8, max_position_embeddings=n,
                       hidden_dropout=hidden, attention_dropout=attention)


def mask_of(site, *shape):
    return ops.draw_mask(site, shape, HOST).keep


# ---- one whole mask -----------------------------------------------------------------------------------------------


@st.composite
def parts(draw, *lengths):
    """Draw for each length a slice of range(length) that is not empty."""
    starts = [draw(st.integers(0, length - 1)) for length in lengths]
    return [slice(start, draw(st.integers(start + 1, length))) for start, length in zip(starts, lengths)]


@given(parts(5, 7), st.integers(0, 2**40), SEEDS)
def test_a_rank_with_some_samples_and_positions_draws_its_slice(part, sample, seed):
    """A replica has some samples, and a rank with sequence parallelism some positions of sequences of any length."""
    whole = Dropout(model(n=7), seed, 3, sample, 1)
    samples, positions = part
    mine = replace(whole, sample=sample + samples.start).hidden("mlp", positions)
    shape = samples.stop - samples.start, positions.stop - positions.start, whole.c.hidden_size
    assert (mask_of(mine, *shape) == mask_of(whole.hidden("mlp"), 5, 7, whole.c.hidden_size)[*part]).all()


@given(parts(4, 5), st.integers(1, 7), st.integers(0, 2**40), SEEDS)
def test_a_rank_with_some_heads_draws_its_slice(part, s, sample, seed):
    """A tensor-parallel rank has some heads; a shorter sequence has the masks of the first queries and keys."""
    whole = Dropout(model(n=7, a=5), seed, 3, sample, 1)
    samples, heads = part
    mine = replace(whole, sample=sample + samples.start).attention(heads.start)
    shape = samples.stop - samples.start, heads.stop - heads.start, s, s
    assert (mask_of(mine, *shape) == mask_of(whole.attention(), 4, 5, 7, 7)[*part, :s, :s]).all()


def test_every_element_has_an_index_of_its_own():
    """The indices of a whole array are consecutive: a sample begins after the last position of the one before."""
    d = Dropout(model(n=4, a=3), 1, 1)
    for site, shape in (d.hidden("mlp"), (2, 4, 6)), (d.attention(), (2, 3, 4, 4)):
        index = ops.counter_rng.indices(shape, site.whole, site.first, HOST)
        assert index.dtype == np.uint64 and (index.ravel() == np.arange(index.size)).all()


# ---- chance -------------------------------------------------------------------------------------------------------


def test_every_seed_step_layer_and_purpose_has_a_key_of_its_own():
    """So their masks are unrelated (test_counter_rng.py). The embedding has no layer."""
    ours = Dropout(model(), 1234, 7, layer=1)
    others = [replace(ours, seed=1235), replace(ours, step=8), ours.at(0), ours.at(2), replace(ours, layer=None),
              replace(ours, seed=7, step=1234), replace(ours, step=1, layer=7)]
    sites = [site for one in (ours, *others) for site in (one.hidden("mlp"), one.hidden("attention"), one.attention())]
    assert len({site.key for site in sites}) == len(sites)


def test_no_two_sites_of_a_model_share_a_key():
    """One after the embedding; in each layer one of probabilities, and one after each branch."""
    c, sites, make = model(), [], Dropout.site

    def recorded(self, *args):
        sites.append(make(self, *args))
        return sites[-1]

    tokens = np.zeros((1, 3), int)
    with mock.patch.object(Dropout, "site", recorded):
        gpt_forward(tokens, initialize(gpt_tensors(c), 1, np.float64), c, tokens, LayerContext(Dropout(c, 1, 1)))
    assert len({site.key for site in sites}) == len(sites) == 3 * c.num_layers + 1


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 4), SEEDS)
def test_a_rank_with_two_chunks_of_positions_draws_both(c, n, t, seed):
    """Of the whole mask it draws what context parallelism deals to it, or what sequence parallelism leaves of that."""
    s = 2 * c * n * t
    chunks, whole = zigzag(c, s), Dropout(model(n=s), seed, 3, sample=1)
    mask = mask_of(whole.hidden("mlp"), 2, s, whole.c.hidden_size)
    for rank, mine in enumerate(deal(mask, chunks)):
        dropout = replace(whole, part=SequencePart(rank, chunks))
        for i in range(t):
            held = slice(i * s // (c * t), (i + 1) * s // (c * t))
            assert (mask_of(dropout.hidden("mlp", held), *mine[:, held].shape) == mine[:, held]).all()


# ---- what it computes ---------------------------------------------------------------------------------------------


@given(st.sampled_from([1e-12, *RATES, 1 - 1e-12]), st.sampled_from([np.float32, np.float64]), SEEDS)
def test_dropout_by_definition(rate, dtype, seed):
    """Each element is 0 or x / (1 - rate), in x's dtype, even at rates that 32 bits cannot tell from 0 or 1."""
    x = draw(seed, 2, 5, 6).astype(dtype)
    x[0] = np.inf                                       # a factor of 0 would make it NaN
    y, mask = ops.dropout(x, Dropout(model(hidden=rate), seed, 1).hidden("mlp"))
    assert y.dtype == dtype and mask.keep.dtype == bool and mask.scale == 1 / (1 - rate)
    assert (y == np.where(mask.keep, x * dtype(mask.scale), 0)).all()
    dx = ops.dropout_backward(y, mask)
    assert dx.dtype == dtype and (dx == np.where(mask.keep, y * dtype(mask.scale), 0)).all()
    assert Dropout(model(hidden=0), seed, 1).hidden("mlp") is None and ops.dropout(x, None)[0] is x


def test_the_threshold_is_the_rate_in_units_of_2_to_the_minus_32():
    """An element whose bits are just that number is kept: at a rate of 0 it would be all of them."""
    bits = ops.counter_rng.bits((1, 2), np.arange(12, dtype=np.uint64).reshape(3, 4))
    for threshold in bits.ravel().tolist():
        site = Site((1, 2), threshold / 2**32, (0, 4), (0, 0))
        assert site.threshold == threshold and (mask_of(site, 3, 4) == (bits >= threshold)).all()
