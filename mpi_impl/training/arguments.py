"""Megatron's command-line options for pre-training, and a few of our own, made into configs."""
import argparse
from dataclasses import dataclass

from mpi_impl.data.tokenizer import TOKENIZER_TYPES
from mpi_impl.entry import ArgumentParser
from reference.config import (POSITION_EMBEDDINGS, ModelConfig, ParallelConfig, Recompute, check_model_fits,
                              check_sequence_fits, number_of_microbatches, option, require_not_negative,
                              require_positive)
from reference.errors import UserError
from reference.optimizer import DECAY_STYLES, OptimizerConfig
from reference.schedules import SCHEDULES
from reference.stages import stages_of_ranks

MOST_ACTIONS = 100_000      # of a kind on a rank in one step: a schedule is a list of them all

# Megatron's options (and ours) for what is not built yet: refused, so that nobody believes they did something.
NOT_YET = {
    "mixed precision": "fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis "
                       "fp16-lm-cross-entropy",
    "saving and loading": "save save-interval load load-hf save-hf",
    "training on GPUs": "device distributed-backend",
}


@dataclass(frozen=True)
class Settings:
    """What the options say, checked against one another and against the number of ranks."""

    args: argparse.Namespace   # the plain values, under their options' names
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    microbatches: int          # of each replica in each step

    def model(self, vocab_size: int) -> ModelConfig:
        """The model, once the tokenizer has told its vocabulary. Raises UserError where sizes do not fit."""
        a = self.args
        model = ModelConfig(
            a.num_layers, a.hidden_size, a.num_attention_heads, vocab_size, a.max_position_embeddings,
            position_embedding_type=a.position_embedding_type, rotary_percent=a.rotary_percent,
            untie_embeddings_and_output_weights=a.untie_embeddings_and_output_weights,
            init_method_std=a.init_method_std, hidden_dropout=a.hidden_dropout,
            attention_dropout=a.attention_dropout, make_vocab_size_divisible_by=a.make_vocab_size_divisible_by)
        check_model_fits(model, self.parallel)
        stages = stages_of_ranks(model, self.parallel)     # raises if there are more stages than layers
        check_recompute_fits(self.parallel.recompute, max(len(layers) for held in stages for layers in held.values()))
        return model


def parse(argv: list[str] | None, world_size: int) -> Settings:
    """Options -> Settings. When an option is given twice, the last one counts. Raises UserError."""
    args = parser().parse_args(argv)
    check_names(args)
    require_positive("micro_batch_size", args.micro_batch_size)
    parallel = parallel_config(args, world_size)
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * parallel.data_parallel_size
    microbatches = number_of_microbatches(args.global_batch_size, args.micro_batch_size, parallel.data_parallel_size)
    check_schedule(args, parallel, microbatches)
    check_iterations(args)
    check_sequence(args)
    check_sequence_fits(args.seq_length, parallel)
    settings = Settings(args, parallel, optimizer_config(args), microbatches)
    settings.model(vocab_size=1)     # what does not depend on the vocabulary fails now, before the corpus is read
    return settings


def parallel_config(args, world_size: int) -> ParallelConfig:
    """The schedule is 1F1B, or the interleaved one where it is said how many layers a stage has."""
    each = args.num_layers_per_virtual_pipeline_stage
    name = args.pipeline_schedule or ("1f1b" if each is None else "interleaved")
    if (name == "interleaved") != (each is not None):
        raise UserError(f"--pipeline-schedule is {name}, " + (
            "which needs --num-layers-per-virtual-pipeline-stage: how many layers each of a rank's several stages has."
            if each is None else "which takes no --num-layers-per-virtual-pipeline-stage. Leave that out, or choose "
            "interleaved."))
    if args.zero_stage == 3 and args.ddp_bucket_size is not None:
        raise UserError(f"--ddp-bucket-size is {args.ddp_bucket_size}, but --zero-stage 3 gathers and reduces block by "
                        "block. Leave it out.")
    if args.sequence_parallel and args.no_scatter_gather_tensors_in_pipeline:
        raise UserError("--no-scatter-gather-tensors-in-pipeline sends whole activations to the next stage, but with "
                        "--sequence-parallel no rank has one. Leave it out.")
    p = args.pipeline_model_parallel_size
    return ParallelConfig.for_world(
        world_size, args.tensor_model_parallel_size, p, pipeline_schedule=name,
        virtual_pipeline_size=None if each is None else virtual_size(each, args.num_layers, p),
        scatter_gather_tensors_in_pipeline=not args.no_scatter_gather_tensors_in_pipeline,
        ddp_bucket_size=1 << 20 if args.ddp_bucket_size is None else args.ddp_bucket_size,
        zero_stage=zero_stage(args), cpu_offload=cpu_offload(args),
        sequence_parallel=args.sequence_parallel, keep_gathered_inputs=args.keep_gathered_inputs,
        recompute=recompute(args))


def zero_stage(args) -> int:
    """Megatron's distributed optimizer is ZeRO-1."""
    if args.use_distributed_optimizer and args.zero_stage not in (None, 1):
        raise UserError(f"--use-distributed-optimizer is ZeRO-1, but --zero-stage is {args.zero_stage}. Give one of "
                        "them.")
    return 1 if args.use_distributed_optimizer else args.zero_stage or 0


def cpu_offload(args) -> bool:
    if args.offload_folder is not None and not args.cpu_offload:
        raise UserError(f"--offload-folder is {args.offload_folder}, but nothing is offloaded. Add --cpu-offload.")
    return args.cpu_offload


def recompute(args) -> Recompute:
    """Raises UserError for options that only `full` knows."""
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


def check_recompute_fits(recompute: Recompute, layers: int) -> None:
    """Raises UserError if no stage has as many layers as are to be recomputed."""
    if recompute.num_layers > layers:
        raise UserError(f"--recompute-num-layers is {recompute.num_layers}, but no stage has more layers than {layers}."
                        f" Choose at most {layers}.")


def virtual_size(each: int, num_layers: int, p: int) -> int:
    """v, so that none of the p v stages has more than `each` layers."""
    for name, value in (("num_layers_per_virtual_pipeline_stage", each), ("num_layers", num_layers),
                        ("pipeline_model_parallel_size", p)):
        require_positive(name, value)
    if each > (most := -(-num_layers // p)):
        raise UserError(f"--num-layers-per-virtual-pipeline-stage is {each}, but with --num-layers {num_layers} and "
                        f"--pipeline-model-parallel-size {p} a rank holds no more than {most} in all.")
    return -(-num_layers // (p * each))


def check_names(args) -> None:
    """Raises UserError for a file's name that is given and empty, as an unset variable of a script gives it."""
    for name in ("data_path", "vocab_file", "merge_file", "data_cache_path", "metrics_file", "ledger", "plot", "trace",
                 "offload_folder"):
        if getattr(args, name) == "":
            raise UserError(f"{option(name)} is empty. Give a path, or leave the option out.")


def check_schedule(args, parallel: ParallelConfig, m: int) -> None:
    """Raises UserError if the schedule does not take m microbatches."""
    p, v = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size or 1
    together = args.global_batch_size // m
    if v * m > MOST_ACTIONS:
        raise UserError(f"A step has {m:,} microbatches (--global-batch-size / --micro-batch-size / data-parallel "
                        f"size) x {v:,} on each rank, but a schedule holds at most {MOST_ACTIONS:,}. Choose a smaller "
                        "--global-batch-size, or a larger --micro-batch-size.")
    if parallel.pipeline_schedule == "interleaved" and m % p:
        raise UserError(f"--global-batch-size is {args.global_batch_size}, which makes {m} microbatches of "
                        f"--micro-batch-size x data-parallel size = {together}, but the interleaved schedule takes "
                        f"them in groups of --pipeline-model-parallel-size, which is {p}. The nearest that fits is "
                        f"{max(1, round(m / p)) * p * together}.")


def check_iterations(args) -> None:
    for name in ("train_iters", "log_interval", "eval_interval"):
        require_positive(name, getattr(args, name))
    if args.exit_interval is not None:
        require_positive("exit_interval", args.exit_interval)
    for name in ("eval_iters", "sample_tokens"):
        require_not_negative(name, getattr(args, name))
    if not 0.01 <= args.distributed_timeout_minutes <= 60 * 24 * 7:
        raise UserError(f"--distributed-timeout-minutes is {args.distributed_timeout_minutes}, but must be at least "
                        "0.01, and at most a week, which is 10080.")
    if args.trace_clock != "wall" and not args.trace:
        raise UserError(f"--trace-clock is {args.trace_clock}, but nothing is traced. Give a folder with --trace, too.")


def check_sequence(args) -> None:
    """Sets the longest position where it is left open."""
    require_positive("seq_length", args.seq_length)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise UserError(f"--max-position-embeddings is {args.max_position_embeddings}, but must be at least "
                        f"--seq-length, which is {args.seq_length}.")


def optimizer_config(args) -> OptimizerConfig:
    decay_iters = args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters:
            raise UserError("--lr-warmup-fraction and --lr-warmup-iters say the same thing twice: give one of them.")
        if not 0 <= args.lr_warmup_fraction < 1:
            raise UserError(f"--lr-warmup-fraction is {args.lr_warmup_fraction}, but must be in [0, 1): it is a share "
                            "of --lr-decay-iters.")
        args.lr_warmup_iters = round(args.lr_warmup_fraction * decay_iters)
    return OptimizerConfig(
        args.lr, decay_iters, args.min_lr, args.lr_decay_style, args.lr_warmup_iters, args.weight_decay,
        args.clip_grad, args.adam_beta1, args.adam_beta2, args.adam_eps)


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="pretrain_gpt",
                       description="Train a GPT on text with tensor, pipeline and data parallelism.")
    for title, add_options in (("model", model_options),
                               ("parallelism", parallelism_options),
                               ("memory", memory_options),
                               ("training", training_options),
                               ("data", data_options),
                               ("what to report", report_options)):
        add_options(p.add_argument_group(title))
    for feature, names in NOT_YET.items():
        for name in names.split():
            p.add_argument(f"--{name}", nargs="*", action=Refused, const=feature, help=argparse.SUPPRESS)
    return p


def model_options(g) -> None:
    g.add_argument("--num-layers", type=int, default=4, metavar="L")
    g.add_argument("--hidden-size", type=int, default=256, metavar="H")
    g.add_argument("--num-attention-heads", type=int, default=8, metavar="A")
    g.add_argument("--seq-length", type=int, default=128, metavar="S")
    g.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: --seq-length")
    g.add_argument("--position-embedding-type", choices=POSITION_EMBEDDINGS, default="learned_absolute")
    g.add_argument("--rotary-percent", type=float, default=1.0, help="share of each head that rope turns")
    g.add_argument("--make-vocab-size-divisible-by", type=int, default=128, metavar="N",
                   help="the vocabulary is padded to a multiple of this x tensor-parallel size")
    g.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    g.add_argument("--init-method-std", type=float, default=0.02)
    g.add_argument("--hidden-dropout", type=float, default=0.1,
                   help="share that training drops of the embedding, and of what each branch adds (default: 0.1)")
    g.add_argument("--attention-dropout", type=float, default=0.1,
                   help="share that training drops of attention's probabilities (default: 0.1)")


def parallelism_options(g) -> None:
    g.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="T",
                   help="ranks that share each layer; data parallelism takes the rest of the world")
    g.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="P",
                   help="ranks (or groups of T) that hold the layers between them; what does not divide evenly goes to "
                        "the first stages, a layer more for each")
    g.add_argument("--pipeline-schedule", choices=[name for name in SCHEDULES if name != "forward-only"],
                   help="default: 1f1b, or interleaved where the following option is given")
    g.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, metavar="N",
                   help="cut a rank's layers into several stages of at most N, for the interleaved schedule")
    g.add_argument("--no-scatter-gather-tensors-in-pipeline", action="store_true",
                   help="each of T ranks sends the whole activation to the next stage, not 1/T of it")
    g.add_argument("--ddp-bucket-size", type=int, metavar="N",
                   help="elements of gradients that are summed over the replicas in one go (default: 1048576)")
    g.add_argument("--distributed-timeout-minutes", type=float, default=10, metavar="M",
                   help="end the run when a rank has waited so long for another (for --verify, too)")


def memory_options(g) -> None:
    g.add_argument("--zero-stage", type=int, metavar="N",
                   help="what the replicas share out, rather than each keep all: optimizer states (1), gradients, too "
                        "(2), parameters, too (3); default: 0, nothing")
    g.add_argument("--use-distributed-optimizer", action="store_true", help="the same as --zero-stage 1")
    g.add_argument("--cpu-offload", action="store_true",
                   help="keep a rank's shard of the optimizer's states, and with ZeRO-3 of the parameters, in host "
                        "memory that it does not compute in")
    g.add_argument("--offload-folder", metavar="DIR", help="with --cpu-offload: keep them in files in this folder")
    g.add_argument("--sequence-parallel", action="store_true",
                   help="cut what is outside the tensor-parallel regions (norms, dropout, residual sums) by positions")
    g.add_argument("--keep-gathered-inputs", action="store_true",
                   help="with --sequence-parallel: keep the gathered inputs for the backward, rather than gather again")
    g.add_argument("--recompute-granularity", choices=("full", "selective"),
                   help="of activations, keep only each layer's input (full), or all but attention's core (selective), "
                        "and compute the rest again in the backward")
    g.add_argument("--recompute-activations", action="store_true",
                   help="the same as --recompute-granularity selective")
    g.add_argument("--recompute-method", choices=("uniform", "block"),
                   help="of full: in groups of N layers (uniform, the default), or N layers of each stage (block)")
    g.add_argument("--recompute-num-layers", type=int, metavar="N", help="default: 1")


def training_options(g) -> None:
    g.add_argument("--micro-batch-size", type=int, default=4, metavar="b")
    g.add_argument("--global-batch-size", type=int, metavar="B",
                   help="default: --micro-batch-size x data-parallel size; more means gradient accumulation")
    g.add_argument("--train-iters", type=int, default=400)
    g.add_argument("--exit-interval", type=int, metavar="N", help="stop after an iteration that N divides")
    g.add_argument("--lr", type=float, default=1e-3)
    g.add_argument("--min-lr", type=float, default=0.0)
    g.add_argument("--lr-decay-style", choices=DECAY_STYLES, default="linear")
    g.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    g.add_argument("--lr-warmup-iters", type=int, default=0)
    g.add_argument("--lr-warmup-fraction", type=float, help="of --lr-decay-iters")
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument("--clip-grad", type=float, default=1.0, help="largest global norm of the gradient; 0: no clipping")
    g.add_argument("--adam-beta1", type=float, default=0.9)
    g.add_argument("--adam-beta2", type=float, default=0.999)
    g.add_argument("--adam-eps", type=float, default=1e-8)
    g.add_argument("--seed", type=int, default=1234)
    g.add_argument("--dtype", choices=("float32", "float64"), default="float32")


def data_options(g) -> None:
    g.add_argument("--data-path", metavar="PATH", help="a text file, a folder, JSON lines, or the prefix of a Megatron "
                   ".bin/.idx pair; default: the source of Python's own standard library")
    g.add_argument("--split", default="969,30,1", help="proportions of training, validation and test")
    g.add_argument("--tokenizer-type", choices=tuple(TOKENIZER_TYPES), default="ByteLevelBPETokenizer")
    g.add_argument("--vocab-size", type=int, metavar="V",
                   help="of the tokenizer that is trained on the corpus (default: 4096), or of a NullTokenizer")
    g.add_argument("--vocab-file", metavar="F", help="GPT-2's vocab.json")
    g.add_argument("--merge-file", metavar="F", help="GPT-2's merges.txt")
    g.add_argument("--data-cache-path", metavar="DIR", help="default: ~/.cache/shardlab")


def report_options(g) -> None:
    g.add_argument("--log-interval", type=int, default=10)
    g.add_argument("--eval-interval", type=int, default=100)
    g.add_argument("--eval-iters", type=int, default=10, help="global batches in an evaluation; 0: none")
    g.add_argument("--verify", action="store_true",
                   help="also train in one process on rank 0, and fail if the two runs differ")
    g.add_argument("--metrics-file", metavar="F", help="write JSON lines, one for each iteration and evaluation")
    g.add_argument("--ledger", metavar="F", help="write what was sent, and the predictions, as JSON")
    g.add_argument("--plot", metavar="F", help="draw the losses, as a PNG")
    g.add_argument("--trace", metavar="DIR", help="write what each rank did when, for Perfetto, and draw it")
    g.add_argument("--trace-clock", choices=("wall", "virtual"), default="wall",
                   help="virtual: as if every rank had a device of its own, however many cores there are")
    g.add_argument("--sample-tokens", type=int, default=0, metavar="N", help="write N tokens of text at the end")


class Refused(argparse.Action):
    """An option that only says that its feature (`const`) is not there."""

    def __call__(self, parser, namespace, values, option_string=None):
        raise UserError(f"{option_string} is not possible yet: {self.const} is not built. Leave it out.")
