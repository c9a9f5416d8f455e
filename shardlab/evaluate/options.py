"""The options of shardlab/evaluate/__main__.py, different for each task. Their combinations: arguments.py."""
from mpi_impl.launch.option_fields import option_field, option_group, same_option
from reference.config import require_positive
from reference.precision import FORMATS
from shardlab.generate.options import ForwardParallelismOptions, TokenizerOptions
from shardlab.programs.options import (DeviceOptions, MemoryOptions, ModelOptions, ParallelismOptions, PrecisionOptions,
                                       ReportOptions, TrainingOptions)

EPOCHS = 3      # unless --epochs or --train-iters is given


@option_group
class TaskOptions:
    """The task."""

    task: str = option_field(
        help="perplexity on WikiText-103, or last words of LAMBADA, of a GPT; of a BERT that is tuned for it first, "
        "answers to RACE's questions, classes of MNLI's or QQP's pairs of sentences, or answers in SQuAD's passages",
        choices=("wikitext103", "lambada", "race", "mnli", "qqp", "squad"))


@option_group
class EvaluationOptions(TaskOptions, TokenizerOptions):
    """The data and the model."""

    data_path: str = option_field(metavar="PATH", help="the published data: WikiText-103's wiki.test.tokens, LAMBADA's "
                                  "lambada_test.jsonl; or the folder of RACE, with train, dev and test in it, of MNLI "
                                  "or QQP, with .tsv files, or of SQuAD, with two .json files")
    load: str | None = option_field(None, "the model: the last checkpoint in this folder", "DIR")
    load_hf: str | None = option_field(None, "or a model in Hugging Face's layout", "DIR")
    seq_length: int | None = option_field(None, "default: the longest that the model can see", "S")
    metrics_file: str | None = option_field(None, "write the results as JSON lines", "F")


@option_group
class ZeroShotOptions(EvaluationOptions, ForwardParallelismOptions, DeviceOptions):
    """The computation."""

    micro_batch_size: int = same_option(TrainingOptions, "micro_batch_size", 4)
    dtype: str = option_field("float32", "compute in this", choices=FORMATS)


@option_group
class WikiText103Options(ZeroShotOptions):
    """WikiText-103."""

    overlapping_eval: int = option_field(
        32, "tokens by which the window moves: fewer give each token more context, and take longer", "O")


@option_group
class TuningOptions(EvaluationOptions, TrainingOptions, PrecisionOptions, ParallelismOptions, DeviceOptions,
                    MemoryOptions):
    """Tuning."""

    epochs: int | None = option_field(
        None, "passes through the samples, each followed by those of the validation part (default: "
        f"{EPOCHS}; 0: the model is tuned already)", "N")
    lr: float = same_option(TrainingOptions, "lr", 2e-5)
    tune_lr: tuple[float, ...] | None = option_field(
        None, "try these learning rates, and keep the one that is best on the validation part", "LR")
    tune_global_batch_size: tuple[int, ...] | None = option_field(
        None, "try these batch sizes, each with every learning rate", "B")
    seeds: int = option_field(
        1, "the number of tunings with the best rate and batch size, and with seeds from --seed on, whose median is "
        "printed", "N",
        check=require_positive)
    train_iters: int | None = same_option(TrainingOptions, "train_iters", None)
    hidden_dropout: float = same_option(ModelOptions, "hidden_dropout", ModelOptions.hidden_dropout)
    attention_dropout: float = same_option(ModelOptions, "attention_dropout", ModelOptions.attention_dropout)
    save: str | None = option_field(None, "save the tuned model in this folder at the end", "DIR")
    log_interval: int = same_option(ReportOptions, "log_interval", ReportOptions.log_interval)
    ensemble: tuple[str, ...] | None = option_field(
        None, "do not tune, but let the tuned models in these folders and that of --load answer together: the mean of "
        "their probabilities decides", "DIR")


@option_group
class RACEOptions(TuningOptions):
    """RACE."""

    max_qa_length: int = option_field(128, "the longest that a question and an answer may be, in tokens", "N")


@option_group
class SQuADOptions(TuningOptions):
    """SQuAD."""

    max_query_length: int = option_field(64, "the longest that a question may be, in tokens", "N")
    doc_stride: int = option_field(128, "tokens between the beginnings of a long passage's windows", "N")
    max_answer_length: int = option_field(30, "the longest that a predicted answer may be, in tokens", "N")
