"""The layouts with experts: what transformers has saved computes and learns the same here, on any topology.

Where transformers is not installed, tests/checkpoints/mixtral_golden.json says what it has computed.
"""
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.checkpoints.huggingface import places_of
from mpi_impl.checkpoints.huggingface_config import (config_of, layout_of, model_of as model_from, options_of,
                                                     read_config)
from mpi_impl.data.tokenizer import NullTokenizer
from mpi_impl.programs.arguments import parse
from reference.config import ExpertsConfig, ModelConfig
from reference.errors import UserError
from tests.cases import Case
from tests.checkpoints.gpt2_runs import (P, T, empty, learn_and_save, options, same_tensors, taking_turns, weights_of,
                                         write_model)
from tests.checkpoints.llama_golden import STEPS, TOKENS
from tests.checkpoints.llama_runs import equal_golden, is_refused, learn_on, model_of
from tests.checkpoints.mixtral_golden import GOLDEN

GOLDEN_MODELS = json.loads(GOLDEN.read_text())
E, C = "--expert-model-parallel-size", "--context-parallel-size"
TOPOLOGIES = [      # ranks, e, and further options
    (1, 1, ""),
    (2, 2, ""),
    (4, 2, f"{T} 2"),
    (4, 2, "--zero-stage 3"),
    (4, 1, f"{T} 2 {P} 2 --sequence-parallel"),
    (8, 2, f"{T} 2 {P} 2 --sequence-parallel --zero-stage 1"),
    (8, 2, f"{T} 4 --zero-stage 2"),
]


@pytest.fixture
def folder(kind, tmp_path):
    return write_model(tmp_path / "theirs", GOLDEN_MODELS[kind]["config"], weights_of(GOLDEN_MODELS[kind]))


@pytest.mark.parametrize("kind, n, e, more", taking_turns(sorted(GOLDEN_MODELS), TOPOLOGIES))
def test_golden_logits_loss_gradients_and_steps(ranks, kind, folder, n, e, more):
    """They equal transformers', to rounding."""
    found = ranks.run(n, learn_on, folder, f"{more} {E} {e}", [np.array(TOKENS)] * STEPS)
    equal_golden(found, GOLDEN_MODELS[kind], folder, e)


@pytest.mark.parametrize("kind, n, e, more", taking_turns(sorted(GOLDEN_MODELS, reverse=True), TOPOLOGIES))
def test_what_is_saved_is_what_was_loaded(ranks, kind, folder, tmp_path, n, e, more):
    """Bitwise identical tensors, of the same names; and a config.json that says the same."""
    again = empty(tmp_path / "again")
    ranks.run(n, learn_and_save, options(folder, f"{more} {E} {e}"), 0, again)
    same_tensors(again, folder)
    assert read_config(again, "gpt") == read_config(folder, "gpt")


@st.composite
def mixtures(draw):
    """Draw a Mixtral or a Qwen 3 with experts, of ragged sizes, and its ranks: t, c, d, p and e."""
    t, c, d, p, e = draw(st.sampled_from([(1, 1, 2, 1, 2), (1, 1, 4, 1, 2), (2, 1, 3, 1, 3), (1, 2, 1, 2, 2),
                                          (2, 2, 2, 1, 4), (2, 1, 2, 2, 2), (1, 2, 2, 1, 2)]))
    width = st.integers(1, 3).map(lambda n: n * t)
    experts = e * draw(st.integers(1, 2))
    choices = draw(st.sampled_from([{"qk_layernorm": False}, {"qk_layernorm": True}]))
    model = ModelConfig(
        p + draw(st.integers(0, 1)), draw(width), 2 * t, draw(st.integers(2, 40)), 4, normalization="RMSNorm",
        swiglu=True, add_bias_linear=False, num_query_groups=draw(st.sampled_from([t, 2 * t])), kv_channels=4,
        ffn_hidden_size=draw(width), position_embedding_type="rope", **choices,
        untie_embeddings_and_output_weights=draw(st.booleans()),
        experts=ExpertsConfig(experts, draw(st.integers(2, experts)), moe_ffn_hidden_size=draw(st.none() | width),
                              moe_router_pre_softmax=choices["qk_layernorm"] and draw(st.booleans())))
    return model, t * c * d * p, (f"{T} {t} {C} {c} {P} {p} {E} {e} --zero-stage {draw(st.integers(0, 3))} "
                                  f"--make-vocab-size-divisible-by {draw(st.integers(1, 5))}")


@settings(max_examples=settings().max_examples // 3)
@given(mixtures())
def test_any_model_on_any_ranks_is_saved_as_it_was_loaded(ranks, drawn):
    """Bitwise, for any sizes, and any number of ranks that share the experts or hold copies."""
    model, n, more = drawn
    case, layout = Case(1, model, 1, 3, 1), layout_of(model)
    tensors = {layout.full_name(place.name): case.array(place.name, *place.shape)
               for _, _, places in places_of(model) for place in places}
    with tempfile.TemporaryDirectory() as root:
        config = config_of(model, NullTokenizer(3), "float64")
        folder, again = write_model(Path(root, "model"), config, tensors), empty(Path(root, "again"))
        said, wanted = options_of(model_from(read_config(str(folder), "gpt"))), options_of(model)
        for name in ("num_experts", "moe_router_topk", "moe_router_pre_softmax", "qk_layernorm", "hidden_size"):
            assert said[name] == wanted[name]
        assert said["moe_ffn_hidden_size"] == (wanted["moe_ffn_hidden_size"] or wanted["ffn_hidden_size"])
        ranks.run(n, learn_and_save, options(folder, more), 0, again)
        same_tensors(again, folder)


@pytest.mark.parametrize("kind, changed, sentence", [
    ("Mixtral", {"num_local_experts": 3}, "has layers.0.block_sparse_moe.gate.weight as [4, 8], but"),
    ("Mixtral", {"num_local_experts": 9999}, "asks for 9,999 experts, but model.safetensors has"),
    ("Mixtral", {"num_experts_per_tok": 5}, "--moe-router-topk is 5, but --num-experts is 4"),
    ("Mixtral", {"sliding_window": 4}, "sliding_window is 4, but here it can only be None"),
    ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, but here it can only be 0.0"),
    ("Mixtral", {"intermediate_size": 6}, "has layers.0.block_sparse_moe.experts.0.w1.weight as [12, 8], but"),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, but here it can only be 1"),
    ("Qwen3Moe", {"mlp_only_layers": [1]}, "mlp_only_layers is [1], but here every layer has experts."),
    ("Qwen3Moe", {"moe_intermediate_size": 9}, "has layers.0.mlp.experts.0.gate_proj.weight as [8, 8], but"),
    ("Qwen3Moe", {"model_type": "qwen3"}, "has no tensor layers.0.mlp.gate_proj.weight"),
])
def test_other_models_are_refused(ranks, kind, folder, changed, sentence):
    is_refused(ranks, folder, GOLDEN_MODELS[kind]["config"] | changed, sentence)


@pytest.mark.parametrize("kind, given, sentence", [
    ("Mixtral", "--num-experts 8", "--num-experts is 8, but .* says that num_local_experts is 4"),
    ("Mixtral", "--moe-layer-freq 2", "--moe-layer-freq is 2, but .* model_type is mixtral, where it is 1"),
    ("Qwen3Moe", "--moe-ffn-hidden-size 4", "--moe-ffn-hidden-size is 4, but .* moe_intermediate_size is 8"),
    ("Mixtral", f"{E} 3", "--expert-model-parallel-size is 3, but")])
def test_an_option_that_says_something_else_is_refused(kind, folder, given, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(options(folder, given), 1)


def test_the_experts_options_that_are_no_part_of_the_model(folder_of_a_mixtral):
    """They count: the coefficients of losses, and the capacity."""
    given = "--moe-aux-loss-coeff 0.25 --moe-z-loss-coeff 0.5 --moe-expert-capacity-factor 2"
    found = parse(options(folder_of_a_mixtral, given), 1).model(11).experts
    assert found == ExpertsConfig(4, 2, moe_ffn_hidden_size=12, moe_aux_loss_coeff=0.25, moe_z_loss_coeff=0.5,
                                  moe_expert_capacity_factor=2.0)
    assert model_of(folder_of_a_mixtral).experts.moe_aux_loss_coeff == 0


@pytest.mark.parametrize("kind, older", [
    ("Mixtral", lambda config: {name: x for name, x in config.items() if name != "rope_parameters"}),    # 1e6, as here
    ("Qwen3Moe", lambda config: {"num_experts" if name == "num_local_experts" else name: x
                                 for name, x in config.items()})])
def test_the_older_form_of_fields(kind, older, folder, tmp_path):
    """Before transformers 5. A Mixtral's rope has a base of its own where none is given."""
    config = GOLDEN_MODELS[kind]["config"]
    again = write_model(tmp_path / "older", older(config), {"x": np.zeros(1)})
    assert older(config) != config and read_config(again, "gpt") == read_config(folder, "gpt")


@pytest.fixture
def folder_of_a_mixtral(tmp_path):
    golden = GOLDEN_MODELS["Mixtral"]
    return write_model(tmp_path / "mixtral", golden["config"], weights_of(golden))


@pytest.mark.parametrize("options_, sentence", [
    ("", "--save-hf writes a gpt2, where --num-experts is not given, but it is 4."),
    ("--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --moe-layer-freq 2",
     "--save-hf writes a mixtral, where --moe-layer-freq is 1, but it is 2.")])
def test_what_transformers_cannot_express_is_refused(tmp_path, options_, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(["--save-hf", str(tmp_path), "--num-experts", "4", *options_.split()], 1)
