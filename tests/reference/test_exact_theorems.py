"""The theorems of test_theorems.py without rounding, and some that are about exact numbers alone.

On numbers of a prime field a wrong formula passes for a right one with a chance of 1e-20 for each example, so a few
small ones are enough.
"""
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st

from reference import ops
from reference.config import ModelConfig
from reference.exact.array import random_array
from reference.schedules.generators import make
from tests import textbook_theorems as theorems
from tests.generate import test_kv_cache
from tests.planted import planted
from tests.reference.test_ops import RATES, attention_by_definition, attention_dropout, lengths
from tests.reference.test_theorems import BOOL, COUNT, DATA, check, pipeline_equals_one_process, theorems_of
from tests.strategies import Case, ExactCase, cases, close

EACH = st.integers(1, 2)


def attention_is_its_definition(data, b, s, g, each, d, causal):
    """Compare with one query at a time, with padding and dropout."""
    a = each * g
    q, k, v = (random_array((b, s, heads, d), name) for name, heads in zip("qkv", (a, g, g)))
    real, (site, factors) = data.draw(lengths(b, s)), attention_dropout(data.draw(st.sampled_from(RATES)), b, s, a, 1)
    close(ops.attention_core(q, k, v, causal, site, real)[0],
          attention_by_definition(q, k, v, causal, real, factors))


EXACT = theorems_of(exact=True) | {
    "KV cache": (test_kv_cache.test_logits_are_those_of_the_whole_prefix.hypothesis.inner_test,
                 cases(sizes=st.just(1), exact=True), DATA),
    "attention by its definition": (attention_is_its_definition, DATA, COUNT, COUNT, COUNT, EACH, COUNT, BOOL),
}
LONG = "ZeRO with experts", "a pipeline with experts"


@pytest.mark.parametrize("name", [*(name for name in EXACT if name not in LONG),
                                  *(pytest.param(name, marks=pytest.mark.deep) for name in LONG)])
@settings(max_examples=max(3, settings().max_examples // 10))
@given(data=DATA)
def test_holds_exactly(name, data):
    check(data, *EXACT[name])


# ---- what floats do not see -----------------------------------------------------------------------------------------

CASE = dict(t=2, model=ModelConfig(2, 4, 2, 5, 6, make_vocab_size_divisible_by=3), b=1, s=4, seed=7)


def grouped_attention(case):
    """Four ranks with two heads of keys and values: two ranks each hold a copy."""
    model = replace(case.model, num_query_groups=2, num_attention_heads=4, qk_layernorm=True, normalization="RMSNorm",
                    kv_channels=4)
    theorems.attention_equals_whole(replace(case, t=4, model=model))


UNSEEN = {
    "the sum over copies": (grouped_attention, "comm.regions", "for x in all_reduce(parts[first:first + n])",
                            "for x in all_reduce([y * (1 + 2**-50) for y in parts[first:first + n]])"),
    "a part of softmax": (partial(theorems.losses_agree, scale=1e3), "layers.cross_entropy",
                          "(exp / total[..., None], *cache)", "(exp / (total[..., None] + 2**-50), *cache)"),
    "a pipeline's share": (partial(pipeline_equals_one_process, make("1f1b", 2, 2)), "parallel.pipeline",
                           "dy = shares[i]", "dy = [x + 2**-50 for x in shares[i]]"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_floats_do_not_see_is_another_formula(name):
    """An error of 2^-50 passes with floats of 53 bits, whose roundings add up to more."""
    theorem, module, right, wrong = UNSEEN[name]
    theorem(ExactCase(**CASE))
    with planted(f"reference.{module}", right, wrong):
        theorem(Case(**CASE))
        with pytest.raises(AssertionError, match="other formulas"):
            theorem(ExactCase(**CASE))
