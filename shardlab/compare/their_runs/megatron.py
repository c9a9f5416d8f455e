"""Megatron-core's weights as the textbook's: by other names, and queries, keys and values side by side, group by group.

With Transformer Engine the weights of a norm belong to the linear layer behind it. A gated MLP's `linear_fc1` has gate
and up of each rank one after the other (megatron/core/transformer, megatron/core/models/gpt).
"""
from collections.abc import Callable
from typing import Any

from reference.config import ModelConfig

NORMS = {"input_layernorm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
         "post_attention_layernorm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")}
OF_MODEL = {"embedding.word": ("embedding.word_embeddings.weight",),
            "embedding.position": ("embedding.position_embeddings.weight",),
            "final_layernorm.weight": ("decoder.final_layernorm.weight",),
            "final_layernorm.bias": ("decoder.final_layernorm.bias",),
            "output": ("output_layer.weight",)}
OF_BLOCK = {"w_qkv": "self_attention.linear_qkv.weight", "b_qkv": "self_attention.linear_qkv.bias",
            "w_q": "self_attention.linear_qkv.weight", "b_q": "self_attention.linear_qkv.bias",
            "w_kv": "self_attention.linear_qkv.weight", "b_kv": "self_attention.linear_qkv.bias",
            "w_out": "linear_proj.weight", "b_out": "linear_proj.bias",
            "w_in": "mlp.linear_fc1.weight", "b_in": "mlp.linear_fc1.bias"}


def their_names(name: str) -> tuple[str, ...]:
    """Translate 'blocks.3.mlp.w_in' -> the names that the tensor may have in Megatron-core."""
    if name in OF_MODEL:
        return OF_MODEL[name]
    _, layer, part, own = name.split(".", 3)
    if part in NORMS:
        return tuple(f"decoder.layers.{layer}.{norm}{own}" for norm in NORMS[part])
    if "_norm." in own:                     # of queries or keys
        return (f"decoder.layers.{layer}.self_attention.{own.replace('_norm', '_layernorm')}",)
    theirs = OF_BLOCK[own]
    if own in ("w_out", "b_out"):
        kind = theirs.partition(".")[2]
        theirs = f"self_attention.linear_proj.{kind}" if part == "attention" else f"mlp.linear_fc2.{kind}"
    return (f"decoder.layers.{layer}.{theirs}",)


def our_tensor(name: str, x: Any, shards: int, c: ModelConfig) -> Any:
    """Return the textbook's tensor for Megatron's whole x, which that many ranks divide."""
    own = name.rpartition(".")[2]
    if name.startswith("blocks.") and own in HOW:
        return HOW[own](x, shards, c)
    return x[:c.vocab_size] if name in ("embedding.word", "output") else x      # without padding


def by_group(x: Any, c: ModelConfig) -> Any:
    """Reshape rows of q, k and v [(queries of a group + 2) g d, ...] -> [g, queries + 2, d, ...]."""
    g = c.groups
    return x.reshape(g, c.num_attention_heads // g + 2, c.head_size, *x.shape[1:])


def queries(x: Any, c: ModelConfig) -> Any:
    """Return the queries of the rows, [a, d, ...]."""
    return by_group(x, c)[:, :-2].reshape(c.num_attention_heads, c.head_size, *x.shape[1:])


def columns(x: Any, shards: int, c: ModelConfig) -> Any:
    """Transpose a matrix [m, h] -> [h, m]; of a gated MLP [2 f, h] -> [h, 2, f]."""
    if not c.swiglu:
        return x.T
    return x.reshape(shards, 2, -1, x.shape[1]).transpose(3, 1, 0, 2).reshape(x.shape[1], 2, -1)


HOW: dict[str, Callable[[Any, int, ModelConfig], Any]] = {
    "w_qkv": lambda x, _, c: by_group(x, c).transpose(3, 1, 0, 2),               # -> [h, 3, a, d]
    "b_qkv": lambda x, _, c: by_group(x, c).swapaxes(0, 1),                      # -> [3, a, d]
    "w_q": lambda x, _, c: queries(x, c).transpose(2, 0, 1),                     # -> [h, a, d]
    "b_q": lambda x, _, c: queries(x, c),                                        # -> [a, d]
    "w_kv": lambda x, _, c: by_group(x, c)[:, -2:].transpose(3, 1, 0, 2),        # -> [h, 2, g, d]
    "b_kv": lambda x, _, c: by_group(x, c)[:, -2:].swapaxes(0, 1),               # -> [2, g, d]
    "w_out": lambda x, *_: x.T,
    "w_in": columns,
}
