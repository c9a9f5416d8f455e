"""The main theorem: training on t x d ranks is training in one process."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.config import ModelConfig
from tests.rank_theorems import training_equals_one_process
from tests.strategies import Case, cases

PLACES = [(t, d) for t in range(1, 9) for d in range(1, 8 // t + 1)]


@given(st.data())
def test_any_model_on_any_t_and_d(ranks, data):
    """Ragged models; worlds of 1 to 8 ranks; gradients accumulated over microbatches; clipped and not."""
    t = data.draw(st.integers(1, 8), "t")
    d = data.draw(st.integers(1, 8 // t), "d")
    case = data.draw(cases(sizes=st.just(t)))
    ranks.run(t * d, training_equals_one_process, case, data.draw(st.integers(1, 3), "steps"),
              data.draw(st.integers(1, 3), "microbatches"), data.draw(st.sampled_from([0.0, 0.05, 1e6]), "clip"))


@pytest.mark.parametrize("t, d", PLACES)
def test_every_t_and_d_on_up_to_eight_ranks(ranks, t, d):
    """Five steps, two microbatches each, with clipping at work; as many heads as t needs."""
    heads = 8 if 8 % t == 0 else t
    model = ModelConfig(2, 4 * heads, heads, 37, 6, make_vocab_size_divisible_by=3)
    ranks.run(t * d, training_equals_one_process, Case(t, model, 2, 5, seed=t * 10 + d), 5, 2)
