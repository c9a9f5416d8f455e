"""The number of parameters of a model, in total and on each rank, as the papers count them.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P").
"""
from collections.abc import Sequence
from typing import NamedTuple

from reference.config import ModelConfig
from reference.costs.experts import added_parameters


class LayerParameters(NamedTuple):
    """The elements of one layer."""

    split: int        # each of t ranks holds 1/t of them
    shared: int       # of keys and values: there are at most g shards, and ranks beyond that hold copies
    replicated: int   # every rank holds them

    def on_a_rank(self, t: int, g: int) -> int:
        return self.split // t + self.shared // min(t, g) + self.replicated


def layer_parameters(c: ModelConfig) -> LayerParameters:
    """Count a layer. A GPT's has 12 h^2 + 13 h: 3h^2 + 3h for Q, K and V, h^2 + h for attention's output, 8h^2 + 5h for
    the MLP and 4h for two norms.

    In general Q and attention's output have h a d each, d the size of a head, K and V 2 h g d, and the MLP 2 h f, or
    with a gate 3 h f. An RMS norm has no bias, and a Llama no others.
    """
    h, f, a, g = c.hidden_size, c.ffn_size, c.num_attention_heads * c.head_size, c.groups * c.head_size
    biases, of_qkv = int(c.add_bias_linear), int(c.add_bias_linear or c.add_qkv_bias)
    norm, keys = norm_parameters(c), 2 * (h + of_qkv) * g
    shared = keys if c.grouped_attention else 0
    return LayerParameters(2 * h * a + of_qkv * a + (3 if c.swiglu else 2) * h * f + biases * f + keys - shared, shared,
                           2 * norm * h + biases * 2 * h + (2 * norm * c.head_size if c.qk_layernorm else 0))


def norm_parameters(c: ModelConfig) -> int:
    """Return 2 for a layer norm, whose columns have a gain and a bias each, and 1 for an RMS norm."""
    return 1 if c.normalization == "RMSNorm" else 2


def parameters(c: ModelConfig) -> int:
    """Return V h + s h + L (12 h^2 + 13 h) + 2 h, without padding; an untied output layer adds V h, rope subtracts s h,
    and layers that share their parameters make L 1.

    Here s is the longest sequence, and the 2 h are the final layer norm's. BERT adds a table of two token types and its
    heads (`head_parameters`). For the layers of a Llama see `layer_parameters`.
    """
    h, tables = c.hidden_size, 2 if c.untie_embeddings_and_output_weights else 1
    layers = range(c.num_layers)
    return (tables * c.vocab_size * h + positions(c) + token_types(c)
            + len(c.with_own_blocks(layers)) * sum(layer_parameters(c))
            + norm_parameters(c) * h + head_parameters(c, c.vocab_size) + added_parameters(c, layers))


def published_parameters(c: ModelConfig) -> float:
    """Return P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (Narayanan et al. 2021, section 5.1, equation 2).

    It is for a GPT with learned positions and tied logits, and leaves out the 2h of the final layer norm.
    """
    L, h, V, s = c.num_layers, c.hidden_size, c.vocab_size, c.max_position_embeddings
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))


def parameters_of_stage(c: ModelConfig, t: int, layers: Sequence[int], e: int = 1) -> int:
    """Count the elements on one of t tensor-parallel ranks of the stage with these layers, one of e that share experts.

    It holds 1/t of the sharded tensors, padding included, and all of the rest. The first stage embeds; the last has the
    final layer norm and the logits. Tied logits need the word table there too: a copy, unless the stage is both.
    """
    h, first, last = c.hidden_size, 0 in layers, c.num_layers - 1 in layers
    tables, words = int(first or last and c.tied), c.padded_vocab_size(t) // t
    tables += last and c.untie_embeddings_and_output_weights
    return (tables * words * h + (positions(c) + token_types(c) if first else 0)
            + len(c.with_own_blocks(layers)) * layer_parameters(c).on_a_rank(t, c.groups)
            + (norm_parameters(c) * h + head_parameters(c, words) if last else 0)
            + added_parameters(c, layers, t, e))


def positions(c: ModelConfig) -> int:
    """Count the elements of the position table, which is replicated over tensor-parallel ranks; rope has none."""
    return c.max_position_embeddings * c.hidden_size if c.position_embedding_type == "learned_absolute" else 0


def token_types(c: ModelConfig) -> int:
    """Count the elements of BERT's table of two token types."""
    return 0 if c.causal else 2 * c.hidden_size


def head_parameters(c: ModelConfig, words: int) -> int:
    """Count the elements of BERT's heads beside the word table: a layer, a norm, and a bias for each of `words`; the
    pooler, and its classifier: two columns for the order of sentences, one for a choice.
    """
    if c.causal:
        return 0
    h, columns = c.hidden_size, pooled_columns(c)
    masked = h**2 + (1 + norm_parameters(c)) * h + words
    return ("lm" in c.heads) * masked + bool(columns) * (h**2 + h) + columns * (h + 1)


def pooled_columns(c: ModelConfig) -> int:
    """Count the columns of all layers that read the pooler."""
    return sum({"lm": 0, "sop": 2, "choice": 1}[head] for head in c.heads)
