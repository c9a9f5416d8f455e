"""The layouts of the Llama family: what transformers has saved computes and learns the same here, on any topology.

Where transformers is not installed, tests/checkpoints/llama_golden.json says what it has computed.
"""
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.checkpoints.huggingface import places_of
from mpi_impl.checkpoints.huggingface_config import (adopt_options, config_of, layout_of, model_of as model_from,
                                                     read_config)
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.programs.arguments import parse
from reference.config import ModelConfig
from reference.errors import UserError
from tests.cases import Case, Plan
from tests.checkpoints.bert_runs import Run, learn_and_save as learn_any_and_save
from tests.checkpoints.gpt2_runs import (P, T, empty, learn_and_save, options, same_tensors, taking_turns, weights_of,
                                         write_model)
from tests.checkpoints.llama_golden import STEPS, TOKENS
from tests.checkpoints.llama_runs import GOLDEN_MODELS, equal_golden, is_refused, learn_on

SAID = ("num_layers", "hidden_size", "num_attention_heads", "groups", "head_size", "ffn_size", "vocab_size", "tied",
        "add_qkv_bias", "qk_layernorm", "rope_scaling", "rotary_base", "layernorm_epsilon")      # by a config.json
TOPOLOGIES = [      # ranks, and options
    (1, ""),
    (2, f"{T} 2"),
    (4, f"{T} 4 --sequence-parallel --make-vocab-size-divisible-by 1"),     # two or four ranks hold copies of a head
    (4, f"{T} 4 --zero-stage 0"),
    (2, f"{P} 2"),
    (4, f"{T} 2 {P} 2 --sequence-parallel --pipeline-schedule zb-h1"),
    (4, "--zero-stage 3 --cpu-offload"),
    (8, f"{T} 4 --zero-stage 1"),
]


@pytest.fixture
def folder(kind, tmp_path):
    return write_model(tmp_path / "theirs", GOLDEN_MODELS[kind]["config"], weights_of(GOLDEN_MODELS[kind]))


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(GOLDEN_MODELS), TOPOLOGIES))
def test_golden_logits_loss_gradients_and_steps(ranks, kind, folder, n, more):
    """They equal transformers', to rounding; the logits one by one, from the KV cache."""
    found = ranks.run(n, learn_on, folder, more, [np.array(TOKENS)] * STEPS)
    equal_golden(found, GOLDEN_MODELS[kind], folder)


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(GOLDEN_MODELS, reverse=True), TOPOLOGIES))
def test_what_is_saved_is_what_was_loaded(ranks, kind, folder, tmp_path, n, more):
    """Bitwise identical tensors, of the same names; and a config.json that says the same. (A Mistral is a Llama.)"""
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(folder, more), 0, again)
    same_tensors(again, folder)
    ours, theirs = (read_config(place, "gpt") for place in (again, folder))
    kinds = [config.pop("model_type") for config in (ours, theirs)]
    assert ours == theirs and kinds[0] == kinds[1].replace("mistral", "llama")
    assert adopt_options(again, "gpt", {}).items() >= {"swiglu": True, "normalization": "RMSNorm"}.items()


@st.composite
def llamas(draw):
    """Draw a Llama, a Qwen 2 or a Qwen 3 of ragged sizes, and its ranks."""
    t, d = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 2)]))
    p = draw(st.integers(1, 8 // (t * d)))
    heads = t * draw(st.integers(1, 2))
    groups = [g for g in range(1, heads + 1) if heads % g == 0 and (g % t == 0 or t % g == 0)]
    model = ModelConfig(
        p + draw(st.integers(0, 1)), t * draw(st.integers(1, 4)), heads, draw(st.integers(2, 40)), 6,
        normalization="RMSNorm", swiglu=True, add_bias_linear=False, ffn_hidden_size=t * draw(st.integers(1, 3)),
        num_query_groups=draw(st.sampled_from(groups)), kv_channels=2 * draw(st.integers(1, 3)),
        **draw(st.sampled_from([{}, {"add_qkv_bias": True}, {"qk_layernorm": True}])),
        position_embedding_type="rope", use_rope_scaling=draw(st.booleans()), rope_scaling_factor=32.0,
        untie_embeddings_and_output_weights=draw(st.booleans()), hidden_dropout=0.0, attention_dropout=0.0,
        make_vocab_size_divisible_by=draw(st.integers(1, 5)))
    if model.add_qkv_bias:      # a Qwen 2 has no head_dim
        model = replace(model, hidden_size=heads * model.head_size, kv_channels=None)
    plan = Plan(p, bucket_size=draw(st.sampled_from([1, 100, 1000])), zero_stage=draw(st.integers(0, 3)))
    return Run(model, t, d, plan, False)


@settings(max_examples=settings().max_examples // 2)
@given(llamas())
def test_any_llama_on_any_ranks_is_saved_as_it_was_loaded(ranks, run):
    """Bitwise, for any sizes, groups, and padding of the vocabulary."""
    case, full_name = Case(1, run.model, 1, 3, 1), layout_of(run.model).full_name
    tensors = {full_name(place.name): case.array(place.name, *place.shape)
               for _, _, places in places_of(run.model) for place in places}
    with tempfile.TemporaryDirectory() as root:
        config = config_of(run.model, NullTokenizer(3), "float64")
        folder, again = write_model(Path(root, "model"), config, tensors), empty(Path(root, "again"))
        read = model_from(read_config(str(folder), "gpt"))
        assert all(getattr(read, name) == getattr(run.model, name) for name in SAID), read
        ranks.run(run.n, learn_any_and_save, run, folder, 0, again)
        same_tensors(again, folder)


@pytest.mark.parametrize("kind, changed, sentence", [
    ("Mistral", {"sliding_window": 4096}, "says that sliding_window is 4096, but here attention sees all positions."),
    ("Mistral", {"sliding_window": ...}, "says that sliding_window is 4096, but here attention sees all positions."),
    ("Qwen2", {"use_sliding_window": True}, "says that use_sliding_window is True, but here it can only be False"),
    ("Llama", {"attention_bias": True}, "says that attention_bias is True, but here it can only be False"),
    ("Llama", {"hidden_act": "gelu"}, "says that hidden_act is 'gelu', but here it can only be silu"),
    ("Llama", {"num_key_value_heads": 3}, "config.json asks for a model that cannot be: num_key_value_heads is 3, but "
        "must divide num_attention_heads"),
    ("Llama", {"head_dim": -1}, "config.json asks for a model that cannot be: head_dim is -1, but must be at least 1."),
    ("Llama", {"vocab_size": 0}, "config.json asks for a model that cannot be: vocab_size is 0, but must be"),
    ("Llama", {"attention_dropout": 1.0}, "cannot be: attention_dropout is 1.0, but must be in [0, 1)"),
    ("Llama", {"max_position_embeddings": 1}, "--max-position-embeddings is 1 in the config.json of "),
    ("Llama", {"rope_parameters": 2.0}, "config.json says that rope_parameters is 2.0, but it must be an object."),
    ("Llama", {"rope_parameters": None, "rope_scaling": 2.0}, "that rope_scaling is 2.0, but it must be an object."),
    ("Llama", {"rope_parameters": {"rope_theta": 10**400}}, "but it must be a number."),
    ("Llama", {"num_key_value_heads": "2"}, "num_key_value_heads is '2', but it must be a whole number."),
    ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "but here it can only be llama3"),
    ("Llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x', but it must be a number."),
    ("Qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "can only be llama3"),
    ("Llama", {"num_hidden_layers": 3}, "has no tensor layers.2."),
    ("Llama", {"head_dim": 4}, "but the folder's config.json asks for [16, 8]."),
    ("Qwen3", {"model_type": "llama"}, "has a tensor layers.0.self_attn.k_norm.weight, for which the model"),
    ("Llama", {"model_type": "qwen2"}, "has no tensor layers.0.self_attn.q_proj.bias"),
])
def test_other_models_are_refused(ranks, kind, folder, changed, sentence):
    config = {name: value for name, value in (GOLDEN_MODELS[kind]["config"] | changed).items() if value is not ...}
    is_refused(ranks, folder, config, sentence)


@pytest.mark.parametrize("kind, given, sentence", [
    ("Llama", "--num-query-groups 4 --group-query-attention", "--num-query-groups is 4, but"),
    ("Llama", "--rotary-base 1e4", "--rotary-base is 10000.0, but"),
    ("Qwen2", "--qk-layernorm", "--qk-layernorm is True"),
    ("Qwen3", "--normalization LayerNorm", "--normalization is LayerNorm, but")])
def test_an_option_that_says_something_else_is_refused(kind, folder, given, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(options(folder, given), 1)


def test_the_older_form_of_ropes_fields(tmp_path):
    """Before transformers 5: rope_theta and rope_scaling beside the others."""
    config = GOLDEN_MODELS["Llama"]["config"]
    rope = config["rope_parameters"]
    older = {name: x for name, x in config.items() if name != "rope_parameters"} | {
        "rope_theta": rope["rope_theta"], "rope_scaling": {name: x for name, x in rope.items() if name != "rope_theta"}}
    found = [read_config(write_model(tmp_path / str(i), one, {"x": np.zeros(1)}), "gpt")
             for i, one in enumerate((config, older))]
    assert found[0] == found[1] and found[0]["derived"]["use_rope_scaling"]


@pytest.mark.parametrize("options_, sentence", [
    ("--swiglu --disable-bias-linear", "--save-hf writes a llama, where --normalization is RMSNorm, but it is Layer"),
    ("--position-embedding-type rope", "--save-hf writes a gpt2, where --position-embedding-type is learned_absolute")])
def test_what_transformers_cannot_express_is_refused(tmp_path, options_, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(["--save-hf", str(tmp_path), *options_.split(), "--position-embedding-type", "rope"], 1)
