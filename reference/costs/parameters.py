"""The number of parameters of a model, in total and on each rank, as the papers count them.

The papers' letters: reference/config. Narayanan et al. 2021 is 2104.04473 ("PTD-P").
"""
from collections.abc import Collection

from reference.config import ModelConfig
from reference.costs.experts import added_parameters


def parameters(c: ModelConfig) -> int:
    """Return V h + s h + L (12 h^2 + 13 h) + 2 h, without padding; an untied output layer adds V h, rope subtracts s h.

    A layer has 3h^2 + 3h for Q, K and V, h^2 + h for attention's output, 8h^2 + 5h for the MLP and 4h for two norms.
    Here s is the longest sequence, and the 2 h are the final layer norm's. BERT adds a table of two token types and its
    heads (`head_parameters`).
    """
    h, tables = c.hidden_size, 2 if c.untie_embeddings_and_output_weights else 1
    return (tables * c.vocab_size * h + positions(c) + token_types(c) + c.num_layers * (12 * h**2 + 13 * h) + 2 * h
            + head_parameters(c, c.vocab_size) + added_parameters(c, range(c.num_layers)))


def published_parameters(c: ModelConfig) -> float:
    """Return P = 12 L h^2 (1 + 13/(12h) + (V + s)/(12 L h)) (Narayanan et al. 2021, section 5.1, equation 2).

    It is for a GPT with learned positions and tied logits, and leaves out the 2h of the final layer norm.
    """
    L, h, V, s = c.num_layers, c.hidden_size, c.vocab_size, c.max_position_embeddings
    return 12 * L * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * L * h))


def parameters_of_stage(c: ModelConfig, t: int, layers: Collection[int], e: int = 1) -> int:
    """Count the elements on one of t tensor-parallel ranks of the stage with these layers, one of e that share experts.

    It holds 1/t of the sharded tensors, padding included, and all of the rest. The first stage embeds; the last has the
    final layer norm and the logits. Tied logits need the word table there too: a copy, unless the stage is both.
    """
    h, first, last = c.hidden_size, 0 in layers, c.num_layers - 1 in layers
    tables, words = int(first or last and c.tied), c.padded_vocab_size(t) // t
    tables += last and c.untie_embeddings_and_output_weights
    split, replicated = (12 * h**2 + 7 * h) // t, 6 * h      # 3h + 4h biases are split; two norms, two biases are not
    return (tables * words * h + (positions(c) + token_types(c) if first else 0)
            + len(layers) * (split + replicated) + (2 * h + head_parameters(c, words) if last else 0)
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
    return ("lm" in c.heads) * (h**2 + 3 * h + words) + bool(columns) * (h**2 + h) + columns * (h + 1)


def pooled_columns(c: ModelConfig) -> int:
    """Count the columns of all layers that read the pooler."""
    return sum({"lm": 0, "sop": 2, "choice": 1}[head] for head in c.heads)
