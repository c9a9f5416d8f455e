"""Sizes of a model and of its split over ranks, every rule they must keep, and the sentence for a broken one.

Letters of the papers: h hidden size, L layers, a attention heads, s sequence length, V vocabulary size;
t tensor-parallel, p pipeline-parallel, d data-parallel ranks; b micro-batch size, B global batch size.
"""
from collections.abc import Iterable
from dataclasses import dataclass, field

from reference.errors import UserError
from reference.ops import ACTIVATIONS

ARCHITECTURES = {"gpt": (("lm",),), "bert": (("lm", "sop"), ("lm",), ("choice",))}     # and the heads of each
POSITION_EMBEDDINGS = ("learned_absolute", "rope")
RECOMPUTE = ("none", "selective", "full")   # of activations: nothing, attention's core, all of each layer

# The largest sizes that options may ask for, by name: several times the largest that were published, which stand behind
# them, and small enough that whatever goes through layers, devices or divisors of a batch ends within seconds.
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
    "tensor_model_parallel_size": 10_000,       # as many as heads; 8 in the papers
    "pipeline_model_parallel_size": 1_000,      # 64: Narayanan et al. 2021
    "pipeline ranks p": 1_000,                  # the same, of a schedule by itself
    "data_parallel_size": 1_000_000,
    "num_gpus": 1_000_000,                      # 16,384: Meta 2024 (Llama 3)
    "train_iters": 100_000_000,                 # 2 million: Devlin et al. 2018 (BERT)
    "eval_iters": 1_000_000,
    "epochs": 10_000,
    "num_samples": 1_000_000,                   # texts for each prompt
    "tokens_to_generate": 100_000_000,
    "sample_tokens": 100_000_000,
    "layers": 1_000,                            # of the experiment with narrow models,
    "seeds": 10_000,                            # and how many of each
    "ranks": 1_000,                             # processes that measure one machine
}


@dataclass(frozen=True)
class ModelConfig:
    """A GPT's or BERT's sizes and choices. Names are Megatron's. Raises UserError where they do not fit together."""

    num_layers: int                                    # L
    hidden_size: int                                   # h
    num_attention_heads: int                           # a
    vocab_size: int                                    # V, without padding
    max_position_embeddings: int                       # the longest sequence
    position_embedding_type: str = "learned_absolute"
    rotary_percent: float = 1.0                        # the share of each head that rope turns
    untie_embeddings_and_output_weights: bool = False
    activation: str = "gelu"                           # GPT's tanh form; the exact one and ReLU on request
    init_method_std: float = 0.02
    layernorm_epsilon: float = 1e-5
    hidden_dropout: float = 0.1                        # of the embedding, and of each branch before it is added
    attention_dropout: float = 0.1                     # of attention's probabilities
    make_vocab_size_divisible_by: int = 128
    fp16_lm_cross_entropy: bool = False                # in float16, the loss too, rather than in float32
    architecture: str = "gpt"                          # or bert, whose attention looks both ways
    heads: tuple[str, ...] = ("lm",)                   # what it predicts: words; sop, the order of sentences; a choice
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
                            "it is the share of each head's dimensions that is turned.")
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
        """Whether there are logits that read the embedding's word table."""
        return "lm" in self.heads and not self.untie_embeddings_and_output_weights

    @property
    def causal(self) -> bool:
        """Whether a position sees itself and those before it, or all."""
        return self.architecture == "gpt"

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Dimensions of each head that rope turns."""
        return int(self.head_size * self.rotary_percent)

    def padded_vocab_size(self, t: int) -> int:
        """V rounded up to a multiple of make_vocab_size_divisible_by x t, so that t ranks hold equal shares."""
        return round_up(self.vocab_size, self.make_vocab_size_divisible_by * t)


@dataclass(frozen=True)
class Recompute:
    """Which activations the forward does not keep, so that the backward computes them again (Korthikanti et al. 2022).

    Names and meanings are Megatron's. `selective` does so with attention's core, in all layers; `full` with all of a
    layer but its input. By the method `uniform` each stage's layers are cut into groups of num_layers, of which only
    the input is kept; by `block` num_layers layers of each stage are recomputed, one by one, and the others kept.
    Larger groups keep fewer inputs, but the backward holds all that a group's layers have computed, at once.
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
        """A stage's layers, in order, cut into groups; and of each whether it keeps its input only."""
        layers, n = list(layers), self.num_layers
        if self.granularity == "full" and self.method == "uniform":
            return [(layers[i:i + n], True) for i in range(0, len(layers), n)]
        recomputed = n if self.granularity == "full" else 0
        return [([layer], i < recomputed) for i, layer in enumerate(layers)]


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work: how many hold one model (t, p), how many models there are (d), how a pipeline is
    scheduled, how gradients are summed, and what of the model's states and activations a rank keeps.

    Raises UserError for sizes below 1, and for choices that do not go together.
    """

    tensor_model_parallel_size: int = 1    # t
    pipeline_model_parallel_size: int = 1  # p
    data_parallel_size: int = 1            # d
    pipeline_schedule: str = "1f1b"        # a name in reference/schedules/generators.py
    virtual_pipeline_size: int | None = None   # v, for a schedule with several stages on each rank
    scatter_gather_tensors_in_pipeline: bool = True   # whether each of t ranks sends 1/t of an activation
    ddp_bucket_size: int = 1 << 20         # elements of gradients that are summed over the replicas together, at least
    zero_stage: int = 0                    # what the replicas cut: optimizer states (1), gradients (2), parameters (3)
    cpu_offload: bool = False              # whether a rank's shards of what ZeRO cuts, but for gradients, are far
    sequence_parallel: bool = False        # whether what is outside tensor-parallel regions is cut by positions
    keep_gathered_inputs: bool = False     # with that: whether the backward finds the regions' inputs, or gathers again
    recompute: Recompute = field(default_factory=Recompute)

    def __post_init__(self):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
                     "ddp_bucket_size"):
            require_positive(name, getattr(self, name))
        check_zero_stage(self.zero_stage)
        if self.cpu_offload and self.zero_stage == 0:
            raise UserError("--cpu-offload puts a rank's shard of the model's states in far memory, but without ZeRO "
                            "there are no shards. Choose --zero-stage 1, 2 or 3.")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise UserError("--sequence-parallel cuts the sequence over the tensor-parallel ranks, but "
                            "--tensor-model-parallel-size is 1. Choose at least 2, or leave the option out.")
        if self.keep_gathered_inputs and not self.sequence_parallel:
            raise UserError("--keep-gathered-inputs needs --sequence-parallel: without it nothing is gathered.")

    @classmethod
    def for_world(cls, world_size: int, t: int, p: int = 1, **choices) -> "ParallelConfig":
        """Data parallelism takes what tensor and pipeline parallelism leave of the world. Other fields as `choices`."""
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
        """Into how many the sequence is cut outside the tensor-parallel regions."""
        return self.tensor_model_parallel_size if self.sequence_parallel else 1

    @property
    def scattered_parts(self) -> int:
        """Into how many a rank's activation is cut on its way to the next stage, to be gathered there.

        With sequence parallelism it is cut already, and the receivers need not gather.
        """
        whole = self.sequence_parallel or not self.scatter_gather_tensors_in_pipeline
        return 1 if whole else self.tensor_model_parallel_size

    @property
    def sent_parts(self) -> int:
        """Into how many a stage's result [b, s, h] is cut between its ranks, each of which sends one."""
        return self.sequence_shards * self.scattered_parts

    @property
    def shards(self) -> int:
        """Into how many parts the replicas cut the flat buffers."""
        return self.data_parallel_size if self.zero_stage else 1

    @property
    def bucket_size(self) -> int:
        """Elements of a bucket, at least. ZeRO-3 gathers unit by unit."""
        return 1 if self.zero_stage == 3 else self.ddp_bucket_size


def check_model_fits(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Tensor parallelism gives every rank whole heads (and so 4h/t columns of the MLP). Raises UserError otherwise."""
    require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size,
                    "num_attention_heads", model.num_attention_heads,
                    "A rank holds whole attention heads, and 4h/t columns of the MLP.")


def check_sequence_fits(seq_length: int, parallel: ParallelConfig) -> None:
    """Sequence parallelism gives every rank as many positions. Raises UserError otherwise."""
    if parallel.sequence_parallel:
        require_divides("tensor_model_parallel_size", parallel.tensor_model_parallel_size, "seq_length", seq_length,
                        "With --sequence-parallel every rank has as many positions.")


def check_zero_stage(stage: int) -> None:
    if stage not in range(4):
        raise UserError(f"--zero-stage is {stage}, but must be 0 (nothing is cut), 1 (optimizer states), 2 (and "
                        "gradients) or 3 (and parameters).")


def number_of_microbatches(global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> int:
    """m = B / (b d): how many microbatches each replica takes, one after another, for one step."""
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        require_positive(name, value)
    together = micro_batch_size * data_parallel_size
    if global_batch_size % together:
        raise UserError(f"--global-batch-size is {global_batch_size}, but must be a multiple of --micro-batch-size x "
                        f"data-parallel size = {micro_batch_size} x {data_parallel_size} = {together}. "
                        f"The nearest that fits is {max(1, round(global_batch_size / together)) * together}.")
    return global_batch_size // together


def round_up(n: int, multiple: int) -> int:
    """The next multiple that is not below n."""
    return -(-n // multiple) * multiple


def option(name: str) -> str:
    """`hidden_size` -> `--hidden-size`; a formula stays as it is."""
    return name if " " in name else "--" + name.replace("_", "-")


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
