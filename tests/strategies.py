"""The strategies of hypothesis for the theorems: sizes of a model and of a batch, with a seed for the numbers."""
from math import lcm

from hypothesis import strategies as st

from reference.config import ARCHITECTURES, NORMALIZATIONS, ExpertsConfig, ModelConfig, Recompute
from reference.ops import ACTIVATIONS
from tests.cases import Case, ExactCase, close, trees_close

__all__ = ["ANY_MODEL", "SIZES", "Case", "ExactCase", "cases", "close", "instances", "recomputes", "trees_close"]

ANY_MODEL = tuple(ARCHITECTURES)
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8])
FIXED = {"activation", "hidden_size", "num_attention_heads"}     # where these are given, no model is a Llama
PAIRS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)]      # of dimensions of a head, and how many of them rope turns


def instances(replicas: int, zero_stage: int):
    """Draw the number of instances of hybrid sharding: any divisor of the replicas, with ZeRO."""
    return st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0] if zero_stage else [1])


@st.composite
def experts_configs(draw, t=1, e=1):
    """Draw the sizes of experts that can be split over t ranks and dealt out to e. With few tokens some have none."""
    n = draw(st.sampled_from([n for n in (2, 3, 4, 1) if n % e == 0] or [e]))
    k = draw(st.integers(1, min(n, 3)))
    return ExpertsConfig(n, k, (k == 1 and n > 1) or draw(st.booleans(), "pre-softmax"),
                         draw(st.sampled_from([None, 2 * t])), draw(st.integers(1, 2)),
                         draw(st.sampled_from([None, t])), draw(st.sampled_from([0.1, 0.0])),
                         draw(st.sampled_from([0.1, 0.0])))


@st.composite
def cases(draw, sizes=SIZES, integers=False, architectures=("gpt",), exact=False, llama=True, c=1, heads_of=1,
          experts=None,
          **model_choices):
    """Draw a case that is ragged on purpose: sizes that are no powers of two, vocabularies that do not divide, one
    position, one head. An exact one is small: its numbers are Python objects. c context-parallel ranks can take it, and
    `heads_of` divides the heads of each of t ranks. With `experts` some layers have experts, which can be dealt out to
    that many ranks.
    """
    architecture = draw(st.sampled_from(architectures))
    t = draw(sizes)
    heads = t * heads_of * draw(st.integers(1, 2))
    sharded = t > 1 and draw(st.booleans(), "sequence parallel")
    unit = lcm(2 * c if c > 1 else 1, c * t if sharded else 1)
    s = unit * draw(st.integers(1, 2)) if unit > 1 else draw(st.integers(1, 6))
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
        experts=draw(experts_configs(t, experts)) if experts else None,
    )
    if llama and not model_choices.keys() & FIXED and draw(st.booleans(), "Llama's choices"):
        choices |= draw(llama_choices(t, heads, choices, heads_of))
    choices |= model_choices
    kind, b = (ExactCase, draw(st.integers(1, 2))) if exact else (Case, draw(st.integers(1, 3)))
    return kind(t, ModelConfig(**choices), b, s, draw(st.integers(0, 2**32 - 1)), integers,
                sharded, sharded and draw(st.booleans(), "keep gathered inputs"))


@st.composite
def llama_choices(draw, t, heads, choices, heads_of):
    """Draw what a Llama has, or a Qwen, all or some of it."""
    kind, size = draw(st.sampled_from(["", "swiglu", "squared_relu"]), "MLP"), choices["hidden_size"] // heads
    groups = [g for g in range(1, heads + 1) if heads % g == 0
              and (g % (t * heads_of) == 0 or heads_of == 1 and t % g == 0)]
    found = dict(
        normalization=draw(st.sampled_from(NORMALIZATIONS)), add_bias_linear=not kind,
        ffn_hidden_size=t * draw(st.integers(1, 3)), add_qkv_bias=draw(st.booleans()),
        num_query_groups=draw(st.sampled_from([None, *groups])), qk_layernorm=draw(st.booleans()),
        rotary_base=draw(st.sampled_from([1e4, 5e5])), use_rope_scaling=draw(st.booleans()))
    if kind:
        found |= {kind: True, "activation": "gelu"}
    if draw(st.booleans(), "heads of another size"):
        found |= dict(hidden_size=t * draw(st.integers(2 if t == 1 else 1, 4)), kv_channels=size)
    return found


def recomputes():
    """Draw any Recompute, `none` included."""
    return st.one_of(st.sampled_from([Recompute(), Recompute("selective")]),
                     st.builds(Recompute, st.just("full"), st.sampled_from(["uniform", "block"]), st.integers(1, 3)))
