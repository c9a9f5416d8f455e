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


# Fields that are read here, with the type of each, where it is not null.
TYPES = {"num_key_value_heads": int, "head_dim": int, "sliding_window": int, "use_sliding_window": bool,
         "max_window_layers": int, "layer_types": list, "rope_theta": float, "rope_parameters": dict,
         "rope_scaling": dict, "partial_rotary_factor": float, "original_max_position_embeddings": int}
ROPE = {"rope_theta": 10_000.0, "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None,
        "original_max_position_embeddings": None}


def derive(defaults: dict[str, Any], path: str, found: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of DERIVED. Raise UserError for attention or rope that is not built here.

    `defaults` are the fields of this model_type, next to rope's. transformers ignores a field of another one, and so do
    we: `use_sliding_window` switches off a Qwen's window, but not a Mistral's.
    """
    read = {name: None if (value := found.get(name, default)) is None else check_type(path, name, value, TYPES[name])
            for name, default in (ROPE | defaults).items()}
    check_window(path, read, config)
    a, h = config["num_attention_heads"], config["hidden_size"]
    groups, size = read["num_key_value_heads"], read["head_dim"]
    size = max(1, h // max(1, a)) if size is None else size
    if size % 2:
        raise UserError(f"{path} says that head_dim is {size} (if it is missing or null, it is hidden_size / "
                        "num_attention_heads), but rope rotates pairs of columns. Give a model where it is even.")
    return {"group_query_attention": True, "num_query_groups": a if groups is None else groups,
            "kv_channels": None if size * a == h else size, **derive_rope(path, read, config)}


def check_window(path: str, read: dict[str, Any], config: dict[str, Any]) -> None:
    """Raise UserError if some layer's attention does not see all positions of the longest text."""
    layers, types, window = config["num_hidden_layers"], read.get("layer_types"), read.get("sliding_window")
    if types is not None and types != ["full_attention"] * layers:
        raise UserError(f"{path} says that layer_types is {types}, but here attention sees all positions. Give a model "
                        f"where it is null, or full_attention for each of the {layers} layers.")
    slides = read.get("use_sliding_window", True) and types is None and read.get("max_window_layers", 0) < layers
    if slides and window is not None and window < config["max_position_embeddings"]:
        raise UserError(f"{path} says that sliding_window is {window}, but here attention sees all positions. Give a "
                        "model where it is null, or make it null if your texts are shorter.")


def derive_rope(path: str, read: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return rope's options. Where both fields have its parameters, transformers reads rope_scaling alone."""
    field = "rope_scaling" if read["rope_scaling"] else "rope_parameters"
    rope = read[field] or {}
    for name, value in ({"partial_rotary_factor": read["partial_rotary_factor"]} | rope).items():
        if isinstance(value, dict) or name == "partial_rotary_factor" and value not in (None, 1):
            raise UserError(f"{path} says, in {field} or next to it, that {name} is {value!r}, but in a model of this "
                            "type rope rotates whole heads, in all layers alike: transformers ignores the field, or "
                            "cannot open the model. Remove it.")
    theta = check_type(path, "rope_theta", rope.get("rope_theta", read["rope_theta"]), float)
    kind, known = rope.get("rope_type", rope.get("type", "default")), RopeScaling(ModelConfig.rope_scaling_factor)
    if kind != "default":
        original = read["original_max_position_embeddings"] or rope.get(
            "original_max_position_embeddings", config["max_position_embeddings"])
        same = (rope.get("low_freq_factor"), rope.get("high_freq_factor"), original) == known[1:]
        if kind != "llama3" or not same:
            raise UserError(f"{path} says that {field} is {rope}, with original_max_position_embeddings {original}, "
                            f"but here rope's scaling can only be llama3, with any factor, low_freq_factor "
                            f"{known.low_freq_factor:g}, high_freq_factor {known.high_freq_factor:g} and "
                            f"original_max_position_embeddings {known.original}.")
        known = known._replace(factor=check_type(path, "rope's factor", rope.get("factor"), float))
    return {"rotary_base": theta, "use_rope_scaling": kind == "llama3", "rope_scaling_factor": known.factor}


def write(defaults: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the fields for the options of DERIVED, and no window. (A Qwen 2's class has no head_dim, but its model
    reads it.)
    """
    scaling = model.rope_scaling and {
        "rope_type": "llama3", "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_scaling.low_freq_factor, "high_freq_factor": model.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": model.rope_scaling.original}
    return {"num_key_value_heads": model.groups, "intermediate_size": model.ffn_size, "head_dim": model.head_size,
            "rope_theta": model.rotary_base, "rope_scaling": scaling,
            **dict.fromkeys(defaults.keys() & {"sliding_window"})}


# ---- the layouts ----------------------------------------------------------------------------------------------------

FIELDS = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
          "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
          "attention_dropout": 0.0}
FIXED: dict[str, tuple[Any, str]] = {"hidden_act": ("silu", "what the MLP's gate is made of")}
NO_BIAS = {"attention_bias": (False, "whether attention has biases")}


def llama_like(model_type: str, class_name: str, fields: dict[str, Any], fixed: dict[str, Any],
               options: dict[str, Any], defaults: dict[str, Any]) -> TransformersLayout:
    """Return a layout. `defaults` are those of further fields (`derive`)."""
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
        derive=partial(derive, defaults), write=partial(write, defaults))


def is_a_llama(model: ModelConfig) -> bool:
    """Report whether the model passes LlamaConfig's own checks. A Mistral computes the same, without these checks."""
    return model.hidden_size % model.num_attention_heads == 0 and model.init_method_std <= 1


LLAMA = llama_like("llama", "LlamaForCausalLM", {}, NO_BIAS | {"mlp_bias": (False, "whether the MLP has biases")}, {},
                   {"num_key_value_heads": None, "head_dim": None})._replace(suits=is_a_llama)
MISTRAL = llama_like("mistral", "MistralForCausalLM", {
    "intermediate_size": 14336, "max_position_embeddings": 131072}, {}, {},
    {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096})
OF_QWEN = {"num_key_value_heads": 32, "head_dim": None, "use_sliding_window": False, "sliding_window": 4096,
           "max_window_layers": 28, "layer_types": None}
QWEN_2 = llama_like("qwen2", "Qwen2ForCausalLM", {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    {}, {"add_qkv_bias": True}, OF_QWEN)
QWEN_3 = llama_like("qwen3", "Qwen3ForCausalLM", {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    NO_BIAS, {"qk_layernorm": True}, OF_QWEN | {"head_dim": 128})
