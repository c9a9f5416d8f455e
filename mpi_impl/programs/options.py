"""Megatron's command-line options for pre-training, and a few of our own. What they mean together: arguments.py."""
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mpi_impl.comm.transports.staging import BACKENDS
from mpi_impl.data.tokenizer import TOKENIZER_TYPES
from mpi_impl.launching.entry import ArgumentParser
from mpi_impl.programs.presets import PRESETS
from reference.config import POSITION_EMBEDDINGS, RECOMPUTE
from reference.ops import ACTIVATIONS
from reference.optimizer import DECAY_STYLES
from reference.schedules.generators import SCHEDULES

NAMES = {"gpt": "GPT", "bert": "BERT"}      # of architectures, for people
TOKENIZERS = {"gpt": "ByteLevelBPETokenizer", "bert": "BertWordPieceLowerCase"}      # unless --tokenizer-type is given


def parser(architecture: str = "gpt", preset: Mapping[str, Any] = MappingProxyType({})) -> ArgumentParser:
    """`preset` has other defaults, of options by name."""
    p = ArgumentParser(prog=f"pretrain_{architecture}", description=f"Train a {NAMES[architecture]} on text with "
                       "tensor, pipeline and data parallelism.")
    p.add_argument("--preset", choices=PRESETS[architecture],
                   help="a model of the paper (1909.08053) and its training: other defaults for the options below")
    for title, add_options in (("model", model_options),
                               *OF_ARCHITECTURES[architecture],
                               ("parallelism", parallelism_options),
                               ("device", device_options),
                               ("memory", memory_options),
                               ("training", training_options),
                               ("precision", precision_options),
                               ("data", data_options),
                               ("saving and loading", state_options),
                               ("what to report", report_options)):
        add_options(p.add_argument_group(title))
    p.set_defaults(**{"tokenizer_type": TOKENIZERS[architecture], **preset})
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
    g.add_argument("--activation", choices=tuple(ACTIVATIONS), default="gelu", help="gelu is GPT's, by way of tanh")
    g.add_argument("--apply-residual-connection-post-layernorm", action="store_true",
                   help="the residual connection begins behind each layer norm, as in the original BERT, not before it")
    g.add_argument("--layernorm-epsilon", type=float, default=1e-5)
    g.add_argument("--init-method-std", type=float, default=0.02)
    g.add_argument("--hidden-dropout", type=float, default=0.1,
                   help="share that training drops of the embedding, and of what each branch adds (default: 0.1)")
    g.add_argument("--attention-dropout", type=float, default=0.1,
                   help="share that training drops of attention's probabilities (default: 0.1)")


def gpt_options(g) -> None:
    g.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    g.add_argument("--sample-tokens", type=int, default=0, metavar="N", help="write N tokens of text at the end")


def bert_options(g) -> None:
    g.add_argument("--bert-no-binary-head", action="store_true",
                   help="predict masked words alone, not whether the two pieces of text were swapped")
    g.add_argument("--mask-prob", type=float, default=0.15, metavar="P", help="share of tokens to predict")
    g.add_argument("--short-seq-prob", type=float, default=0.1, metavar="P",
                   help="share of samples that are shorter than they need be")
    g.set_defaults(untie_embeddings_and_output_weights=False, sample_tokens=0)      # what only a GPT may ask for


OF_ARCHITECTURES = {"gpt": [("GPT", gpt_options)], "bert": [("BERT", bert_options)]}


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


def device_options(g) -> None:
    g.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                   help="where ranks compute: each on a CPU core, or on the CUDA GPU of its number on its machine, "
                        "which some share if there are more ranks; needs CuPy (default: cpu)")
    g.add_argument("--distributed-backend", choices=BACKENDS,
                   help="how arrays get from GPU to GPU: collectives by NCCL, if every rank has a GPU of its own; by "
                        "MPI from GPU to GPU, if it is CUDA-aware; or staged through host memory (default: the first "
                        "that is possible)")


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
    g.add_argument("--recompute-granularity", choices=RECOMPUTE,
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


def precision_options(g) -> None:
    """Those of the loss scale are None unless they are given; reference/precision.py has their defaults."""
    g.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="(default: float32)")
    g.add_argument("--fp16", action="store_true", help="the model computes in float16, with a scaled loss; master "
                   "weights, main gradients, moments and the loss are in float32")
    g.add_argument("--bf16", action="store_true", help="the same in bfloat16, whose range needs no loss scale")
    g.add_argument("--loss-scale", type=float, metavar="S", help="of --fp16: a scale that never changes (default: it "
                   "follows the gradients)")
    g.add_argument("--initial-loss-scale", type=float, metavar="S", help="(default: 2^32)")
    g.add_argument("--min-loss-scale", type=float, metavar="S", help="(default: 1)")
    g.add_argument("--loss-scale-window", type=int, metavar="N",
                   help="steps without overflow, after which the scale is doubled (default: 1000)")
    g.add_argument("--hysteresis", type=int, metavar="N",
                   help="how many overflows it takes before the scale is halved (default: 2)")
    g.add_argument("--fp16-lm-cross-entropy", action="store_true", help="compute the loss in float16, too")


def data_options(g) -> None:
    g.add_argument("--data-path", nargs="+", metavar="PATH", help="a text file, a folder, JSON lines, or the prefix of "
                   "a Megatron .bin/.idx pair; or several to blend, each behind its weight: 0.3 A 0.7 B; default: the "
                   "source of Python's own standard library")
    g.add_argument("--split", default="969,30,1", help="proportions of training, validation and test")
    g.add_argument("--tokenizer-type", choices=tuple(TOKENIZER_TYPES))
    g.add_argument("--tokenizer-model", metavar="F", help="a tokenizer of that type that was trained before")
    g.add_argument("--vocab-size", type=int, metavar="V",
                   help="of the tokenizer that is trained on the corpus (default: 4096), or of a NullTokenizer")
    g.add_argument("--vocab-file", metavar="F", help="GPT-2's vocab.json, or BERT's vocab.txt")
    g.add_argument("--merge-file", metavar="F", help="GPT-2's merges.txt")
    g.add_argument("--data-cache-path", metavar="DIR", help="default: ~/.cache/shardlab")


def state_options(g) -> None:
    g.add_argument("--save", metavar="DIR", help="save a checkpoint in this folder at the end")
    g.add_argument("--save-interval", type=int, metavar="N", help="with --save: after every N-th iteration, too")
    g.add_argument("--load", metavar="DIR",
                   help="go on from the last checkpoint in this folder, on any number of ranks")
    g.add_argument("--load-hf", metavar="DIR", help="begin with the weights of a model in Hugging Face's layout")
    g.add_argument("--save-hf", metavar="DIR", help="write the weights in that layout at the end")


def report_options(g) -> None:
    g.add_argument("--log-interval", type=int, default=10)
    g.add_argument("--log-throughput", action="store_true",
                   help="with each line the model's FLOP/s on a rank, and their share of the peak (MFU); and once the "
                        "memory that a rank should take, and took")
    g.add_argument("--eval-interval", type=int, default=100)
    g.add_argument("--eval-iters", type=int, default=10, help="global batches in an evaluation; 0: none")
    g.add_argument("--verify", action="store_true",
                   help="also train in one process on rank 0, and fail if the two runs differ")
    g.add_argument("--metrics-file", metavar="F", help="write JSON lines, one for each iteration and evaluation")
    g.add_argument("--ledger", metavar="F", help="write what was sent, and the predictions, as JSON")
    g.add_argument("--plot", metavar="F", help="draw the losses: a .png, .pdf or .svg")
    g.add_argument("--record", metavar="DIR",
                   help="write every tensor of the first two iterations, for mpi_impl.compare")
    g.add_argument("--trace", metavar="DIR", help="write what each rank did when, for Perfetto, and draw it")
    g.add_argument("--trace-clock", choices=("wall", "virtual"), default="wall",
                   help="virtual: as if every rank had a device of its own, however many cores there are")
