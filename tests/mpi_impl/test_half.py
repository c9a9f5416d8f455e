"""Half precision is true to its format: what is computed is rounded once, and nothing in between is wider.

Bounds are in units of the format's epsilon, by half of which a number that is rounded may be off. The kernels for
halves are in test_kernels.py.
"""
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl import kernels
from mpi_impl.layers.core_attention import core_again
from mpi_impl.runtime.arrays import dtype_of, narrowed, widened
from reference.params import tree_map
from reference.precision import FORMATS
from reference.random.dropout import Site
from tests import rank_theorems as theorems
from tests.allocated import most_bytes
from tests.kernel_theorems import HALVES, bound_of
from tests.strategies import Case, cases

NAMES = st.sampled_from(HALVES)
FEWER = settings(max_examples=max(5, settings().max_examples // 3))


# ---- the way to a format and back -----------------------------------------------------------------------------------


def same_bits(actual, expected):
    """Assert that halves have the same bits; any not-a-number equals any other."""
    number = ~np.isnan(expected.astype(np.float32))
    assert (actual.view(np.uint16) == expected.view(np.uint16))[number].all()
    assert np.isnan(actual[~number].astype(np.float32)).all()


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_every_float_becomes_the_nearest_half(name):
    """Every half itself, with not-a-numbers, infinities and zeros of both signs; and between neighbours, at and beside
    the middle of them, where ties go to even; down to 0 and up to infinity.
    """
    every = np.arange(2**16, dtype=np.uint16).view(dtype_of(name))
    assert widened(every).dtype == np.float32
    same_bits(narrowed(widened(every), every.dtype), every)
    same_bits(narrowed(every, every.dtype), every)
    numbers = every[:2**15].astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    middle = numbers[:-1] + (numbers[1:] - numbers[:-1]) / 2
    largest = np.float32(FORMATS[name].largest)
    beyond = np.array([largest, largest * np.float32(1 + FORMATS[name].epsilon / 4), np.inf], np.float32)
    for x in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), beyond):
        for signed in (x, -x):
            same_bits(narrowed(signed, every.dtype), signed.astype(every.dtype))


# ---- what kernels keep ----------------------------------------------------------------------------------------------


def test_caches_of_halves_are_inputs():
    """Or their signs. So selective recompute has nothing to do."""
    x = np.ones((1, 3, 2, 4), np.float16)
    for forward in (kernels.gelu, kernels.gelu_exact, kernels.relu, kernels.swiglu):
        cache = forward(x)[1]
        assert cache is x or cache.dtype == bool
    cache = kernels.attention_core(x, x, x, True, None)[1]
    assert all(one is x for one in cache[:3]) and core_again(cache) is cache


def test_attention_has_the_probabilities_of_one_sample_at_a_time():
    b, s, a, d = 4, 512, 4, 4
    q = np.random.default_rng(1).normal(size=(b, s, a, d)).astype(dtype_of("bfloat16"))

    def forward_and_backward():
        y, cache = kernels.attention_core(q, q, q, True, Site((1, 2), 0.1, (0, a, s, s), (0, 0, 0, 0)))
        kernels.attention_core_backward(y, cache)

    assert most_bytes(forward_and_backward) < 1.8 * a * s * s * (4 + 1)    # with its mask; of all, or of two: more


# ---- layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfCase(Case):
    """Its numbers are halves, so that the machine, in halves, and the textbook, in float64, begin with the same."""

    name: str = "float16"
    main = np.float32

    def array(self, what, *shape):
        return super().array(what, *shape).astype(dtype_of(self.name)).astype(np.float64)

    def params(self, tensors):
        return tree_map(lambda x: x.astype(dtype_of(self.name)).astype(np.float64), super().params(tensors))

    def on_a_rank(self, x, wrap=theorems.as_is):
        """Return the textbook's float64 numbers in 16 bits; return ids and the gradients' buffer as they are."""
        return wrap(x.astype(dtype_of(self.name)) if x.dtype == np.float64 else x)

    def bound(self, roundings):
        return bound_of(self.name, roundings)


@st.composite
def half_cases(draw, **model_choices):
    case = draw(cases(sizes=st.sampled_from([1, 2, 4]), **model_choices))
    return HalfCase(**vars(case), name=draw(NAMES))


def smooth_cases():
    """Return cases in which rounding errors are not magnified. A layer norm magnifies them if a position's two or four
    elements are nearly equal; ReLU does if rounding changes a sign.
    """
    return st.sampled_from(["gelu", "gelu_exact"]).flatmap(
        lambda activation: half_cases(hidden_size=16, rotary_percent=1.0, activation=activation))


def in_halves(group, theorem, case, roundings, wrap=theorems.as_is):
    theorem(group, case, wrap=partial(case.on_a_rank, wrap=wrap), tolerance=case.bound(roundings))


# With the number of roundings, one after the other, that a result may be off by: about twice what was seen.
ANY = half_cases(qk_layernorm=False)            # the norm of two nearly equal numbers magnifies rounding errors
LAYERS = [(theorems.row_parallel_equals_whole, 4, ANY), (theorems.mlp_equals_whole, 5, ANY),
          (theorems.attention_equals_whole, 8, ANY), (theorems.embedding_equals_whole, 5, ANY),
          (theorems.logits_equal_whole, 3, ANY), (theorems.block_equals_whole, 12, smooth_cases())]


@pytest.mark.parametrize("theorem, roundings, strategy", LAYERS, ids=[row[0].__name__ for row in LAYERS])
@FEWER
@given(data=st.data())
def test_sharded_is_the_textbook_within_the_format(ranks, theorem, roundings, strategy, data):
    """Both regions; output, input gradient and all weight gradients."""
    case = data.draw(strategy)
    ranks.run(case.t, in_halves, theorem, case, roundings)
