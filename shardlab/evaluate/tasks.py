"""The tasks: what data, which model, and which measure."""
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpi_impl.parallel.passes import ForwardPass
from shardlab.evaluate.glue import MNLI, QQP, PairsDataset
from shardlab.evaluate.lambada import LAMBADA
from shardlab.evaluate.options import (EvaluationOptions, RACEOptions, SQuADOptions, TuningOptions, WikiText103Options,
                                       ZeroShotOptions)
from shardlab.evaluate.passes import WordsPass
from shardlab.evaluate.race import RACEDataset
from shardlab.evaluate.squad import SQuADDataset
from shardlab.evaluate.wikitext103 import WikiText103


class Task(NamedTuple):
    """A task: its data, its model and its measure, which the data set computes."""

    architecture: str                       # of the model: a GPT as it is, or a BERT, which is tuned first
    options: type[EvaluationOptions]
    dataset: Callable[..., Any]             # of --data-path, a tokenizer and --seq-length
    sizes: tuple[str, ...] = ()             # options that it takes behind these
    head: str = ""                          # of a tuned BERT
    figure: str = "accuracy"                # the main one, which chooses the best of several tunings
    make_pass: type[ForwardPass] = ForwardPass      # of a GPT: it sums what is measured over samples

    def open(self, args: Any, tokenizer: Any) -> Any:
        """Open the samples. Raises UserError for files that are not the task's, and for sizes that do not fit."""
        return self.dataset(args.data_path, tokenizer, args.seq_length, *(getattr(args, name) for name in self.sizes))


TASKS = {
    "wikitext103": Task("gpt", WikiText103Options, WikiText103, ("overlapping_eval",)),
    "lambada": Task("gpt", ZeroShotOptions, LAMBADA, make_pass=WordsPass),
    "race": Task("bert", RACEOptions, RACEDataset, ("seed", "max_qa_length"), "choice"),
    "mnli": Task("bert", TuningOptions, partial(PairsDataset, MNLI), ("seed",), "entailment"),
    "qqp": Task("bert", TuningOptions, partial(PairsDataset, QQP), ("seed",), "paraphrase"),
    "squad": Task("bert", SQuADOptions, SQuADDataset, ("seed", "max_query_length", "doc_stride", "max_answer_length"),
                  "span", "F1"),
}
