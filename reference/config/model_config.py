"""Sizes and choices of a model."""
from collections.abc import Sequence
from dataclasses import dataclass

from reference.config.checks import (option, require_divides, require_not_negative, require_one_of, require_positive,
                                     round_up)
from reference.config.experts_config import ExpertsConfig
from reference.config.rope_scaling import RopeScaling
from reference.errors import UserError

# The kinds of models, and the heads of each.
ARCHITECTURES = {"gpt": (("lm",),), "bert": (("lm", "sop"), ("lm",), ("choice",), ("entailment",), ("paraphrase",),
                                             ("span",))}
ACTIVATIONS = ("gelu", "gelu_exact", "relu")       # for which ops.py has the functions
POSITION_EMBEDDINGS = ("learned_absolute", "rope")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and choices of a GPT or a BERT, under Megatron's names. Raises UserError if they do not fit together."""

    num_layers: int                                    # L
    hidden_size: int                                   # h
    num_attention_heads: int                           # a
    vocab_size: int                                    # V, without padding
    max_position_embeddings: int                       # the longest sequence
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0                        # the share of each head that rope rotates
    untie_embeddings_and_output_weights: bool = False
    activation: str = "gelu"                           # GPT's tanh form; gelu_exact and relu also exist
    init_method_std: float = 0.02
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1                        # on the embedding, and on each branch before it is added
    attention_dropout: float = 0.1                     # on attention's probabilities
    make_vocab_size_divisible_by: int = 128
    fp16_lm_cross_entropy: bool = False                # compute the loss in float16 too, not in float32
    architecture: str = "gpt"                          # or bert, whose attention is bidirectional
    heads: tuple[str, ...] = ("lm",)                   # what it predicts: see models/bert.py
    predicted_share: float = 1.0                       # of a sample's tokens, the most that a BERT predicts
    apply_residual_connection_post_layernorm: bool = False   # BERT's original order: see layers/block.py
    normalization: str = "LayerNorm"                   # or RMSNorm
    swiglu: bool = False                               # the MLP has a gate: layers/gated_mlp.py
    squared_relu: bool = False                         # or a squared ReLU: layers/squared_relu_mlp.py
    ffn_hidden_size: int | None = None                 # f, the MLP's width; None: 4h, with a gate about 8h/3
    num_query_groups: int | None = None                # g heads of keys and values; None: a
    kv_channels: int | None = None                     # the size of a head; None: h/a
    add_bias_linear: bool = True                       # all linear layers of a block have biases
    add_qkv_bias: bool = False                         # those of Q, K and V have, even if the others have not
    qk_layernorm: bool = False                         # each head of Q and of K is normalized
    rotary_base: float = 10_000.0
    use_rope_scaling: bool = False                     # Llama 3.1's, for longer sequences: rope.py
    rope_scaling_factor: float = 8.0
    experts: ExpertsConfig | None = None               # in the MLP's place, in some layers or all
    share_layers: bool = False                         # all layers use the parameters of one block, as ALBERT's

    def __post_init__(self):
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
                     "make_vocab_size_divisible_by"):
            require_positive(name, getattr(self, name))
        self.check_architecture()
        self.check_attention()
        self.check_mlp()
        if self.share_layers and self.experts and self.experts.moe_layer_freq > 1:
            raise UserError("--share-layers gives all layers one block of parameters, but with --moe-layer-freq "
                            f"{self.experts.moe_layer_freq} only some layers have experts, and others an MLP. Leave "
                            "one of the two out.")
        require_one_of("The activation", self.activation, ACTIVATIONS)
        require_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDINGS)
        require_one_of("normalization", self.normalization, NORMALIZATIONS)
        require_not_negative("init_method_std", self.init_method_std)
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{option(name)} is {getattr(self, name)}, but must be in [0, 1): it is the share that "
                                "is dropped in training.")
        if not 0 < self.layernorm_epsilon < float("inf"):
            raise UserError(f"--layernorm-epsilon is {self.layernorm_epsilon}, but must be a number above 0.")
        if not 0 < self.predicted_share <= 1:
            raise UserError(f"--mask-prob is {self.predicted_share}, but must be above 0 and at most 1: it is the "
                            "share of a sample's tokens that is predicted.")
        if not 0 < self.rotary_percent <= 1:
            raise UserError(f"--rotary-percent is {self.rotary_percent}, but must be above 0 and at most 1: "
                            "it is the share of each head's dimensions that is rotated.")
        if self.position_embedding_type == "rope" and (self.rotary_size % 2 or self.rotary_size == 0):
            raise UserError(f"--rotary-percent {self.rotary_percent} of a head of {self.head_size} dimensions is "
                            f"{self.rotary_size}, but rope turns pairs of dimensions. Choose a share, or a size of "
                            "heads (--kv-channels), that gives an even number above 0.")
        for name in ("rotary_base", "rope_scaling_factor"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise UserError(f"{option(name)} is {getattr(self, name)}, but must be a number that is at least 1.")

    def check_attention(self) -> None:
        if self.kv_channels is None:
            require_divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size,
                            "Every head gets hidden_size / num_attention_heads columns, unless --kv-channels says "
                            "otherwise.")
        else:
            require_positive("kv_channels", self.kv_channels)
        require_positive("num_query_groups", self.groups)
        require_divides("num_query_groups", self.groups, "num_attention_heads", self.num_attention_heads,
                        "The heads of a group share one head of keys and values.")

    def check_mlp(self) -> None:
        require_positive("ffn_hidden_size", self.ffn_size)
        if self.swiglu and self.squared_relu:
            raise UserError("--swiglu and --squared-relu are two kinds of MLP. Leave one of the two out.")
        own = "--swiglu" if self.swiglu else "--squared-relu" if self.squared_relu else ""
        if own and self.activation != ModelConfig.activation:
            raise UserError(f"{own} has an activation of its own, but --activation is {self.activation}. Leave one of "
                            "the two out.")
        if bool(own) == self.add_bias_linear:
            raise UserError(f"{own or '--swiglu or --squared-relu'} and --disable-bias-linear go together: these MLPs "
                            "have no biases, and the plain one has. Give both, or neither.")

    def check_architecture(self) -> None:
        require_one_of("architecture", self.architecture, tuple(ARCHITECTURES))
        known = ARCHITECTURES[self.architecture]
        if self.heads not in known:
            raise UserError(f"The heads are {' and '.join(self.heads)}, but those of a {self.architecture.upper()} are "
                            f"{', or '.join(map(' and '.join, known))}.")
        if self.architecture == "bert" and self.untie_embeddings_and_output_weights:
            raise UserError("--untie-embeddings-and-output-weights is for a GPT: BERT's masked words are predicted "
                            "with the embedding's table. Leave it out.")

    @property
    def tied(self) -> bool:
        """Report whether the logits are computed with the embedding's word table."""
        return "lm" in self.heads and not self.untie_embeddings_and_output_weights

    def has_experts(self, layer: int) -> bool:
        """Report whether a layer has experts in place of its MLP."""
        return self.experts is not None and layer % self.experts.moe_layer_freq == 0

    def with_own_blocks(self, layers: Sequence[int]) -> Sequence[int]:
        """Return those of a rank's layers that have parameters of their own: all, or where they share them, one."""
        return layers[:1] if self.share_layers else layers

    def most_predicted(self, s: int, ranks: int = 1) -> int:
        """Return how many of a rank's s positions are predicted at most, if so many ranks share a sample."""
        return min(s, max(1, round(self.predicted_share * s * ranks)))

    @property
    def causal(self) -> bool:
        """Report whether a position attends only to itself and to earlier positions."""
        return self.architecture == "gpt"

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        """Return g, the number of heads of keys and values, each of which serves a/g heads of queries."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def grouped_attention(self) -> bool:
        """Report whether attention has a choice that GPT's has not: layers/grouped_attention.py."""
        return not (self.num_query_groups is None and self.kv_channels is None and self.add_bias_linear
                    and not self.qk_layernorm)

    @property
    def ffn_size(self) -> int:
        """Return f, the width of the MLP. As in Megatron, that of one with a gate is a multiple of 64 by default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(1, 8 * self.hidden_size // 3 // 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def rope_scaling(self) -> RopeScaling | None:
        return RopeScaling(self.rope_scaling_factor) if self.use_rope_scaling else None

    @property
    def rotary_size(self) -> int:
        """Return the number of dimensions of each head that rope rotates."""
        return int(self.head_size * self.rotary_percent)

    def padded_vocab_size(self, t: int) -> int:
        """Return V, rounded up to a multiple of make_vocab_size_divisible_by x t, for shards of one size on t ranks."""
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by * t)
