"""What a run costs, as formulas. The papers' letters, see reference/config.py."""
from reference.config import ModelConfig


def parameters(c: ModelConfig) -> int:
    """V h + s h + L (12 h^2 + 13 h) + 2 h, without padding; an untied output layer adds V h, rope takes s h away."""
    h, words = c.hidden_size, c.vocab_size * c.hidden_size
    positions = c.max_position_embeddings * h if c.position_embedding_type == "learned_absolute" else 0
    output = words if c.untie_embeddings_and_output_weights else 0
    return words + positions + c.num_layers * (12 * h**2 + 13 * h) + 2 * h + output


def parameters_per_rank(c: ModelConfig, t: int) -> int:
    """Elements that one of t tensor-parallel ranks holds: 1/t of what is split, padding included, and all the rest."""
    h, words = c.hidden_size, c.padded_vocab_size(t) // t * c.hidden_size
    positions = c.max_position_embeddings * h if c.position_embedding_type == "learned_absolute" else 0
    output = words if c.untie_embeddings_and_output_weights else 0
    split, replicated = (12 * h**2 + 7 * h) // t, 6 * h      # 3h + 4h biases are split; two norms, two biases are not
    return words + positions + c.num_layers * (split + replicated) + 2 * h + output
