"""A text on t x p ranks is the textbook's, however a word is chosen."""
import ml_dtypes
import numpy as np
from hypothesis import given, settings, strategies as st

from mpi_impl.inference.decoding import generate
from reference.config import ModelConfig
from reference.generation.decoding import Sampling
from tests.cases import Case
from tests.generate.texts import logits_equal_uncached, on_ranks, text_of, texts
from tests.gpu import device
from tests.program import refusal
from tests.spy import SpyArray
from tests.strategies import cases

SAMPLINGS = [Sampling(0.0), Sampling(), Sampling(0.5, seed=2), Sampling(1.5, top_k=3), Sampling(top_p=0.7),
             Sampling(2.0, 9, 0.9, seed=8)]
PLACES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (4, 1), (1, 4), (2, 3), (4, 2), (2, 4)]      # t, p


@st.composite
def cases_and_stages(draw):
    """Draw a case, and the number of ranks that share its layers."""
    t, p = draw(st.sampled_from(PLACES))
    return draw(cases(sizes=st.just(t), num_layers=p + draw(st.integers(0, 2)))), p


@given(cases_and_stages(), st.data())
def test_logits_are_those_of_the_whole_prefix(ranks, case_and_stages, data):
    """Whatever the positions: learned or rope."""
    case, p = case_and_stages
    pieces = draw_pieces(case.s, data)
    ranks.run(case.t * p, on_ranks, p, case, "float64", logits_equal_uncached, case, pieces, 1e-12)


def draw_pieces(n, data) -> list[int]:
    """Draw sizes that add up to n."""
    pieces = []
    while sum(pieces) < n:
        pieces.append(data.draw(st.integers(1, n - sum(pieces))))
    return pieces


@given(cases_and_stages(), st.sampled_from(["float64", "float32"]), st.data())
def test_every_rank_tells_the_textbooks_texts(ranks, case_and_stages, dtype, data):
    """However a token is chosen, and where a text is longer than the model's positions are. Prompts may have different
    lengths: the shortest begins, and no position is computed that no text needs.
    """
    case, p = case_and_stages
    n, sampling, first = case.model.max_position_embeddings, data.draw(st.sampled_from(SAMPLINGS)), 3
    lengths = data.draw(st.lists(st.integers(1, n), min_size=1, max_size=3))
    prompts = [case.ids(f"prompt {i}", length).tolist() for i, length in enumerate(lengths)]
    count = data.draw(st.integers(1, n + 2))
    alone = [text_of(case, prompt, count, sampling, number) for number, prompt in enumerate(prompts, first)]
    expected = alone, max(lengths) - min(lengths) + count
    assert ranks.run(case.t * p, on_ranks, p, case, dtype, texts, prompts, count, sampling, first
                     ) == [expected] * (case.t * p)


@settings(max_examples=settings().max_examples // 5)
@given(cases_and_stages())
def test_texts_by_arrays_that_behave_like_cupys(ranks, case_and_stages):
    case, p = case_and_stages
    prompt, sampling = case.ids("prompt", 1).tolist(), Sampling(0.9)
    expected = [text_of(case, prompt, 5, sampling)], 5
    assert ranks.run(case.t * p, spies_tell, p, case, [prompt], 5, sampling) == [expected] * (case.t * p)


def spies_tell(group, p, case, *asked):
    return on_ranks(group, p, case, "float64", texts, *asked, wrap=SpyArray)


@device.needs_somewhere
@settings(max_examples=settings().max_examples // 5)
@given(cases_and_stages(), st.sampled_from([np.float64, np.float32, ml_dtypes.bfloat16]), st.data())
def test_logits_on_a_gpu(ranks, case_and_stages, dtype, data):
    """Or in its emulation, where there is none."""
    case, p = case_and_stages
    tolerance = 1e-12 if dtype is np.float64 else 50 * float(ml_dtypes.finfo(dtype).eps)
    ranks.run(case.t * p, on_a_gpu, p, case, dtype, draw_pieces(case.s, data), tolerance)


def on_a_gpu(group, p, case, dtype, pieces, tolerance):
    with device.gpu(group.rank) as wrap:
        on_ranks(group, p, case, dtype, logits_equal_uncached, case, pieces, tolerance, wrap=wrap)


def test_all_ranks_report_a_model_that_has_diverged(ranks):
    case = Case(2, ModelConfig(2, 8, 2, 50, 12), 1, 12, seed=3)
    (said,) = set(ranks.run(4, refusal_on, case))
    assert said.startswith("The logits of the token at position 2 are infinite or NaN")


def refusal_on(group, case):
    def act(group):
        on_ranks(group, 2, case, "float32", generate_with_nan)

    return refusal(group, act)


def generate_with_nan(replica):
    for params in replica.params.values():
        if params.final_layernorm:
            params.final_layernorm.tensors.weight[:] = np.nan
    list(generate(replica, [[1, 2]], 3, Sampling()))
