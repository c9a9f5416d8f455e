"""The layouts of Mixtral and of Qwen 3 with experts in transformers: a Llama's, but for the MLP's place.

There each expert's gate, up and down are matrices of their own, [out, in]; here those of all experts are one tensor
with the experts as its first axis. The router is [E, h] there. (transformers 5 stacks the experts, too, but only in
memory: its files are as they always were.)

The coefficient of the load-balancing loss is not a part of the model, and is not adopted. Theirs is another loss: over
the tokens of all layers and sequences of a microbatch together, and it is in their loss only with output_router_logits.
"""
from functools import partial
from typing import Any

from mpi_impl.checkpoints.huggingface_layout import TransformersLayout
from mpi_impl.checkpoints.llama_layout import MISTRAL, OF_BLOCK, QWEN_3, derive, places, write
from reference.config import ModelConfig
from reference.errors import UserError

IN_MIXTRAL = {"mlp.router": "block_sparse_moe.gate",
              "mlp.experts.w_in": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
              "mlp.experts.w_out": "block_sparse_moe.experts.{}.w2"}
IN_QWEN = {"mlp.router": "mlp.gate",
           "mlp.experts.w_in": "mlp.experts.{}.gate_proj mlp.experts.{}.up_proj",
           "mlp.experts.w_out": "mlp.experts.{}.down_proj"}
EVERY_LAYER = {"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": None}


OF_QWEN = {"num_key_value_heads": 4, "head_dim": None, "use_sliding_window": False, "sliding_window": 4096}
OF_MIXTRAL = {"num_key_value_heads": 8, "head_dim": None, "sliding_window": None, "rope_theta": 1e6}


def derive_qwen(path: str, found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a Qwen 3, and whether weights are softmax over all experts."""
    alone = found.get("mlp_only_layers") or []
    if alone:
        raise UserError(f"{path} says that mlp_only_layers is {alone}, but here every layer has experts. Give a model "
                        "where it is empty.")
    return derive(OF_QWEN, path, found, config) | {"moe_router_pre_softmax": not config["norm_topk_prob"]}


def write_mixtral(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a Mixtral: the only width is the experts'."""
    assert model.experts is not None
    return write(OF_MIXTRAL, model) | {"intermediate_size": model.experts.moe_ffn_hidden_size or model.ffn_size}


def write_qwen(model: ModelConfig) -> dict[str, Any]:
    assert model.experts is not None
    return write(OF_QWEN, model) | {"moe_intermediate_size": model.experts.moe_ffn_hidden_size or model.ffn_size,
                                    "norm_topk_prob": not model.experts.moe_router_pre_softmax, "mlp_only_layers": []}


def with_experts(llama: TransformersLayout, model_type: str, class_name: str, of_block: dict[str, str],
                 **changes: Any) -> TransformersLayout:
    """Return a layout of the Llama family with experts in the MLP's place. In `changes` some dicts are additions."""
    options = {name: value for name, value in llama.options.items() if name != "num_experts"}
    for name in ("same", "fields", "fixed", "derived"):
        changes[name] = getattr(llama, name) | changes.get(name, {})
    return llama._replace(model_type=model_type, classes={("lm",): class_name},
                          options=options | EVERY_LAYER | changes.pop("options", {}),
                          places=partial(places, OF_BLOCK | of_block), **changes)


MIXTRAL = with_experts(
    MISTRAL, "mixtral", "MixtralForCausalLM", IN_MIXTRAL,
    same={"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok",
          "moe_ffn_hidden_size": "intermediate_size"},
    fields={"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    fixed={"router_jitter_noise": (0.0, "how far training distorts what the router sees")},
    aliases={"num_experts": "num_local_experts"}, options={"moe_router_pre_softmax": False},
    derive=partial(derive, OF_MIXTRAL), write=write_mixtral)
QWEN_3_MOE = with_experts(
    QWEN_3, "qwen3_moe", "Qwen3MoeForCausalLM", IN_QWEN,
    same={"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok",
          "moe_ffn_hidden_size": "moe_intermediate_size"},
    fields={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
            "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144},
    fixed={"decoder_sparse_step": (1, "which layers have experts")},
    aliases={"num_local_experts": "num_experts"}, derived={"moe_router_pre_softmax": "norm_topk_prob"},
    derive=derive_qwen, write=write_qwen)
