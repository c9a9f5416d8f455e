"""A text on t x p ranks is the textbook's, however a word is chosen."""
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.generation.decoding import generate
from reference.config import POSITION_EMBEDDINGS, ModelConfig
from reference.exact.array import as_exact
from reference.generation.decoding import Sampling
from tests.cases import Case, ExactCase
from tests.generation.texts import Text, batch_of_texts, logits_equal_uncached, on_ranks, texts
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


@pytest.mark.parametrize("position", POSITION_EMBEDDINGS)
def test_logits_are_the_same_formulas(ranks, position):
    """On exact numbers, the logits from the KV cache equal those of the whole prefix."""
    model = ModelConfig(3, 8, 2, 10, 6, position_embedding_type=position, make_vocab_size_divisible_by=3)
    ranks.run(4, exact_logits, ExactCase(2, model, 1, 6, seed=1), [3, 1, 2])


def exact_logits(group, case, pieces):
    on_ranks(group, 2, case, np.float64, logits_equal_uncached, case, pieces, 0.0, wrap=as_exact)


def draw_pieces(n, data) -> list[int]:
    """Draw sizes that add up to n."""
    pieces = []
    while sum(pieces) < n:
        pieces.append(data.draw(st.integers(1, n - sum(pieces))))
    return pieces


@given(cases_and_stages(), st.sampled_from(["float64", "float32"]), st.data())
def test_every_rank_tells_the_textbooks_text(ranks, case_and_stages, dtype, data):
    """However a word is chosen, and where the text is longer than the model's positions are."""
    case, p = case_and_stages
    n = case.model.max_position_embeddings
    prompt = case.ids("prompt", data.draw(st.integers(1, n))).tolist()
    asked = [Text(prompt, n + 2, data.draw(st.sampled_from(SAMPLINGS)), number) for number in range(2)]
    expected = [text.from_textbook(case) for text in asked]
    assert ranks.run(case.t * p, on_ranks, p, case, dtype, texts, asked) == [expected] * (case.t * p)


@settings(max_examples=settings().max_examples // 2)
@given(cases_and_stages(), st.data())
def test_texts_of_a_batch_are_those_of_each_alone(ranks, case_and_stages, data):
    """Prompts may have different lengths: the shortest begins, and no position is computed that no text needs."""
    case, p = case_and_stages
    n, sampling, first = case.model.max_position_embeddings, data.draw(st.sampled_from(SAMPLINGS)), 3
    lengths = data.draw(st.lists(st.integers(1, n), min_size=2, max_size=3))
    prompts = [case.ids(f"prompt {i}", length).tolist() for i, length in enumerate(lengths)]
    count = data.draw(st.integers(1, n + 2))
    alone = [Text(prompt, count, sampling, number).from_textbook(case) for number, prompt in enumerate(prompts, first)]
    expected = alone, max(lengths) - min(lengths) + count
    assert ranks.run(case.t * p, on_ranks, p, case, "float64", batch_of_texts, prompts, count, sampling, first
                     ) == [expected] * (case.t * p)


@settings(max_examples=settings().max_examples // 5)
@given(cases_and_stages())
def test_texts_by_arrays_that_behave_like_cupys(ranks, case_and_stages):
    case, p = case_and_stages
    text = Text(case.ids("prompt", 1).tolist(), 5, Sampling(0.9))
    assert ranks.run(case.t * p, spies_tell, p, case, [text]) == [[text.from_textbook(case)]] * (case.t * p)


def spies_tell(group, p, case, asked):
    return on_ranks(group, p, case, "float64", texts, asked, wrap=SpyArray)


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


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("t, p", [(1, 1), (2, 2)])
def test_in_16_bits_logits_are_near(ranks, t, p, dtype):
    case = Case(t, ModelConfig(4, 32, 4, 50, 12, position_embedding_type="rope"), 1, 12, seed=3)
    tolerance = 20 * float(ml_dtypes.finfo(dtype).eps)
    ranks.run(t * p, on_ranks, p, case, dtype, logits_equal_uncached, case, [5, 1, 1, 4, 1], tolerance)


def test_texts_are_independent(ranks):
    """Those of another number or seed are others; the same ones are the same."""
    case = Case(1, ModelConfig(2, 16, 4, 50, 12), 1, 12, seed=3)
    asked = [Text([1], 11, Sampling()), Text([1], 11, Sampling()), Text([1], 11, Sampling(), 1),
             Text([1], 11, Sampling(seed=5))]
    one, again, *others = ranks.run(1, on_ranks, 1, case, "float32", texts, asked)[0]
    assert one == again and len({tuple(text) for text in (one, *others)}) == 3


def test_all_ranks_report_a_model_that_has_diverged(ranks):
    case = Case(2, ModelConfig(2, 8, 2, 50, 12), 1, 12, seed=3)
    said = ranks.run(4, refusal_on, case)
    assert said == ["The logits of the token at position 2 are infinite or NaN: the model has diverged, or "
                    "needs a format with a larger range than its --dtype."] * 4


def refusal_on(group, case):
    def act(group):
        on_ranks(group, 2, case, "float32", generate_with_nan)

    return refusal(group, act)


def generate_with_nan(replica):
    for params in replica.params.values():
        if params.final_layernorm:
            params.final_layernorm.tensors.weight[:] = np.nan
    list(generate(replica, [[1, 2]], 3, Sampling()))
