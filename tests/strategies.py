"""The strategies of hypothesis for the theorems: sizes of a model and of a batch, with a seed for the numbers."""
from math import lcm

from hypothesis import strategies as st

from reference.config import ARCHITECTURES, ModelConfig, Recompute
from reference.ops import ACTIVATIONS
from tests.cases import Case, ExactCase, close, trees_close
from tests.sampled_runs import experts_choices, llama_choices

__all__ = ["ANY_MODEL", "SIZES", "Case", "ExactCase", "cases", "close", "instances", "recomputes", "trees_close"]

ANY_MODEL = tuple(ARCHITECTURES)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8])
FIXED = {"activation", "hidden_size", "num_attention_heads"}     # where these are given, no model is a Llama
PAIRS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]      # of dimensions of a head, and how many of them rope turns


def instances(replicas: int, zero_stage: int):
    """Draw the number of instances of hybrid sharding: any divisor of the replicas, with ZeRO."""
    return st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0] if zero_stage else [1])


@st.composite
def cases(draw, sizes=SIZES, integers=False, architectures=("gpt",), exact=False, llama=True, c=1, heads_of=1,
          experts=None,
          **model_choices):
    """Draw a case that is ragged on purpose: sizes that are no powers of two, vocabularies that do not divide, one
    position, one head. An exact one is small: its numbers are Python objects. c context-parallel ranks can take it, and
    `heads_of` divides the heads of each of t ranks. With `experts` some layers have experts, which can be dealt out to
    that many ranks.
    """
    def pick(*values):
        return draw(st.sampled_from(values))

    architecture = pick(*architectures)
    t = draw(sizes)
    heads = t * heads_of * draw(st.integers(1, 2))
    sharded = t > 1 and draw(st.booleans(), "sequence parallel")
    unit = lcm(2 * c if c > 1 else 1, c * t if sharded else 1)
    s = unit * draw(st.integers(1, 2)) if unit > 1 else draw(st.integers(1, 6))
    pairs, turned = pick(*PAIRS[:3] if exact else PAIRS)
    choices = dict(
        num_layers=draw(st.integers(1, 3)), hidden_size=heads * 2 * pairs, rotary_percent=turned / pairs,
        num_attention_heads=heads, vocab_size=draw(st.integers(2, 10 if exact else 40)),
        max_position_embeddings=s + draw(st.integers(0, 2)),
        position_embedding_type=pick("learned_absolute", "rope"),
        architecture=architecture, heads=pick(*ARCHITECTURES[architecture]),
        predicted_share=pick(1.0, 0.5, 0.15) if architecture == "bert" else 1.0,
        apply_residual_connection_post_layernorm=draw(st.booleans()),
        untie_embeddings_and_output_weights=architecture == "gpt" and draw(st.booleans()),
        activation=pick(*sorted(ACTIVATIONS)),
        make_vocab_size_divisible_by=draw(st.integers(1, 5)),
        hidden_dropout=pick(0.0, 0.1, 0.5), attention_dropout=pick(0.0, 0.1, 0.5),
        experts=experts_choices(pick, t, experts) if experts else None,
    )
    if llama and not model_choices.keys() & FIXED and draw(st.booleans(), "Llama's choices"):
        choices |= llama_choices(pick, t, heads, 2 * pairs, heads_of)
    choices |= model_choices
    kind, b = (ExactCase, draw(st.integers(1, 2))) if exact else (Case, draw(st.integers(1, 3)))
    return kind(t, ModelConfig(**choices), b, s, draw(st.integers(0, 2**32 - 1)), integers,
                sharded, sharded and draw(st.booleans(), "keep gathered inputs"))


def recomputes():
    """Draw any Recompute, `none` included."""
    return st.one_of(st.sampled_from([Recompute(), Recompute("selective")]),
                     st.builds(Recompute, st.just("full"), st.sampled_from(["uniform", "block"]), st.integers(1, 3)))
