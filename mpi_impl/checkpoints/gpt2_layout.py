"""The layout of GPT-2 in transformers. A matrix is [in, out] as it is here (their Conv1D), and the numbers of every
tensor lie in the same order: the last three axes of w_qkv [h, 3, a, d] are one axis there, with all of q, then of k,
then of v.
"""
import re

from mpi_impl.checkpoints.huggingface_layout import OURS_ALONE, TensorPlace, TransformersLayout, place
from reference.params import Tensor

OF_MODEL = {
    "embedding.word": "wte.weight", "embedding.position": "wpe.weight",
    "final_layernorm.weight": "ln_f.weight", "final_layernorm.bias": "ln_f.bias", "output": "lm_head.weight",
}
OF_BLOCK = {
    "input_layernorm.weight": "ln_1.weight", "input_layernorm.bias": "ln_1.bias",
    "attention.w_qkv": "attn.c_attn.weight", "attention.b_qkv": "attn.c_attn.bias",
    "attention.w_out": "attn.c_proj.weight", "attention.b_out": "attn.c_proj.bias",
    "post_attention_layernorm.weight": "ln_2.weight", "post_attention_layernorm.bias": "ln_2.bias",
    "mlp.w_in": "mlp.c_fc.weight", "mlp.b_in": "mlp.c_fc.bias",
    "mlp.w_out": "mlp.c_proj.weight", "mlp.b_out": "mlp.c_proj.bias",
}


def their_name(name: str) -> str:
    """Translate 'blocks.3.mlp.w_in' -> 'h.3.mlp.c_fc.weight', without the prefix."""
    if name in OF_MODEL:
        return OF_MODEL[name]
    _, layer, rest = name.split(".", 2)
    return f"h.{layer}.{OF_BLOCK[rest]}"


def places(name: str, tensor: Tensor, num_layers: int) -> list[TensorPlace]:
    """Return a tensor's places. q, k and v are h columns each of one matrix; any other tensor is one there, too."""
    theirs = their_name(name)
    if not name.endswith("_qkv"):
        return [place(theirs, tensor)]
    *before, _, a, d = tensor.shape
    h, shape = a * d, (*before, 3 * a * d)                                 # [h, 3h], or of the bias [3h]
    return [TensorPlace(theirs, shape, len(shape) - 1, i * h, h, part=i, heads=True) for i in range(3)]


GPT2 = TransformersLayout(
    "gpt2", "gpt", {("lm",): "GPT2LMHeadModel"},
    same={"num_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
          "max_position_embeddings": "n_positions", "layernorm_epsilon": "layer_norm_epsilon"},
    activation="activation_function", hidden_dropout=("resid_pdrop", "embd_pdrop"), attention_dropout="attn_pdrop",
    mlp_width=("n_inner", None),
    fields={"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    fixed={
        "scale_attn_weights": (True, "that attention's scores are divided by the root of the head size"),
        "scale_attn_by_inverse_layer_idx": (False, "that attention's scores are also divided by the layer's number"),
        "reorder_and_upcast_attn": (False, "in which format attention's scores are computed"),
        "add_cross_attention": (False, "that each layer also attends to another model's output")},
    options={"position_embedding_type": "learned_absolute", "apply_residual_connection_post_layernorm": False,
             "normalization": "LayerNorm", "swiglu": False, "ffn_hidden_size": None, "num_query_groups": None,
             "kv_channels": None, "add_qkv_bias": False, "qk_layernorm": False, "num_experts": None} | OURS_ALONE,
    places=places, prefix="transformer.", heads=("lm_head.",), twins={"lm_head.weight": "wte.weight"},
    buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),        # the causal masks
    aliases={"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions"})
