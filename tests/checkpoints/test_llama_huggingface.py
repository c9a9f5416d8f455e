"""The layouts of the Llama family: what transformers has saved computes and learns the same here, on any topology.

Where transformers is not installed, tests/checkpoints/llama_golden.json says what it has computed.
"""
import json

import numpy as np
import pytest

from mpi_impl.checkpoints.huggingface_config import CONFIG, adopt_options, read_config
from mpi_impl.programs.arguments import parse
from reference.errors import UserError
from reference.models.gpt import gpt_tensors
from tests.checkpoints.gpt2_golden import direction
from tests.checkpoints.gpt2_runs import (P, T, empty, learn_and_save, options, same_tensors, taking_turns, weights_of,
                                         write_model)
from tests.checkpoints.llama_golden import STEPS, TOKENS
from tests.checkpoints.llama_runs import GOLDEN_MODELS, in_their_layout, learn_on
from tests.strategies import close

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


def model_of(folder):
    settings = parse(options(folder), 1)
    return settings.model(read_config(folder, "gpt")["vocab_size"])


@pytest.mark.parametrize("kind, n, more", taking_turns(sorted(GOLDEN_MODELS), TOPOLOGIES))
def test_golden_logits_loss_gradients_and_steps(ranks, kind, folder, n, more):
    """They equal transformers', to rounding; the logits one by one, from the KV cache."""
    golden = GOLDEN_MODELS[kind]
    found = ranks.run(n, learn_on, folder, more, [np.array(TOKENS)] * STEPS)
    for one in found:
        close(np.array(one.loss), np.array(golden["loss"]), 1e-13)
        if one.logits[0] is not None:
            close(np.stack(one.logits)[:, :golden["config"]["vocab_size"]], np.array(golden["logits"]), 1e-13)
    tensors = gpt_tensors(model_of(folder))
    for ranks_found, expected, tolerance in ((found, golden["gradients"], 1e-12),
                                             ([one.steps for one in found], golden["after"], 1e-9)):
        ours = in_their_layout(ranks_found, tensors, golden["config"]["model_type"])
        assert ours.keys() == expected.keys()
        for name, x in ours.items():
            along = (x * direction(name, golden["tensors"][name])).sum()
            close(np.array(along), np.array(expected[name]), tolerance)


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


@pytest.mark.parametrize("kind, changed, sentence", [
    ("Mistral", {"sliding_window": 4096}, "says that sliding_window is 4096, but here attention sees all positions."),
    ("Mistral", {"sliding_window": ...}, "says that sliding_window is 4096, but here attention sees all positions."),
    ("Qwen2", {"use_sliding_window": True}, "says that use_sliding_window is True, but here it can only be False"),
    ("Llama", {"attention_bias": True}, "says that attention_bias is True, but here it can only be False"),
    ("Llama", {"hidden_act": "gelu"}, "says that hidden_act is 'gelu', but here it can only be silu"),
    ("Llama", {"num_key_value_heads": 3}, "--num-query-groups is 3, but must divide --num-attention-heads"),
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
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(Exception, match=".*") as caught:
        ranks.run(1, learn_on, folder, "", [np.array(TOKENS)])
    assert sentence in str(caught.value)


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
