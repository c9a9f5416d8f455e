"""The key/value cache: the model that sees words one by one says what it says when it sees them all at once."""
import numpy as np
from hypothesis import given, strategies as st

from reference.generation.decoding import Sampling, generate
from reference.kv_cache import any_layer, empty_kv_cache
from reference.models.gpt import gpt_logits, gpt_tensors, next_logits
from reference.models.stage import stage_of
from tests.strategies import cases, close


@given(cases(sizes=st.just(1)), st.data())
def test_logits_are_those_of_the_whole_prefix(case, data):
    """For every prefix, in pieces of any sizes, through stages of any sizes; of several texts at a time."""
    c = case.model
    p, tokens = case.params(gpt_tensors(c)), case.ids("tokens", case.b, case.s)
    expected = gpt_logits(tokens, p, c)                                       # [b, s, V]
    stages = pieces_of(data, c.num_layers)
    kv_cache = empty_kv_cache(c, p.blocks, case.s, p.embedding.word, case.b)
    for some in pieces_of(data, case.s):
        x = tokens[:, some]
        for layers in stages:
            x = next_logits(x, stage_of(p, range(*layers.indices(c.num_layers))), c,
                            {layer: kv_cache[layer] for layer in range(*layers.indices(c.num_layers))})
        assert any_layer(kv_cache).length == some.stop
        close(x, expected[:, some.stop - 1], 1e-12)


def pieces_of(data, n) -> list[slice]:
    """Divide n anywhere."""
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return [slice(first, last) for first, last in zip([0, *cuts], [*cuts, n])]


@given(cases(sizes=st.just(1)), st.data())
def test_texts_are_drawn_token_by_token_from_the_models_distribution(case, data):
    """In a batch, too, whose prompts have different lengths. And where a text outgrows the model, each token from the
    last ones: when all positions are used up, from half.
    """
    c, n = case.model, case.model.max_position_embeddings
    lengths = data.draw(st.lists(st.integers(1, n), min_size=1, max_size=3))
    prompts = [case.ids(f"prompt {i}", length).tolist() for i, length in enumerate(lengths)]
    p, count, sampling = case.params(gpt_tensors(c)), data.draw(st.integers(1, 3 * n)), Sampling(0.7, 20, 0.9, 3)
    expected = []
    for number, prompt in enumerate(prompts, 5):
        text, seen = list(prompt), len(prompt)
        for position in range(len(prompt), len(prompt) + count):
            text.append(sampling.choose(gpt_logits(np.array([text[-seen:]]), p, c)[0, -1], position, text=number))
            seen = seen + 1 if seen < n else max(1, n // 2)
        expected.append(text[len(prompt):])
    assert generate(prompts[-1:], count, p, c, sampling, 4 + len(prompts)) == expected[-1:]
    assert generate(prompts, count, p, c, sampling, first_text=5) == expected
