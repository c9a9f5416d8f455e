"""The names of one module in several frameworks, so that recordings of two of them can be compared.

All become the names of transformers' Llama. A module has a row only if it computes the same array in both. torchtitan's
queries and keys have the columns of a head in another order than transformers'; Megatron-core computes q, k and v in
one product, by groups, and gate and up in one. Names without a row stay as they are.
"""
import re
from typing import Any

from shardlab.compare.their_runs.records import TheirKey, TheirRun, names_of

LAYER = r"(\d+)"
FRAMEWORKS = {
    "Megatron-core": {
        "embedding.word_embeddings": "model.embed_tokens",
        "embedding.position_embeddings": "model.embed_positions",
        f"decoder.layers.{LAYER}.input_layernorm": r"model.layers.\1.input_layernorm",
        f"decoder.layers.{LAYER}.self_attention.linear_proj": r"model.layers.\1.self_attn.o_proj",
        f"decoder.layers.{LAYER}.self_attention": r"model.layers.\1.self_attn",
        f"decoder.layers.{LAYER}.pre_mlp_layernorm": r"model.layers.\1.post_attention_layernorm",
        f"decoder.layers.{LAYER}.mlp.linear_fc2": r"model.layers.\1.mlp.down_proj",
        f"decoder.layers.{LAYER}.mlp.router": r"model.layers.\1.mlp.gate",
        f"decoder.layers.{LAYER}.mlp": r"model.layers.\1.mlp",
        f"decoder.layers.{LAYER}": r"model.layers.\1",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head"},
    "torchtitan": {
        "tok_embeddings": "model.embed_tokens",
        f"layers.{LAYER}.attention_norm": r"model.layers.\1.input_layernorm",
        f"layers.{LAYER}.attention.wv": r"model.layers.\1.self_attn.v_proj",
        f"layers.{LAYER}.attention.wo": r"model.layers.\1.self_attn.o_proj",
        f"layers.{LAYER}.attention": r"model.layers.\1.self_attn",
        f"layers.{LAYER}.ffn_norm": r"model.layers.\1.post_attention_layernorm",
        f"layers.{LAYER}.feed_forward.w1": r"model.layers.\1.mlp.gate_proj",
        f"layers.{LAYER}.feed_forward.w2": r"model.layers.\1.mlp.down_proj",
        f"layers.{LAYER}.feed_forward.w3": r"model.layers.\1.mlp.up_proj",
        f"layers.{LAYER}.feed_forward": r"model.layers.\1.mlp",
        f"layers.{LAYER}": r"model.layers.\1",
        "norm": "model.norm",
        "output": "lm_head"},
    "transformers' GPT-2": {        # its matrices are [in, out], so the weights of linear layers have no row
        "transformer.wte": "model.embed_tokens",
        "transformer.wpe": "model.embed_positions",
        rf"transformer.h.{LAYER}.ln_1": r"model.layers.\1.input_layernorm",
        rf"transformer.h.{LAYER}.attn": r"model.layers.\1.self_attn",
        rf"transformer.h.{LAYER}.ln_2": r"model.layers.\1.post_attention_layernorm",
        rf"transformer.h.{LAYER}.mlp": r"model.layers.\1.mlp",
        rf"transformer.h.{LAYER}": r"model.layers.\1",
        "transformer.ln_f": "model.norm"},
    "transformers": {"model.embed_tokens": "model.embed_tokens"},
}
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
# Weights that other frameworks have as one, or with their rows in another order. GPT-2's matrices are [in, out] in
# transformers, but not in nanoGPT.
FUSED = {"self_attention.linear_qkv": ("by group", QKV), "mlp.linear_fc1": ("", "mlp.gate_proj mlp.up_proj"),
         "attention.wq": ("interleaved", "self_attn.q_proj"), "attention.wk": ("interleaved", "self_attn.k_proj"),
         "attn.c_attn": ("", QKV), "attn.c_proj": ("", "self_attn.o_proj"), "mlp.c_fc": ("", "mlp.up_proj"),
         "mlp.c_proj": ("", "mlp.down_proj")}
ENDS = r"( input| output|\.weight|\.bias)"


def framework_of(run: TheirRun) -> str | None:
    """Return the framework whose name the word table has in a run, if it is one of these."""
    return next((framework for framework, table in FRAMEWORKS.items()
                 if any(name.startswith(next(iter(table))) for name in names_of(run))), None)


def in_common_names(a: TheirRun, b: TheirRun) -> tuple[TheirRun, TheirRun]:
    """Return the two runs with the names of one framework, if they are of two."""
    one, other = framework_of(a), framework_of(b)
    if one == other or one is None or other is None:
        return a, b
    return renamed(a, one), renamed(b, other)


def common_name(name: str, framework: str) -> str:
    """Translate the name of a tensor, or return it if it has no row."""
    for theirs, common in FRAMEWORKS[framework].items():
        if match := re.fullmatch(f"{theirs.replace('.', '[.]')}{ENDS}", name):
            return match.expand(rf"{common}\{theirs.count('(') + 1}")
    return name


def renamed(run: TheirRun, framework: str) -> TheirRun:
    """Return a run with the names that all frameworks have in common. Its whole model's output, logits or a loss, keeps
    a name of its own.
    """
    def common(key: TheirKey) -> TheirKey:
        return key._replace(name=re.sub("^root ", f"root of {framework} ", common_name(key.name, framework)))

    def of(by_key: dict[TheirKey, Any]) -> dict[TheirKey, Any]:
        return {common(key): x for key, x in by_key.items()}

    return TheirRun(run.folder, list(map(common, run.order)), of(run.parts), of(run.formats), of(run.dims))
