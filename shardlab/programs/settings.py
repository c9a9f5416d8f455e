"""The options of a command line, checked against one another, and made into configs."""
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mpi_impl.checkpoints.huggingface_config import adopt_options, check_expressible
from mpi_impl.data.bert import check_samples
from mpi_impl.data.blend import parse_blend
from mpi_impl.launch.option_fields import declared, filled
from mpi_impl.launch.restarts import RESTARTS
from mpi_impl.runtime.outputs import same_file
from mpi_impl.runtime.rank_environment import environment_count
from mpi_impl.runtime.tables import count
from reference.config import (ExpertsConfig, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              check_sequence_fits, data_parallel_size, number_of_microbatches, option, require_positive)
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import stages_of_ranks
from reference.precision import LossScaling, Precision
from reference.schedules.generators import MOST_ACTIONS
from shardlab.programs.options import (OPTIONS, BERTPretrainingOptions, LlamaOptions, MuonOptions, PretrainingOptions,
                                       parse_options)
from shardlab.programs.partners import check_partners
from shardlab.programs.presets import PRESETS

LOSS_SCALING = [field.name for field in fields(LossScaling)]     # options' names, too

# Options on which a step depends, besides those of the optimizer.
OF_A_STEP = ("seed", "global_batch_size", "seq_length", "data_path", "split", "tokenizer_type", "hidden_dropout",
             "attention_dropout", "fp16", "bf16", *LOSS_SCALING, "fp16_lm_cross_entropy")
OF_A_BERTS_STEP = ("mask_prob", "short_seq_prob")

# Options that replace others, which a preset may have.
INSTEAD = {"fp16": ("bf16",), "bf16": ("fp16",), "dtype": ("fp16", "bf16"),
           "lr_warmup_fraction": ("lr_warmup_iters",), "recompute_activations": ("recompute_granularity",)}


@dataclass(frozen=True)
class PretrainingSettings:
    """A program's options, checked against one another and against the number of ranks."""

    args: Any                  # PretrainingOptions, with the defaults that follow from other options filled in
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    precision: Precision
    microbatches: int          # of each replica in each step
    architecture: str = "gpt"  # of ModelConfig

    def of_a_step(self) -> dict[str, Any]:
        """Return the settings that two runs must have in common to compute the same from one checkpoint on."""
        names = OF_A_STEP + (OF_A_BERTS_STEP if self.architecture == "bert" else ())
        found = {name: getattr(self.args, name) for name in names} | asdict(self.optimizer)
        return found | {"data_path": self.args.data_path and " ".join(self.args.data_path)}

    def model(self, vocab_size: int) -> ModelConfig:
        """Return the model with the tokenizer's vocabulary. Raise UserError for sizes that do not fit."""
        heads = ("lm",) if self.architecture == "gpt" or self.args.bert_no_binary_head else ("lm", "sop")
        model = filled(ModelConfig, self.args, vocab_size=vocab_size, architecture=self.architecture, heads=heads,
                       experts=experts_config(self.args), **in_other_words(self.args))
        check_split(model, self.parallel)
        return model


def experts_config(args) -> ExpertsConfig | None:
    """Return the experts, if there are any.

    Raises UserError for a capacity that is to be verified, and for a new router that would never learn.
    """
    if args.num_experts is None:
        return None
    if args.moe_expert_capacity_factor is not None and args.verify:
        raise UserError("--moe-expert-capacity-factor drops tokens by their number in a microbatch, and one process "
                        "has the whole batch in one: it drops others, so --verify would compare two different runs. "
                        "Leave one of the two out.")
    k = args.moe_router_topk
    if k == 1 < args.num_experts and not args.moe_router_pre_softmax and not (args.load or args.load_hf):
        raise UserError("--moe-router-topk is 1, so softmax over the chosen expert alone is always 1, and a new router "
                        "would never learn from the loss. Add --moe-router-pre-softmax, or choose at least 2.")
    return filled(ExpertsConfig, args,
                  moe_router_topk=min(ExpertsConfig.moe_router_topk, args.num_experts) if k is None else k)


def in_other_words(args) -> dict[str, Any]:
    """Return the fields of a ModelConfig that have another form than the options, or another name."""
    if not isinstance(args, LlamaOptions):
        return {"predicted_share": args.mask_prob} if isinstance(args, BERTPretrainingOptions) else {}
    groups = 1 if args.num_query_groups is None else args.num_query_groups
    return {"num_query_groups": groups if args.group_query_attention else None,
            "add_bias_linear": not args.disable_bias_linear}


def parse(argv: Sequence[str] | None, world_size: int, architecture: str = "gpt") -> PretrainingSettings:
    """Parse and check a command line. Raises UserError."""
    return settings_of(parse_options(argv, architecture), OPTIONS[architecture], world_size, architecture)


def settings_of(given: dict[str, Any], kind: Any, world_size: int, architecture: str) -> PretrainingSettings:
    """Check the given options of this kind, and fill in the others. Raises UserError."""
    preset = preset_of(given, architecture)
    args: Any = kind(**preset | given)
    check_files(args)
    check_device(args)
    if args.load_hf is not None:
        found = adopt_options(args.load_hf, architecture, given)      # also a BERT's tied table, which is not an option
        args = kind(**preset | {name: found[name] for name in found.keys() & declared(kind).keys()} | given)
    check_partners(given, args)
    parallel = parallel_config(args, world_size, args.num_layers)
    args = with_defaults(args, parallel.data_parallel_size)
    microbatches = microbatches_of(args, parallel)
    check_graph(args, world_size, architecture)
    check_sequence(args)
    if args.data_path:
        parse_blend(args.data_path)
    if architecture == "bert":
        check_samples(args.tokenizer_type, args.seq_length, args.mask_prob, args.short_seq_prob)
    if args.save_hf is not None:
        check_expressible(args, architecture)
    settings = PretrainingSettings(args, parallel, optimizer_config(args), precision(args), microbatches, architecture)
    settings.model(vocab_size=1)     # reports now, before the corpus is read, all that is wrong with any vocabulary
    return settings


def preset_of(given: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the options that --preset stands for, without those that a given option of another name replaces."""
    preset = PRESETS[architecture].get(given.get("preset", ""), {})
    replaced = {other for name in given.keys() & INSTEAD.keys() for other in INSTEAD[name]}
    return {name: value for name, value in preset.items() if name not in replaced}


def with_defaults(args: PretrainingOptions, data_parallel_size: int) -> PretrainingOptions:
    """Fill in the defaults that follow from other options."""
    batch, positions = args.global_batch_size, args.max_position_embeddings
    return replace(args, global_batch_size=args.micro_batch_size * data_parallel_size if batch is None else batch,
                   max_position_embeddings=args.seq_length if positions is None else positions)


def parallel_config(args, world_size: int, num_layers: int) -> ParallelConfig:
    """Return how ranks share the work. An option with the name of a field is that field.

    The schedule is 1F1B, or interleaved where the layers of a stage are given.
    """
    each = args.num_layers_per_virtual_pipeline_stage
    name = args.pipeline_schedule or ("1f1b" if each is None else "interleaved")
    check_parallelism(args, name)
    t, p, c = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    return filled(ParallelConfig, args, data_parallel_size=data_parallel_size(world_size, t, p, c),
                  pipeline_schedule=name,
                  virtual_pipeline_size=None if each is None else virtual_size(each, num_layers, p),
                  scatter_gather_tensors_in_pipeline=not args.no_scatter_gather_tensors_in_pipeline,
                  zero_stage=zero_stage(args), recompute=recompute(args),
                  whole_matrices=isinstance(args, MuonOptions) and args.optimizer == "muon")


def check_parallelism(args, schedule: str) -> None:
    """Raise UserError for options of parallelism that do not go together."""
    each = args.num_layers_per_virtual_pipeline_stage
    if (schedule == "interleaved") != (each is not None):
        raise UserError(f"--pipeline-schedule is {schedule}, " + (
            "which needs --num-layers-per-virtual-pipeline-stage: how many layers each of a rank's several stages has."
            if each is None else "which takes no --num-layers-per-virtual-pipeline-stage. Leave that out, or choose "
            "interleaved."))
    if args.zero_stage == 3 and args.ddp_bucket_size is not None:
        raise UserError(f"--ddp-bucket-size is {args.ddp_bucket_size}, but --zero-stage 3 gathers and reduces block by "
                        "block. Leave it out.")
    if args.sequence_parallel and args.no_scatter_gather_tensors_in_pipeline:
        raise UserError("--no-scatter-gather-tensors-in-pipeline sends whole activations to the next stage, but with "
                        "--sequence-parallel no rank has one. Leave it out.")
    if args.cp_comm_type is not None and args.context_parallel_size == 1:
        raise UserError(f"--cp-comm-type is {args.cp_comm_type}, but --context-parallel-size is 1, so that no rank "
                        "needs the keys of another. Choose at least 2, or leave the option out.")
    if args.offload_folder is not None and not args.cpu_offload:
        raise UserError(f"--offload-folder is {args.offload_folder}, but nothing is offloaded. Add --cpu-offload.")


def zero_stage(args) -> int:
    """Return the stage of ZeRO. Megatron's distributed optimizer is stage 1."""
    if args.use_distributed_optimizer and args.zero_stage not in (None, 1):
        raise UserError(f"--use-distributed-optimizer is ZeRO-1, but --zero-stage is {args.zero_stage}. Give one of "
                        "them.")
    return 1 if args.use_distributed_optimizer else args.zero_stage or 0


def recompute(args) -> Recompute:
    """Return which activations are recomputed. Raise UserError for options of `full` without it."""
    granularity = args.recompute_granularity or ("selective" if args.recompute_activations else "none")
    if args.recompute_activations and granularity != "selective":
        raise UserError("--recompute-activations is --recompute-granularity selective, but that is "
                        f"{granularity}. Give one of them.")
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(args, name) is not None:
                given = "not given" if granularity == "none" else granularity
                raise UserError(f"{option(name)} is {getattr(args, name)}, which belongs to --recompute-granularity "
                                f"full, but that is {given}. Leave it out, or choose full.")
    n = args.recompute_num_layers
    return Recompute(granularity, args.recompute_method or "uniform", 1 if n is None else n)


def check_split(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise UserError for a model that the ranks cannot share, and for more recomputed layers than a stage has."""
    check_model_fits(model, parallel)
    stages = stages_of_ranks(model, parallel)     # raises if there are more stages than layers
    layers, recompute = max(len(layers) for held in stages for layers in held.values()), parallel.recompute
    if recompute.num_layers > layers:
        raise UserError(f"--recompute-num-layers is {recompute.num_layers}, but no stage has more layers than {layers}."
                        f" Choose at most {layers}.")


def microbatches_of(args, parallel: ParallelConfig) -> int:
    """Return the number of microbatches of a replica's step. Raise UserError for sizes of steps that do not fit."""
    m = number_of_microbatches(args.global_batch_size, args.micro_batch_size, parallel.data_parallel_size)
    check_schedule(args, parallel, m)
    check_sequence_fits(args.seq_length, parallel)
    return m


def virtual_size(each: int, num_layers: int, p: int) -> int:
    """Return v, so that none of the p v stages has more than `each` layers."""
    for name, value in (("num_layers_per_virtual_pipeline_stage", each), ("num_layers", num_layers),
                        ("pipeline_model_parallel_size", p)):
        require_positive(name, value)
    if each > (most := -(-num_layers // p)):
        raise UserError(f"--num-layers-per-virtual-pipeline-stage is {each}, but with --num-layers {num_layers} and "
                        f"--pipeline-model-parallel-size {p} a rank holds no more than {most} in all.")
    return -(-num_layers // (p * each))


def check_device(args) -> None:
    """Raise UserError for a transport between GPUs on CPU cores, which use MPI."""
    if args.device == "cpu" and args.distributed_backend not in (None, "mpi"):
        raise UserError(f"--distributed-backend is {args.distributed_backend}, which is for arrays on GPUs, but "
                        "--device is cpu. Leave it out, or add --device cuda.")


def check_graph(args, world_size: int, architecture: str) -> None:
    """Raise UserError for a step that a recording cannot repeat."""
    if args.cuda_graph_impl == "none":
        return
    for found, problem in (
            (args.device == "cpu", "--device is cpu. Leave it out, or add --device cuda."),
            (world_size > 1,
             f"this run has {world_size} ranks, and messages are not recorded. Leave it out, or start one rank."),
            (args.hidden_dropout or args.attention_dropout,
             "dropout draws another mask in each step. Leave it out, or add --hidden-dropout 0 --attention-dropout 0."),
            (architecture == "bert", "a BERT's losses are divided by another number in each step. Leave it out."),
            (args.num_experts, "experts get other numbers of tokens in each step. Leave it out, or --num-experts."),
            (args.zero_stage or args.use_distributed_optimizer, "ZeRO moves states to and fro. Leave one of them out."),
            ((args.fp16 or args.bf16) and args.seq_length % 128,
             f"--seq-length is {args.seq_length}, and 128 does not divide it: in 16 bits cuDNN's backward of attention "
             "then reads memory that is gone. Leave it out, or choose another length.")):
        if found:
            raise UserError(f"--cuda-graph-impl is {args.cuda_graph_impl}, which repeats the work of one step, but "
                            f"{problem}")


def check_schedule(args, parallel: ParallelConfig, m: int) -> None:
    """Raise UserError if the schedule does not take m microbatches."""
    p, v = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size or 1
    together = args.global_batch_size // m
    if p * v * m > MOST_ACTIONS:
        raise UserError(f"A step has {m:,} microbatches (--global-batch-size / --micro-batch-size / data-parallel "
                        f"size), which go through {p * v:,} stages: {p * v * m:,} forwards, but a schedule holds at "
                        f"most {MOST_ACTIONS:,}. Choose a smaller --global-batch-size, or a larger --micro-batch-size.")
    if parallel.pipeline_schedule == "interleaved" and m % p:
        raise UserError(f"--global-batch-size is {args.global_batch_size}, which makes {count(m, 'microbatch')} of "
                        f"--micro-batch-size x data-parallel size = {together}, but the interleaved schedule takes "
                        f"them in groups of --pipeline-model-parallel-size, which is {p}. The nearest that fits is "
                        f"{max(1, round(m / p)) * p * together}.")


def check_sequence(args) -> None:
    """Raise UserError if a sample is longer than the model's positions."""
    if args.max_position_embeddings < args.seq_length:
        file = f" in the config.json of {args.load_hf}" if args.load_hf is not None else ""
        raise UserError(f"--max-position-embeddings is {args.max_position_embeddings}{file}, but must be at least "
                        f"--seq-length, which is {args.seq_length}.")


def check_files(args) -> None:
    """Raise UserError for options of saving, loading and tracing that do not go together."""
    if args.trace_clock != "wall" and not args.trace:
        raise UserError(f"--trace-clock is {args.trace_clock}, but nothing is traced. Give a folder with --trace, too.")
    if args.save_interval is not None and args.save is None:
        raise UserError(f"--save-interval is {args.save_interval}, but nothing is saved. Give a folder with --save, "
                        "too.")
    if args.exit_signal_handler and args.save is None:
        raise UserError("--exit-signal-handler saves a checkpoint before a SIGTERM ends the run, but nothing is saved. "
                        "Give a folder with --save, too.")
    if args.load is not None and args.load_hf is not None:
        raise UserError(f"--load is {args.load} and --load-hf is {args.load_hf}, but a run begins with one set of "
                        "weights. Give one of them.")


def check_restarts(args) -> None:
    """Raise UserError for a run that mpi_impl.launch would start again, if it could not resume from a checkpoint."""
    if environment_count(RESTARTS, 0) and not (saves_where_it_loads(args) and args.save_interval):
        raise UserError("--max-restarts lets a run that has failed resume from its last checkpoint, but this one saves "
                        "none that it would load. Give one folder with --save and with --load, and --save-interval.")


def saves_where_it_loads(args) -> bool:
    """Report whether one folder is both --save and --load: the run begins if it is empty, and else resumes."""
    return bool(args.save and args.load) and same_file(args.save, args.load)


def precision(args) -> Precision:
    """Return the formats. Raise UserError for two that exclude each other, and for --fp16's options without it."""
    scaling = {name: getattr(args, name) for name in LOSS_SCALING if getattr(args, name) is not None}
    given = [option(name) for name in scaling] + ["--fp16-lm-cross-entropy"] * args.fp16_lm_cross_entropy
    if given and not args.fp16:
        raise UserError(f"{given[0]} belongs to --fp16, which is not given: other formats have range enough for every "
                        "gradient. Leave it out, or add --fp16.")
    if not args.fp16 and not args.bf16:
        return Precision(args.dtype)
    if args.fp16 and args.bf16:
        raise UserError("--fp16 and --bf16 are two formats, but the model computes in one. Give one of them.")
    if args.dtype != "float32":
        raise UserError(f"--dtype is {args.dtype}, but {'--fp16' if args.fp16 else '--bf16'} has its master weights in "
                        "float32. Leave one of them out.")
    if args.loss_scale is not None and len(scaling) > 1:
        raise UserError(f"{given[1]} is for a loss scale that follows the gradients, but --loss-scale is "
                        f"{args.loss_scale:g}, and stays. Leave one of them out.")
    return Precision("float16", LossScaling(**scaling)) if args.fp16 else Precision("bfloat16")


def optimizer_config(args) -> OptimizerConfig:
    """Return the optimizer's settings, with defaults that follow from other options. Raise UserError for wrong ones."""
    decay_iters = args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters
    warmup_iters = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters:
            raise UserError("--lr-warmup-fraction and --lr-warmup-iters say the same thing twice: give one of them.")
        if not 0 <= args.lr_warmup_fraction < 1:
            raise UserError(f"--lr-warmup-fraction is {args.lr_warmup_fraction}, but must be in [0, 1): it is a share "
                            "of --lr-decay-iters.")
        warmup_iters = round(args.lr_warmup_fraction * decay_iters)
    return filled(OptimizerConfig, args, lr_decay_iters=decay_iters, lr_warmup_iters=warmup_iters)
