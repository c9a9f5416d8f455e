"""Sizes of a model and of its parallelism, with the rules they must keep and an error sentence for each broken rule.

Letters of the papers: h hidden size, L layers, a attention heads, s sequence length, V vocabulary size; t
tensor-parallel, p pipeline-parallel, d data-parallel ranks; b micro-batch size, B global batch size.
"""
from collections.abc import Iterable
from dataclasses import dataclass, field

from reference.errors import UserError
from reference.ops import ACTIVATIONS

ARCHITECTURES = {"gpt": (("lm",),), "bert": (("lm", "sop"), ("lm",), ("choice",))}     # and the heads of each
POSITION_EMBEDDINGS = ("learned_absolute", "rope")
RECOMPUTE = ("none", "selective", "full")   # recompute nothing, attention's core, or whole layers

# The largest size that each option accepts: several times the largest published one, which the comment names, and small
# enough that every loop over layers, devices or divisors of a batch ends within seconds.
LARGEST = {
    "num_layers": 10_000,                       # 1,000: Wang et al. 2022 (DeepNet)
    "hidden_size": 1_000_000,                   # 25,600: Narayanan et al. 2021
    "num_attention_heads": 10_000,              # 160: the same model
    "vocab_size": 1 << 31,                      # token ids are stored as int32; 256,000: Chowdhery et al. 2022 (PaLM)
    "make_vocab_size_divisible_by": 1 << 31,
    "max_position_embeddings": 100_000_000,     # 10 million: Meta 2025 (Llama 4)
    "seq_length": 100_000_000,
    "global_batch_size": 10_000_000,            # samples; 65,536: You et al. 2019 (BERT by LAMB)
    "micro_batch_size": 100_000,                # 64: Shoeybi et al. 2019
    "tensor_model_parallel_size": 10_000,       # one head a rank; 8 in the papers
    "pipeline_model_parallel_size": 1_000,      # 64: Narayanan et al. 2021
    "pipeline ranks p": 1_000,                  # the same, for a schedule alone
    "data_parallel_size": 1_000_000,
    "num_gpus": 1_000_000,                      # 16,384: Meta 2024 (Llama 3)
    "train_iters": 100_000_000,                 # 2 million: Devlin et al. 2018 (BERT)
    "eval_iters": 1_000_000,
    "epochs": 10_000,
    "num_samples": 1_000_000,                   # texts for each prompt
    "tokens_to_generate": 100_000_000,
    "sample_tokens": 100_000_000,
    "layers": 1_000,                            # in the experiment with narrow models,
    "seeds": 10_000,                            # and the seeds of each
    "ranks": 1_000,                             # processes that measure one machine
}


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
    heads: tuple[str, ...] = ("lm",)                   # predictions: tokens (lm), sentence order (sop), a choice
    apply_residual_connection_post_layernorm: bool = False   # BERT's original order: see layers/block.py

    def __post_init__(self):
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
                     "make_vocab_size_divisible_by"):
            require_positive(name, getattr(self, name))
        self.check_architecture()
        require_divides("num_attention_heads", self.num_attention_heads, "hidden_size", self.hidden_size,
                        "Every head gets hidden_size / num_attention_heads columns.")
        require_one_of("The activation", self.activation, tuple(ACTIVATIONS))
        require_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDINGS)
        require_not_negative("init_method_std", self.init_method_std)
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{option(name)} is {getattr(self, name)}, but must be in [0, 1): it is the share that "
                                "is dropped in training.")
        if not 0 < self.layernorm_epsilon < float("inf"):
            raise UserError(f"--layernorm-epsilon is {self.layernorm_epsilon}, but must be a number above 0.")
        if not 0 < self.rotary_percent <= 1:
            raise UserError(f"--rotary-percent is {self.rotary_percent}, but must be above 0 and at most 1: "
                            "it is the share of each head's dimensions that is rotated.")
        if self.position_embedding_type == "rope" and (self.rotary_size % 2 or self.rotary_size == 0):
            raise UserError(f"--rotary-percent {self.rotary_percent} of a head of {self.head_size} dimensions is "
                            f"{self.rotary_size}, but rope turns pairs of dimensions. Choose a share that gives an "
                            "even number above 0.")

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

    @property
    def causal(self) -> bool:
        """Report whether a position attends only to itself and to earlier positions."""
        return self.architecture == "gpt"

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Return the number of dimensions of each head that rope rotates."""
        return int(self.head_size * self.rotary_percent)

    def padded_vocab_size(self, t: int) -> int:
        """Return V, rounded up to a multiple of make_vocab_size_divisible_by x t, for shards of one size on t ranks."""
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by * t)


@dataclass(frozen=True)
class Recompute:
    """The activations that the forward does not keep, so that the backward recomputes them (Korthikanti et al. 2022).

    Names and meanings are Megatron's. `selective` recomputes attention's core, in all layers; `full` recomputes a whole
    layer from its input. The method `uniform` divides each stage's layers into groups of num_layers and keeps only each
    group's input; `block` recomputes num_layers layers of each stage, one by one, and keeps the others. Larger groups
    keep fewer inputs, but the backward holds all activations of a group at the same time.
    """

    granularity: str = "none"
    method: str = "uniform"
    num_layers: int = 1

    def __post_init__(self):
        require_one_of("recompute_granularity", self.granularity, RECOMPUTE)
        require_one_of("recompute_method", self.method, ("uniform", "block"))
        require_positive("recompute_num_layers", self.num_layers)

    @property
    def selective(self) -> bool:
        return self.granularity == "selective"

    def groups(self, layers: Iterable[int]) -> list[tuple[list[int], bool]]:
        """Divide a stage's layers into groups, in order, and tell for each group whether only its input is kept."""
        layers, n = list(layers), self.num_layers
        if self.granularity == "full" and self.method == "uniform":
            return [(layers[i:i + n], True) for i in range(0, len(layers), n)]
        recomputed = n if self.granularity == "full" else 0
        return [([layer], i < recomputed) for i, layer in enumerate(layers)]


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and choices of parallelism: the ranks of one model (t, p), the number of replicas (d), the pipeline's
    schedule, the reduction of gradients, and the model states and activations that each rank keeps.

    Raises UserError for sizes below 1, and for choices that do not go together.
    """

    tensor_model_parallel_size: int = 1    # t
    pipeline_model_parallel_size: int = 1  # p
    data_parallel_size: int = 1            # d
    pipeline_schedule: str = "1f1b"        # a name in reference/schedules/generators.py
    virtual_pipeline_size: int | None = None   # v, for a schedule with several stages on each rank
    scatter_gather_tensors_in_pipeline: bool = True   # whether each of t ranks sends 1/t of an activation
    ddp_bucket_size: int = 1 << 20         # the fewest gradient elements in one all-reduce over the replicas
    zero_stage: int = 0                    # the replicas shard optimizer states (1), gradients (2), parameters (3)
    cpu_offload: bool = False              # whether a rank's shards of parameters and moments are offloaded
    sequence_parallel: bool = False        # whether activations outside the regions are sharded by positions
    keep_gathered_inputs: bool = False     # whether the regions' gathered inputs are kept for the backward
    recompute: Recompute = field(default_factory=Recompute)

    def __post_init__(self):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
                     "ddp_bucket_size"):
            require_positive(name, getattr(self, name))
        check_zero_stage(self.zero_stage)
        if self.cpu_offload and self.zero_stage == 0:
            raise UserError("--cpu-offload offloads a rank's shard of the model's states, but without ZeRO there are "
                            "no shards. Choose --zero-stage 1, 2 or 3.")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise UserError("--sequence-parallel shards the sequence over the tensor-parallel ranks, but "
                            "--tensor-model-parallel-size is 1. Choose at least 2, or leave the option out.")
        if self.keep_gathered_inputs and not self.sequence_parallel:
            raise UserError("--keep-gathered-inputs needs --sequence-parallel: without it nothing is gathered.")

    @classmethod
    def for_world(cls, world_size: int, t: int, p: int = 1, **choices) -> "ParallelConfig":
        """Derive the data-parallel size from the world size, t and p. `choices` are the other fields."""
        require_positive("tensor_model_parallel_size", t)
        require_positive("pipeline_model_parallel_size", p)
        if world_size % (t * p):
            needs = f" and --pipeline-model-parallel-size is {p}" if p > 1 else ""
            raise UserError(f"--tensor-model-parallel-size is {t}{needs}, so the number of ranks must be a multiple of "
                            f"{t * p}, but it is {world_size}. Start {-(-world_size // (t * p)) * t * p} ranks, or "
                            f"choose a size that divides {world_size}.")
        return cls(t, p, world_size // (t * p), **choices)

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size

    @property
    def sequence_shards(self) -> int:
        """Return the number of shards of the sequence outside the tensor-parallel regions."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def scattered_parts(self) -> int:
        """Return the number of shards into which a rank's activation is scattered for the next stage, which gathers it.

        With sequence parallelism it is sharded already, and the receivers need not gather.
        """
        whole = self.sequence_parallel or not self.scatter_gather_tensors_in_pipeline
        return 1 if whole else self.tensor_model_parallel_size

    @property
    def sent_parts(self) -> int:
        """Return the number of shards of a stage's result [b, s, h], of which each rank sends one."""
        return self.sequence_shards * self.scattered_parts

    @property
    def shards(self) -> int:
        """Return the number of shards that the replicas make of the flat buffers."""
        return self.data_parallel_size if self.zero_stage else 1

    @property
    def bucket_size(self) -> int:
        """Return the smallest size of a bucket, in elements. ZeRO-3 gathers unit by unit."""
        return 1 if self.zero_stage == 3 else self.ddp_bucket_size


def check_model_fits(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError unless every tensor-parallel rank gets whole heads (and so 4h/t columns of the MLP)."""
    require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size,
                    "num_attention_heads", model.num_attention_heads,
                    "A rank holds whole attention heads, and 4h/t columns of the MLP.")


def check_sequence_fits(seq_length: int, parallel: ParallelConfig) -> None:
    """Raise UserError unless sequence parallelism gives every rank the same number of positions."""
    if parallel.sequence_parallel:
        require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size, "seq_length", seq_length,
                        "With --sequence-parallel every rank has the same number of positions.")


def check_zero_stage(stage: int) -> None:
    if stage not in range(4):
        raise UserError(f"--zero-stage is {stage}, but must be 0 (nothing is sharded), 1 (optimizer states), 2 (and "
                        "gradients) or 3 (and parameters).")


def number_of_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """Return m = B / (b d), the number of microbatches that each replica processes one after another in a step."""
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        require_positive(name, value)
    together = micro_batch_size * data_parallel_size
    if global_batch_size % together:
        raise UserError(f"--global-batch-size is {global_batch_size}, but must be a multiple of --micro-batch-size x "
                        f"data-parallel size = {micro_batch_size} x {data_parallel_size} = {together}. "
                        f"The nearest that fits is {max(1, round(global_batch_size / together)) * together}.")
    return global_batch_size // together


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def option(name: str) -> str:
    """Return the command line's form of a name: `hidden_size` -> `--hidden-size`, `p` -> `-p`. A formula stays."""
    dashes = "-" if len(name) == 1 else "--"
    return name if " " in name else dashes + name.replace("_", "-")


def require_positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{option(name)} is {value}, but must be at least 1.")
    require_not_too_large(name, value)


def require_not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise UserError(f"{option(name)} is {value}, but must be a number that is not negative.")
    require_not_too_large(name, value)


def require_not_too_large(name: str, value: float) -> None:
    if name in LARGEST and value > LARGEST[name]:
        raise UserError(f"{option(name)} is {value:,}, but must be at most {LARGEST[name]:,}, which is several times "
                        "the largest in use. Choose a smaller one.")


def require_divides(part: str, part_value: int, whole: str, whole_value: int, why: str) -> None:
    if whole_value % part_value:
        divisors = [n for n in range(1, min(whole_value, 1024) + 1) if whole_value % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - part_value))[:4])
        raise UserError(f"{option(part)} is {part_value}, but must divide {option(whole)}, which is {whole_value}. "
                        f"{why} Near {part_value}, these divide it: {', '.join(map(str, near))}.")


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{option(name)} is {value!r}, but must be one of {', '.join(choices)}.")
