"""The layouts of Llama, Mistral, Qwen 2 and Qwen 3 in transformers, which differ in a few fields and tensors.

Every matrix is [out, in] there. Q, K and V are matrices of their own, as are gate and up: K and V are parts of our w_kv
[h, 2, g, d], gate and up of our w_in [h, 2, f]. Heads lie in the same order, the columns of a head one after another,
and rope rotates the same pairs of them. (Those with experts: mixtral_layout.py.)
"""
import re
from dataclasses import replace
from functools import partial
from typing import Any

from mpi_impl.checkpoints.huggingface_layout import OURS_ALONE, TensorPlace, TransformersLayout, check_type, place
from reference.config import ModelConfig
from reference.config.rope_scaling import RopeScaling
from reference.errors import UserError
from reference.params import Tensor

OF_MODEL = {"embedding.word": "embed_tokens.weight", "final_layernorm.weight": "norm.weight",
            "output": "lm_head.weight"}
OF_BLOCK = {
    "input_layernorm.weight": "input_layernorm",
    "attention.w_q": "self_attn.q_proj", "attention.b_q": "self_attn.q_proj",
    "attention.w_kv": "self_attn.k_proj self_attn.v_proj", "attention.b_kv": "self_attn.k_proj self_attn.v_proj",
    "attention.q_norm.weight": "self_attn.q_norm", "attention.k_norm.weight": "self_attn.k_norm",
    "attention.w_out": "self_attn.o_proj", "post_attention_layernorm.weight": "post_attention_layernorm",
    "mlp.w_in": "mlp.gate_proj mlp.up_proj", "mlp.w_out": "mlp.down_proj",
}


def places(of_block: dict[str, str], name: str, tensor: Tensor, num_layers: int) -> list[TensorPlace]:
    """Return a tensor's places: two for keys and values, and for gate and up, else one. Each expert has its own."""
    if tensor.dealt:
        return [place._replace(name=place.name.format(i), expert=i) for i in range(tensor.shape[0])
                for place in places(of_block, name, of_one_expert(tensor), num_layers)]
    theirs, own, shape = their_names(of_block, name), name.split(".")[-1], tensor.shape
    heads = own in ("w_q", "b_q", "w_kv", "b_kv")
    if len(theirs) == 1 and not heads:
        return [place(theirs[0], tensor, transposed=own in ("w_out", "router"))]
    if len(theirs) == 2:                                     # without the axis of the two parts
        shape = (*shape[:-3], *shape[-2:]) if heads else (shape[0], shape[2])
    if heads:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    return [TensorPlace(one, shape[::-1], axis=0, length=shape[-1], transposed=len(shape) == 2,
                        part=i if len(theirs) == 2 else None, heads=heads)
            for i, one in enumerate(theirs)]


def of_one_expert(tensor: Tensor) -> Tensor:
    """Return the declaration of one expert's tensor: the inverse of Tensor.stacked."""
    return replace(tensor, shape=tensor.shape[1:], split=None if tensor.split is None else tensor.split - 1,
                   dealt=False)


def their_names(of_block: dict[str, str], name: str) -> list[str]:
    """Translate 'blocks.3.mlp.w_out' -> ['layers.3.mlp.down_proj.weight'], without the prefix."""
    if name in OF_MODEL:
        return [OF_MODEL[name]]
    _, layer, rest = name.split(".", 2)
    kind = "bias" if ".b_" in rest else "weight"
    return [f"layers.{layer}.{theirs}.{kind}" for theirs in of_block[rest].split()]


# ---- fields of config.json that say in another form what our options say --------------------------------------------

DERIVED = {"group_query_attention": "num_key_value_heads", "num_query_groups": "num_key_value_heads",
           "kv_channels": "head_dim", "rotary_base": "rope_theta", "use_rope_scaling": "rope_scaling",
           "rope_scaling_factor": "rope_scaling"}


def derive(groups: int | None, head_dim: int | None, window: int | None, path: str, found: dict[str, Any],
           config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of DERIVED. The first three are transformers' defaults for fields that may be missing."""
    a, h = config["num_attention_heads"], config["hidden_size"]
    sliding = found.get("sliding_window", window)
    if sliding is not None and found.get("use_sliding_window", window is not None):
        raise UserError(f"{path} says that sliding_window is {sliding}, but here attention sees all positions. Give a "
                        "model where it is null, or make it null if your texts are shorter.")
    groups, size = (check_type(path, name, default if found.get(name) is None else found[name], int)
                    for name, default in (("num_key_value_heads", groups or a),
                                          ("head_dim", head_dim or max(1, h // max(1, a)))))
    name = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
    parameters = check_type(path, name, found.get(name) or {}, dict)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = check_type(path, "rope_theta", parameters.get("rope_theta", found.get("rope_theta", 10_000.0)), float)
    return {"group_query_attention": True, "num_query_groups": groups, "kv_channels": None if size * a == h else size,
            "rotary_base": theta, "use_rope_scaling": kind == "llama3",
            "rope_scaling_factor": factor_of(path, kind, parameters)}


def factor_of(path: str, kind: str, parameters: dict[str, Any]) -> float:
    """Return the factor of Llama 3.1's scaling. Raise UserError for another scaling, or other constants of it."""
    known = RopeScaling(ModelConfig.rope_scaling_factor)
    if kind == "default":
        return known.factor
    constants = {"low_freq_factor": known.low_freq_factor, "high_freq_factor": known.high_freq_factor,
                 "original_max_position_embeddings": known.original}
    same = all(parameters.get(name) == value for name, value in constants.items())
    if kind != "llama3" or not same:
        raise UserError(f"{path} says that rope's scaling is {parameters}, but here it can only be llama3, with any "
                        f"factor, low_freq_factor {known.low_freq_factor:g}, high_freq_factor "
                        f"{known.high_freq_factor:g} and original_max_position_embeddings {known.original}.")
    return check_type(path, "rope's factor", parameters.get("factor"), float)


def write(head_dim: bool, model: ModelConfig) -> dict[str, Any]:
    """Return the fields for the options of DERIVED. A Qwen 2 has no head_dim."""
    scaling = model.rope_scaling and {
        "rope_type": "llama3", "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_scaling.low_freq_factor, "high_freq_factor": model.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": model.rope_scaling.original}
    return {"num_key_value_heads": model.groups, "intermediate_size": model.ffn_size,
            "rope_theta": model.rotary_base, "rope_scaling": scaling,
            **({"head_dim": model.head_size} if head_dim else {})}


# ---- the layouts ----------------------------------------------------------------------------------------------------

FIELDS = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
          "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
          "attention_dropout": 0.0}
FIXED: dict[str, tuple[Any, str]] = {"hidden_act": ("silu", "what the MLP's gate is made of")}
NO_BIAS = {"attention_bias": (False, "whether attention has biases")}


def llama_like(model_type: str, class_name: str, fields: dict[str, Any], fixed: dict[str, Any],
               options: dict[str, Any], defaults: tuple[int | None, int | None, int | None],
               head_dim: bool = True) -> TransformersLayout:
    """Return a layout. `defaults` are those of num_key_value_heads, head_dim and sliding_window."""
    return TransformersLayout(
        model_type, "gpt", {("lm",): class_name},
        same={"num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
              "num_attention_heads": "num_attention_heads", "ffn_hidden_size": "intermediate_size",
              "max_position_embeddings": "max_position_embeddings", "layernorm_epsilon": "rms_norm_eps"},
        activation=None, hidden_dropout=(), attention_dropout="attention_dropout", mlp_width=None,
        fields=FIELDS | fields, fixed=FIXED | fixed,
        options={"num_experts": None, "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True,
                 "add_qkv_bias": False, "qk_layernorm": False, "position_embedding_type": "rope", "rotary_percent": 1.0,
                 "apply_residual_connection_post_layernorm": False} | OURS_ALONE | options,
        places=partial(places, OF_BLOCK), prefix="model.", heads=("lm_head.",),
        twins={"lm_head.weight": "embed_tokens.weight"},
        buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"), derived=DERIVED,
        derive=partial(derive, *defaults), write=partial(write, head_dim))


LLAMA = llama_like("llama", "LlamaForCausalLM", {}, NO_BIAS | {
    "mlp_bias": (False, "whether the MLP has biases"),
    "pretraining_tp": (1, "into how many parts the matrices were cut in training, and are in computing")},
    {}, (None, None, None))
MISTRAL = llama_like("mistral", "MistralForCausalLM", {
    "intermediate_size": 14336, "max_position_embeddings": 131072}, {}, {}, (8, None, 4096))
QWEN_2 = llama_like("qwen2", "Qwen2ForCausalLM", {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    {"use_sliding_window": (False, "whether attention sees only a window")}, {"add_qkv_bias": True}, (32, None, None),
    head_dim=False)
QWEN_3 = llama_like("qwen3", "Qwen3ForCausalLM", {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    NO_BIAS | {"use_sliding_window": (False, "whether attention sees only a window")}, {"qk_layernorm": True},
    (32, 128, None))
