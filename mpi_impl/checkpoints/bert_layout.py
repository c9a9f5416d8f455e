"""The two layouts of BERT in transformers: its `bert` has the original order of norms and residual connections, and its
`megatron-bert` the rearranged one (reference/layers/block.py). Both have the same tensors, with other names for norms.
The weight of a layer is [out, in] there (a Linear), and q, k and v are three layers.

In the original order a norm ends a layer there, and begins the next one here. Both compute the same, except for dropout
in training: they apply it to the embedding after its norm, and we before it, as in the rearranged order. And they apply
it once more before the heads for choices and classes.
"""
import re
from collections.abc import Callable
from functools import partial

from mpi_impl.checkpoints.huggingface_layout import TensorPlace, TransformersLayout, place
from reference.params import Tensor

OF_MODEL = {
    "embedding.word": "embeddings.word_embeddings.weight",
    "embedding.position": "embeddings.position_embeddings.weight",
    "embedding.token_type": "embeddings.token_type_embeddings.weight",
    "lm_head.dense.w": "cls.predictions.transform.dense.weight",
    "lm_head.dense.b": "cls.predictions.transform.dense.bias",
    "lm_head.layernorm.weight": "cls.predictions.transform.LayerNorm.weight",
    "lm_head.layernorm.bias": "cls.predictions.transform.LayerNorm.bias",
    "lm_head.bias": "cls.predictions.bias",
    "pooler.w": "pooler.dense.weight", "pooler.b": "pooler.dense.bias",
    "binary_head.w": "cls.seq_relationship.weight", "binary_head.b": "cls.seq_relationship.bias",
    **{f"{head}.{ours}": f"{name}.{theirs}" for ours, theirs in (("w", "weight"), ("b", "bias")) for head, name in (
        ("multichoice_head", "classifier"), ("entailment_head", "classifier"), ("paraphrase_head", "classifier"),
        ("span_head", "qa_outputs"))},
}
OF_BLOCK = {
    "attention.w_qkv": "attention.self.{}.weight", "attention.b_qkv": "attention.self.{}.bias",
    "attention.w_out": "attention.output.dense.weight", "attention.b_out": "attention.output.dense.bias",
    "mlp.w_in": "intermediate.dense.weight", "mlp.b_in": "intermediate.dense.bias",
    "mlp.w_out": "output.dense.weight", "mlp.b_out": "output.dense.bias",
}
QKV = ("query", "key", "value")
MATRICES = ("w", "w_qkv", "w_in", "w_out")       # of layers, which are transposed there; tables are not


def places(module_of_norm: Callable[[str, int, int], str], name: str, tensor: Tensor,
           num_layers: int) -> list[TensorPlace]:
    """Return a tensor's places: three for q, k and v, else one. `module_of_norm` knows the order of norms."""
    theirs, transposed = their_name(module_of_norm, name, num_layers), name.split(".")[-1] in MATRICES
    if not name.endswith("_qkv"):
        return [place(theirs, tensor, transposed)]
    h = tensor.shape[-2] * tensor.shape[-1]
    shape = (h, h) if transposed else (h,)
    return [TensorPlace(theirs.format(which), shape, axis=0, length=h, transposed=transposed, part=i, heads=True)
            for i, which in enumerate(QKV)]


def their_name(module_of_norm: Callable[[str, int, int], str], name: str, num_layers: int) -> str:
    """Translate 'blocks.3.mlp.w_in' -> 'encoder.layer.3.intermediate.dense.weight', without the prefix."""
    if name in OF_MODEL:
        return OF_MODEL[name]
    if name.startswith("final_layernorm."):
        layer, rest = num_layers, name.replace("final", "input")     # as if another layer followed
    else:
        _, number, rest = name.split(".", 2)
        layer = int(number)
    if rest in OF_BLOCK:
        return f"encoder.layer.{layer}.{OF_BLOCK[rest]}"
    norm, weight_or_bias = rest.split(".")
    return f"{module_of_norm(norm, layer, num_layers)}.{weight_or_bias}"


def original(norm: str, layer: int, num_layers: int) -> str:
    """Return the module of a norm: the layer that ends with it, or for the first one the embedding."""
    if norm == "post_attention_layernorm":
        return f"encoder.layer.{layer}.attention.output.LayerNorm"
    return f"encoder.layer.{layer - 1}.output.LayerNorm" if layer else "embeddings.LayerNorm"


def rearranged(norm: str, layer: int, num_layers: int) -> str:
    """Return the module of a norm: the layer that begins with it, or for the last one all layers."""
    if layer == num_layers:
        return "encoder.ln"
    return f"encoder.layer.{layer}" + (".ln" if norm == "post_attention_layernorm" else ".attention.ln")


BERT = TransformersLayout(
    "bert", "bert",
    {("lm", "sop"): "BertForPreTraining", ("lm",): "BertForMaskedLM", ("choice",): "BertForMultipleChoice",
     ("entailment",): "BertForSequenceClassification", ("paraphrase",): "BertForSequenceClassification",
     ("span",): "BertForQuestionAnswering"},
    same={"num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
          "num_attention_heads": "num_attention_heads", "max_position_embeddings": "max_position_embeddings",
          "layernorm_epsilon": "layer_norm_eps"},
    activation="hidden_act", hidden_dropout=("hidden_dropout_prob",), attention_dropout="attention_probs_dropout_prob",
    mlp_width=("intermediate_size", 3072),
    fields={"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 30522,
            "max_position_embeddings": 512, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1},
    fixed={
        "type_vocab_size": (2, "how many pieces of text a token may belong to"),
        "position_embedding_type": ("absolute", "how attention knows positions"),
        "is_decoder": (False, "that a position sees only those before it"),
        "add_cross_attention": (False, "that each layer also attends to another model's output"),
        "tie_word_embeddings": (True, "that masked tokens are predicted with the embedding's table")},
    options={"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
             "num_experts": None, "share_layers": False,
             "apply_residual_connection_post_layernorm": True},
    places=partial(places, original), prefix="bert.", heads=("cls.", "classifier.", "qa_outputs."),
    twins={"cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
           "cls.predictions.decoder.bias": "cls.predictions.bias"},
    buffers=re.compile(r"embeddings\.(position_ids|token_type_ids)"),
    write=lambda model: {"num_labels": 3} if model.heads == ("entailment",) else {})

MEGATRON_BERT = BERT._replace(
    model_type="megatron-bert", classes={heads: f"Megatron{name}" for heads, name in BERT.classes.items()},
    mlp_width=("intermediate_size", 4096),
    fields=BERT.fields | {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
                          "vocab_size": 29056},
    options=BERT.options | {"apply_residual_connection_post_layernorm": False}, places=partial(places, rearranged))
