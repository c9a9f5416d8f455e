"""Megatron's options for pre-training, and a few of our own. arguments.py checks them against one another."""
from collections.abc import Sequence
from typing import Any

from mpi_impl.comm.transports import BACKENDS
from mpi_impl.data.tokenizer_types import TOKENIZER_TYPES
from mpi_impl.launch.option_fields import declared, option_field, option_group, parse_given, same_option
from reference.config import (ACTIVATIONS, CP_COMM_TYPES, DECAY_STYLES, MUON_SCALE_MODES, NORMALIZATIONS, OPTIMIZERS,
                              POSITION_EMBEDDINGS, RECOMPUTE, ExpertsConfig, ModelConfig, OptimizerConfig, option,
                              require_not_negative, require_positive)
from reference.errors import UserError
from reference.schedules.generators import SCHEDULES
from shardlab.programs.presets import PRESETS

NAMES = {"gpt": "GPT", "bert": "BERT"}      # of architectures, for people


@option_group
class ModelOptions:
    """The model."""

    num_layers: int = option_field(4, metavar="L")
    hidden_size: int = option_field(256, metavar="H")
    num_attention_heads: int = option_field(8, metavar="A")
    seq_length: int = option_field(128, metavar="S", check=require_positive)
    max_position_embeddings: int | None = option_field(None, "default: --seq-length", "N")
    position_embedding_type: str = option_field(ModelConfig.position_embedding_type, choices=POSITION_EMBEDDINGS)
    rotary_percent: float = option_field(ModelConfig.rotary_percent, "share of each head that rope turns")
    make_vocab_size_divisible_by: int = option_field(
        ModelConfig.make_vocab_size_divisible_by,
        "the vocabulary is padded to a multiple of this x tensor-parallel size", "N")
    activation: str = option_field(ModelConfig.activation, "gelu is GPT's, approximated with tanh", choices=ACTIVATIONS)
    apply_residual_connection_post_layernorm: bool = option_field(
        False, "the residual connection begins after each layer norm, as in the original BERT, not before it")
    share_layers: bool = option_field(
        False, "all layers use the parameters of one block, as in ALBERT: its gradients are summed over the layers")
    layernorm_epsilon: float = option_field(ModelConfig.layernorm_epsilon, also="norm_epsilon")
    init_method_std: float = option_field(ModelConfig.init_method_std)
    hidden_dropout: float = option_field(
        ModelConfig.hidden_dropout, "share of the embedding and of each branch's output that training drops")
    attention_dropout: float = option_field(
        ModelConfig.attention_dropout, "share of attention's probabilities that training drops")


@option_group
class ExpertsOptions:
    """Mixture of experts."""

    num_experts: int | None = option_field(None, "in the MLP's place (default: none)", "E")
    moe_router_topk: int | None = option_field(
        None, f"experts that compute a token (default: {ExpertsConfig.moe_router_topk}, or the only one)", "K")
    moe_router_pre_softmax: bool = option_field(
        False, "weights are softmax over all experts, not over the K chosen ones alone")
    moe_ffn_hidden_size: int | None = option_field(None, "columns of each expert (default: those of the MLP)", "N")
    moe_layer_freq: int = option_field(ExpertsConfig.moe_layer_freq, "every N-th layer has experts", "N")
    moe_shared_expert_intermediate_size: int | None = option_field(
        None, "columns of an MLP that computes all tokens, in addition to the experts (default: none)", "N")
    moe_aux_loss_coeff: float = option_field(
        ExpertsConfig.moe_aux_loss_coeff, "of the load-balancing loss, which is taken over each sequence", "C")
    moe_z_loss_coeff: float = option_field(
        ExpertsConfig.moe_z_loss_coeff, "of the loss that keeps the router's logits small", "C")
    moe_expert_capacity_factor: float | None = option_field(
        None, "an expert takes at most this many times its even share of a microbatch's tokens, and drops the rest "
        "(default: no token is dropped)", "C")


def check_timeout(name: str, minutes: float) -> None:
    """Raise UserError for a time limit that is too short or too long to be meant."""
    if not 0.01 <= minutes <= 60 * 24 * 7:
        raise UserError(f"{option(name)} is {minutes}, but must be at least 0.01, and at most a week, which is 10080.")


@option_group
class ParallelismOptions:
    """Parallelism."""

    tensor_model_parallel_size: int = option_field(
        1, "ranks that share each layer; data parallelism takes the rest of the world", "T")
    context_parallel_size: int = option_field(
        1, "ranks that share each sample: each has other positions of it, two of 2 C chunks", "C")
    cp_comm_type: str | None = option_field(
        None, "how attention reaches the keys of other ranks: they travel around a ring while blocks are computed "
        "(p2p, the default), all ranks get all of them (all_gather), or ranks exchange heads for positions (a2a)",
        choices=CP_COMM_TYPES)
    pipeline_model_parallel_size: int = option_field(
        1, "ranks (or groups of T) that hold the layers between them; what does not divide evenly goes to the first "
        "stages, a layer more for each", "P")
    expert_model_parallel_size: int = option_field(
        1, "ranks, of those with copies of all else, to which experts are dealt out", "E")
    pipeline_schedule: str | None = option_field(
        None, "default: 1f1b, or interleaved where the following option is given",
        choices=[name for name in SCHEDULES if name != "forward-only"])
    num_layers_per_virtual_pipeline_stage: int | None = option_field(
        None, "divide a rank's layers into several stages of at most N, for the interleaved schedule", "N")
    no_scatter_gather_tensors_in_pipeline: bool = option_field(
        False, "each of T ranks sends the whole activation to the next stage, not 1/T of it")
    ddp_bucket_size: int | None = option_field(
        None, "elements of gradients that are summed over the replicas in one go (default: 1048576)", "N")
    distributed_timeout_minutes: float = option_field(
        10.0, "end the run after a rank has waited this long for another (for --verify, too)", "M", check=check_timeout)


@option_group
class DeviceOptions:
    """Device."""

    device: str = option_field(
        "cpu", "where ranks compute: each on a CPU core, or on the CUDA GPU of its number on its machine, which some "
        "share if there are more ranks; cuda needs CuPy", choices=("cpu", "cuda"))
    distributed_backend: str | None = option_field(
        None, "how arrays get from GPU to GPU: collectives by NCCL, if every rank has a GPU of its own, or, to try it "
        "out, if ranks share one and NCCL is 2.30 or newer; by MPI from GPU to GPU, if it is CUDA-aware; or staged "
        "through host memory (default: the first that is possible, but NCCL only where no GPU is shared)",
        choices=BACKENDS)


@option_group
class GraphOptions:
    """CUDA graphs."""

    cuda_graph_impl: str = option_field(
        "none", "record what the second step gives a GPU until its gradients are there (full_iteration), and then give "
        "it the recording, in one call: small models are several times as fast",
        choices=("none", "full_iteration"))


@option_group
class MemoryOptions:
    """Memory."""

    zero_stage: int | None = option_field(
        None, "the replicas shard, instead of replicate: optimizer states (1), gradients, too (2), "
        "parameters, too (3); default: 0, nothing", "N")
    use_distributed_optimizer: bool = option_field(False, "the same as --zero-stage 1")
    num_distributed_optimizer_instances: int = option_field(
        1, "hybrid sharding: divide the replicas into N groups of neighbours, each of which shards a copy", "N")
    cpu_offload: bool = option_field(
        False, "offload a rank's shard of the optimizer's states, and with ZeRO-3 of the parameters, to host memory "
        "that it does not compute in")
    offload_folder: str | None = option_field(None, "with --cpu-offload: to files in this folder", "DIR")
    sequence_parallel: bool = option_field(
        False, "shard the work outside the tensor-parallel regions (norms, dropout, residual sums) by positions")
    keep_gathered_inputs: bool = option_field(
        False, "with --sequence-parallel: keep the gathered inputs for the backward, rather than gather again")
    recompute_granularity: str | None = option_field(
        None, "of activations, keep only each layer's input (full), or all but attention's core (selective), and "
        "compute the rest again in the backward", choices=RECOMPUTE)
    recompute_activations: bool = option_field(False, "the same as --recompute-granularity selective")
    recompute_method: str | None = option_field(
        None, "of full: in groups of N layers (uniform, the default), or N layers of each stage (block)",
        choices=("uniform", "block"))
    recompute_num_layers: int | None = option_field(None, "default: 1", "N")


@option_group
class TrainingOptions:
    """Training."""

    micro_batch_size: int = option_field(4, metavar="b", check=require_positive)
    global_batch_size: int | None = option_field(
        None, "default: --micro-batch-size x data-parallel size; more means gradient accumulation", "B")
    train_iters: int | None = option_field(400, check=require_positive)
    exit_interval: int | None = option_field(
        None, "stop after an iteration that N divides", "N", check=require_positive)
    lr: float = option_field(1e-3)
    min_lr: float = option_field(OptimizerConfig.min_lr)
    lr_decay_style: str = option_field(OptimizerConfig.lr_decay_style, choices=DECAY_STYLES)
    lr_decay_iters: int | None = option_field(None, "default: --train-iters")
    lr_warmup_iters: int = option_field(OptimizerConfig.lr_warmup_iters)
    lr_warmup_fraction: float | None = option_field(None, "of --lr-decay-iters")
    weight_decay: float = option_field(OptimizerConfig.weight_decay)
    clip_grad: float = option_field(OptimizerConfig.clip_grad, "largest global norm of the gradient; 0: no clipping")
    adam_beta1: float = option_field(OptimizerConfig.adam_beta1)
    adam_beta2: float = option_field(OptimizerConfig.adam_beta2)
    adam_eps: float = option_field(OptimizerConfig.adam_eps)
    seed: int = option_field(1234)


@option_group
class MuonOptions:
    """Muon."""

    optimizer: str = option_field(
        OptimizerConfig.optimizer, "muon orthogonalizes the momentum of each matrix; Adam still moves embeddings, "
        "norms, biases, routers and heads", choices=OPTIMIZERS)
    muon_momentum: float = option_field(OptimizerConfig.muon_momentum)
    muon_use_nesterov: bool = option_field(
        False, "orthogonalize the momentum as it will be after the same gradient once more", also="muon_nesterov")
    muon_num_ns_steps: int = option_field(OptimizerConfig.muon_num_ns_steps, "rounds of Newton-Schulz", "N")
    muon_scale_mode: str = option_field(
        OptimizerConfig.muon_scale_mode, "of the updates: elements as large as Adam's (spectral), or outputs that move "
        "as far as inputs are large", choices=MUON_SCALE_MODES)
    muon_extra_scale_factor: float = option_field(OptimizerConfig.muon_extra_scale_factor)
    muon_tp_mode: str = option_field(
        OptimizerConfig.muon_tp_mode, "tensor-parallel ranks gather the momentum of a matrix, and each orthogonalizes "
        "it (duplicated); or keep their shards, and sum products of them in every round (distributed)", "MODE")


@option_group
class PrecisionOptions:
    """Precision."""

    dtype: str = option_field("float32", choices=("float32", "float64"))
    fp16: bool = option_field(False, "the model computes in float16, with a scaled loss; master weights, main "
                              "gradients, moments and the loss are in float32")
    bf16: bool = option_field(False, "the same in bfloat16, whose range needs no loss scale")
    # Those of the loss scale are None unless they are given; reference/precision.py has their defaults.
    loss_scale: float | None = option_field(
        None, "of --fp16: a scale that never changes (default: it follows the gradients)", "S")
    initial_loss_scale: float | None = option_field(None, "(default: 2^32)", "S")
    min_loss_scale: float | None = option_field(None, "(default: 1)", "S")
    loss_scale_window: int | None = option_field(
        None, "steps without overflow, after which the scale is multiplied by its factor (default: 1000)", "N")
    hysteresis: int | None = option_field(
        None, "how many overflows it takes before the scale is divided by its factor (default: 2)", "N")
    loss_scale_factor: float | None = option_field(
        None, "a power of 2, so that no digit is rounded; not an option of Megatron (default: 2)", "X")
    fp16_lm_cross_entropy: bool = option_field(False, "compute the loss in float16, too")


@option_group
class DataOptions:
    """Data."""

    data_path: tuple[str, ...] | None = option_field(
        None, "a text file, a folder, JSON lines, or the prefix of a Megatron .bin/.idx pair; or several to blend, "
        "each behind its weight: 0.3 A 0.7 B; default: the source of Python's own standard library", "PATH")
    split: str = option_field("969,30,1", "proportions of training, validation and test")
    tokenizer_type: str = option_field("ByteLevelBPETokenizer", choices=TOKENIZER_TYPES)
    vocab_size: int | None = option_field(
        None, "of the tokenizer that is trained on the corpus (default: 4096), or of a NullTokenizer", "V")
    data_cache_path: str | None = option_field(None, "default: ~/.cache/shardlab", "DIR")


@option_group
class TokenizerFileOptions:
    """The files of the tokenizer."""

    tokenizer_model: str | None = option_field(
        None, "a tokenizer that training has saved, or a model's tokenizer.json", "F")
    vocab_file: str | None = option_field(None, "GPT-2's vocab.json, or BERT's vocab.txt", "F")
    merge_file: str | None = option_field(None, "GPT-2's merges.txt", "F")


@option_group
class StateOptions:
    """Saving and loading."""

    save: str | None = option_field(None, "save a checkpoint in this folder at the end", "DIR")
    save_interval: int | None = option_field(
        None, "with --save: after every N-th iteration, too", "N", check=require_positive)
    exit_signal_handler: bool = option_field(
        False, "with --save: after a SIGTERM to any rank, save a checkpoint and end with status 75")
    load: str | None = option_field(
        None, "resume from the last checkpoint in this folder, on any number of ranks", "DIR")
    load_hf: str | None = option_field(
        None, "begin with the weights of a model in Hugging Face's layout", "DIR")
    save_hf: str | None = option_field(None, "write the weights in that layout at the end", "DIR")


@option_group
class ReportOptions:
    """Reports."""

    log_interval: int = option_field(10, check=require_positive)
    log_throughput: bool = option_field(
        False, "with each line the model's FLOP/s on a rank, and their share of the peak (MFU); and once the memory "
        "that a rank should take, and took")
    eval_interval: int = option_field(100, check=require_positive)
    eval_iters: int = option_field(10, "global batches in an evaluation; 0: none", check=require_not_negative)
    verify: bool = option_field(False, "also train in one process on rank 0, and fail if the two runs differ")
    compare_calls: bool = option_field(
        False, "compare all ranks' calls before arrays move, and end with the lines of two that do not fit together")
    metrics_file: str | None = option_field(None, "write JSON lines, one for each iteration and evaluation", "F")
    ledger: str | None = option_field(None, "write the traffic of each kind, and its prediction, as JSON", "F")
    plot: str | None = option_field(None, "draw the losses, as a .png, .pdf or .svg", "F")
    report: str | None = option_field(
        None, "write a page for a browser: losses, ranks, traffic, memory, and a step to play, action by action", "F")
    verbose: bool = option_field(
        False, "end with every line of the ledger and of the ranks' memory, each next to its formula")
    record: str | None = option_field(
        None, "write every tensor of the first two iterations, for shardlab.compare", "DIR")
    trace: str | None = option_field(None, "write a timeline of each rank's work, for Perfetto, and draw it", "DIR")
    trace_clock: str = option_field(
        "wall", "virtual: as if every rank had a device of its own, for any number of cores",
        choices=("wall", "virtual"))


@option_group
class PretrainingOptions(ModelOptions, ExpertsOptions, ParallelismOptions, DeviceOptions, GraphOptions,
                         MemoryOptions, TrainingOptions, MuonOptions, PrecisionOptions, DataOptions,
                         TokenizerFileOptions, StateOptions, ReportOptions):
    """The options that a GPT and a BERT have in common."""


def preset_option(architecture: str) -> Any:
    """Declare --preset for the models of one architecture."""
    return option_field(
        None, "a published model and its training: other defaults for the options above",
        choices=PRESETS[architecture])


@option_group
class LlamaOptions:
    """The Llama family."""

    normalization: str = option_field(ModelConfig.normalization, "RMSNorm has no mean and no bias",
                                      choices=NORMALIZATIONS)
    swiglu: bool = option_field(False, "the MLP has a gate: silu(x G) * x U, in place of the activation")
    squared_relu: bool = option_field(False, "the MLP has a squared ReLU in place of the activation, as Nemotron-4's")
    ffn_hidden_size: int | None = option_field(
        None, "the MLP's width (default: 4 x --hidden-size, or with --swiglu 8/3 of it, down to a multiple of 64)", "N")
    group_query_attention: bool = option_field(
        False, "several heads of queries share a head of keys and values")
    num_query_groups: int | None = option_field(
        None, "with --group-query-attention: heads of keys and values (default: 1)", "G")
    kv_channels: int | None = option_field(None, "the size of a head (default: H / A)", "D")
    disable_bias_linear: bool = option_field(False, "no biases in the linear layers of a block")
    add_qkv_bias: bool = option_field(False, "with --disable-bias-linear: biases of Q, K and V nevertheless")
    qk_layernorm: bool = option_field(False, "normalize each head of Q and of K, before rope")
    rotary_base: float = option_field(ModelConfig.rotary_base, "the slowest pair of rope's turns once in 2 pi x this")
    use_rope_scaling: bool = option_field(False, "lower rope's slow frequencies, as Llama 3.1 does for longer texts")
    rope_scaling_factor: float = option_field(ModelConfig.rope_scaling_factor, "with --use-rope-scaling")


@option_group
class GPTPretrainingOptions(PretrainingOptions, LlamaOptions):
    """GPT."""

    preset: str | None = preset_option("gpt")
    untie_embeddings_and_output_weights: bool = option_field(False)
    sample_tokens: int = option_field(0, "write N tokens of text at the end", "N", check=require_not_negative)


@option_group
class BERTPretrainingOptions(PretrainingOptions):
    """BERT."""

    preset: str | None = preset_option("bert")
    tokenizer_type: str = same_option(DataOptions, "tokenizer_type", "BertWordPieceLowerCase")
    bert_no_binary_head: bool = option_field(
        False, "predict masked tokens alone, not whether the two pieces of text were swapped")
    mask_prob: float = option_field(0.15, "the largest share of a sample's tokens to predict", "P")
    short_seq_prob: float = option_field(0.1, "share of samples that are shorter than necessary", "P")


OPTIONS: dict[str, type[PretrainingOptions]] = {"gpt": GPTPretrainingOptions, "bert": BERTPretrainingOptions}

# Options that say nothing of what a step computes, for programs that take a run's command line and do not train.
OUTSIDE_A_STEP = {*declared(DataOptions), *declared(TokenizerFileOptions), *declared(StateOptions),
                  *declared(ReportOptions), "sample_tokens", "short_seq_prob", "train_iters", "exit_interval",
                  "init_method_std", "offload_folder"} - {"load_hf", "vocab_size"}


def parse_options(argv: Sequence[str] | None, architecture: str) -> dict[str, Any]:
    """Parse a command line, and return the options that it gives. When one is given twice, the last one counts. Raises
    UserError.
    """
    return parse_given(f"pretrain_{architecture}", f"Train a {NAMES[architecture]} on text with tensor, pipeline and "
                       "data parallelism.", OPTIONS[architecture], argv)
