"""Megatron's command-line options for pre-training, and a few of our own, made into configs."""
import argparse
from dataclasses import dataclass

from mpi_impl.data.tokenizer import TOKENIZER_TYPES
from mpi_impl.entry import ArgumentParser
from reference.config import (POSITION_EMBEDDINGS, ModelConfig, ParallelConfig, check_model_fits,
                              number_of_microbatches, option, require_not_negative, require_positive)
from reference.errors import UserError
from reference.optimizer import DECAY_STYLES, OptimizerConfig

# Megatron's options (and ours) for what is not built yet: refused, so that nobody believes they did something.
NOT_YET = {
    "pipeline parallelism": "pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage pipeline-schedule "
                            "no-scatter-gather-tensors-in-pipeline trace trace-clock distributed-timeout-minutes",
    "ZeRO": "zero-stage use-distributed-optimizer cpu-offload",
    "sequence parallelism": "sequence-parallel",
    "activation recompute": "recompute-granularity recompute-method recompute-num-layers recompute-activations",
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
            init_method_std=a.init_method_std, make_vocab_size_divisible_by=a.make_vocab_size_divisible_by)
        check_model_fits(model, self.parallel)
        return model


def parse(argv: list[str] | None, world_size: int) -> Settings:
    """Options -> Settings. When an option is given twice, the last one counts. Raises UserError."""
    args = parser().parse_args(argv)
    require_positive("micro_batch_size", args.micro_batch_size)
    parallel = ParallelConfig.for_world(world_size, args.tensor_model_parallel_size)
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * parallel.data_parallel_size
    microbatches = number_of_microbatches(args.global_batch_size, args.micro_batch_size, parallel.data_parallel_size)
    check_iterations(args)
    check_sequence(args)
    check_dropout(args)
    settings = Settings(args, parallel, optimizer_config(args), microbatches)
    settings.model(vocab_size=1)     # what does not depend on the vocabulary fails now, before the corpus is read
    return settings


def check_iterations(args) -> None:
    for name in ("train_iters", "log_interval", "eval_interval"):
        require_positive(name, getattr(args, name))
    if args.exit_interval is not None:
        require_positive("exit_interval", args.exit_interval)
    for name in ("eval_iters", "sample_tokens"):
        require_not_negative(name, getattr(args, name))


def check_sequence(args) -> None:
    """Sets the longest position where it is left open."""
    require_positive("seq_length", args.seq_length)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise UserError(f"--max-position-embeddings is {args.max_position_embeddings}, but must be at least "
                        f"--seq-length, which is {args.seq_length}.")


def check_dropout(args) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(args, name) != 0:
            raise UserError(f"{option(name)} is {getattr(args, name)}, but only 0 is possible so far: dropout is not "
                            "built yet.")


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
    p = ArgumentParser(prog="pretrain_gpt", description="Train a GPT on text with tensor and data parallelism.")

    g = p.add_argument_group("model")
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
    g.add_argument("--hidden-dropout", type=float, default=0.0, help="only 0 so far")
    g.add_argument("--attention-dropout", type=float, default=0.0, help="only 0 so far")

    g = p.add_argument_group("parallelism")
    g.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="T",
                   help="ranks that share each layer; data parallelism takes the rest of the world")

    g = p.add_argument_group("training")
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

    g = p.add_argument_group("data")
    g.add_argument("--data-path", metavar="PATH", help="a text file, a folder, JSON lines, or the prefix of a Megatron "
                   ".bin/.idx pair; default: the source of Python's own standard library")
    g.add_argument("--split", default="969,30,1", help="proportions of training, validation and test")
    g.add_argument("--tokenizer-type", choices=tuple(TOKENIZER_TYPES), default="ByteLevelBPETokenizer")
    g.add_argument("--vocab-size", type=int, metavar="V",
                   help="of the tokenizer that is trained on the corpus (default: 4096), or of a NullTokenizer")
    g.add_argument("--vocab-file", metavar="F", help="GPT-2's vocab.json")
    g.add_argument("--merge-file", metavar="F", help="GPT-2's merges.txt")
    g.add_argument("--data-cache-path", metavar="DIR", help="default: ~/.cache/shardlab")

    g = p.add_argument_group("what to report")
    g.add_argument("--log-interval", type=int, default=10)
    g.add_argument("--eval-interval", type=int, default=100)
    g.add_argument("--eval-iters", type=int, default=10, help="global batches in an evaluation; 0: none")
    g.add_argument("--verify", action="store_true",
                   help="also train in one process on rank 0, and fail if the two runs differ")
    g.add_argument("--metrics-file", metavar="F", help="write JSON lines, one for each iteration and evaluation")
    g.add_argument("--ledger", metavar="F", help="write what was sent, and the predictions, as JSON")
    g.add_argument("--plot", metavar="F", help="draw the losses, as a PNG")
    g.add_argument("--sample-tokens", type=int, default=0, metavar="N", help="write N tokens of text at the end")

    for feature, names in NOT_YET.items():
        for name in names.split():
            p.add_argument(f"--{name}", nargs="*", action=Refused, const=feature, help=argparse.SUPPRESS)
    return p


class Refused(argparse.Action):
    """An option that only says that its feature (`const`) is not there."""

    def __call__(self, parser, namespace, values, option_string=None):
        raise UserError(f"{option_string} is not possible yet: {self.const} is not built. Leave it out.")
