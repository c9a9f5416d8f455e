"""The strategies of hypothesis for the theorems: sizes of a model and of a batch, with a seed for the numbers."""
from hypothesis import strategies as st

from reference.config import ARCHITECTURES, ModelConfig, Recompute
from reference.ops import ACTIVATIONS
from tests.cases import Case, ExactCase, close, trees_close

__all__ = ["ANY_MODEL", "SIZES", "Case", "ExactCase", "cases", "close", "recomputes", "trees_close"]

ANY_MODEL = tuple(ARCHITECTURES)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8])
PAIRS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]      # of dimensions of a head, and how many of them rope turns


@st.composite
def cases(draw, sizes=SIZES, integers=False, architectures=("gpt",), exact=False, **model_choices):
    """Draw a case that is ragged on purpose: sizes that are no powers of two, vocabularies that do not divide, one
    position, one head. An exact one is small: its numbers are Python objects.
    """
    architecture = draw(st.sampled_from(architectures))
    t = draw(sizes)
    heads = t * draw(st.integers(1, 2))
    sharded = t > 1 and draw(st.booleans(), "sequence parallel")
    s = t * draw(st.integers(1, 2)) if sharded else draw(st.integers(1, 6))
    pairs, turned = draw(st.sampled_from(PAIRS[:3] if exact else PAIRS))
    choices = dict(
        num_layers=draw(st.integers(1, 3)), hidden_size=heads * 2 * pairs, rotary_percent=turned / pairs,
        num_attention_heads=heads, vocab_size=draw(st.integers(2, 10 if exact else 40)),
        max_position_embeddings=s + draw(st.integers(0, 2)),
        position_embedding_type=draw(st.sampled_from(["learned_absolute", "rope"])),
        architecture=architecture, heads=draw(st.sampled_from(ARCHITECTURES[architecture])),
        apply_residual_connection_post_layernorm=draw(st.booleans()),
        untie_embeddings_and_output_weights=architecture == "gpt" and draw(st.booleans()),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        make_vocab_size_divisible_by=draw(st.integers(1, 5)),
        hidden_dropout=draw(st.sampled_from([0.0, 0.1, 0.5])), attention_dropout=draw(st.sampled_from([0.0, 0.1, 0.5])),
    ) | model_choices
    kind, b = (ExactCase, draw(st.integers(1, 2))) if exact else (Case, draw(st.integers(1, 3)))
    return kind(t, ModelConfig(**choices), b, s, draw(st.integers(0, 2**32 - 1)), integers,
                sharded, sharded and draw(st.booleans(), "keep gathered inputs"))


def recomputes():
    """Draw any Recompute, `none` included."""
    return st.one_of(st.sampled_from([Recompute(), Recompute("selective")]),
                     st.builds(Recompute, st.just("full"), st.sampled_from(["uniform", "block"]), st.integers(1, 3)))
