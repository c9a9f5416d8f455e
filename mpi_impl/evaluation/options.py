"""The options of mpi_impl/evaluate.py, different for each task. Their combinations: arguments.py."""
from mpi_impl.launching.entry import ArgumentParser
from mpi_impl.programs.generation_options import parallelism_options, tokenizer_options
from mpi_impl.programs.options import (device_options, memory_options, parallelism_options as training_parallelism,
                                       precision_options, training_options)
from reference.precision import FORMATS

TASKS = {"wikitext103": "gpt", "lambada": "gpt", "race": "bert"}      # and the architecture for each
FILES = {"wikitext103": "WikiText-103's wiki.test.tokens", "lambada": "LAMBADA's lambada_test.jsonl",
         "race": "RACE's folder, with train, dev and test in it"}
EPOCHS = 3      # unless --epochs or --train-iters is given


def parser(task: str | None) -> ArgumentParser:
    """Return the parser of a task; without one, a parser that only asks for it."""
    p = ArgumentParser(prog="evaluate", description="Evaluate a model on published data, on any number of ranks. Each "
                       "task has options of its own, which --task TASK --help shows.")
    p.add_argument("--task", choices=tuple(TASKS), required=True,
                   help="perplexity on WikiText-103, or last words of LAMBADA, of a GPT; a BERT's answers to RACE's "
                        "questions, once it is tuned on them")
    if task is not None:
        groups = OF_RACE if task == "race" else OF_GPT
        for title, add_options in (("what is evaluated", lambda g: data_options(g, task)), *groups):
            add_options(p.add_argument_group(title))
    if task == "race":
        p.set_defaults(lr=2e-5, train_iters=None)
    return p


def data_options(g, task: str) -> None:
    g.add_argument("--data-path", required=True, metavar="PATH", help=FILES[task])
    g.add_argument("--load", metavar="DIR", help="the model: the last checkpoint in this folder")
    g.add_argument("--load-hf", metavar="DIR", help="or a model in Hugging Face's layout")
    tokenizer_options(g)
    g.add_argument("--seq-length", type=int, metavar="S", help="default: the longest that the model can see")
    if task == "wikitext103":
        g.add_argument("--overlapping-eval", type=int, default=32, metavar="O",
                       help="how many tokens the window moves on: few give each of them more context, and take longer "
                            "(default: 32)")
    if task == "race":
        g.add_argument("--max-qa-length", type=int, default=128, metavar="N",
                       help="the longest that a question and an answer may be, in tokens (default: 128)")
    g.add_argument("--metrics-file", metavar="F", help="write what is found out as JSON lines")


def forward_options(g) -> None:
    g.add_argument("--micro-batch-size", type=int, default=4, metavar="b")
    g.add_argument("--dtype", choices=tuple(FORMATS), default="float32", help="compute in this (default: float32)")


def tuning_options(g) -> None:
    training_options(g)
    g.add_argument("--epochs", type=int, metavar="N", help="pass so often through the questions, and answer the "
                   f"validation part's after each (default: {EPOCHS}; 0: the model is "
                   "tuned already)")
    g.add_argument("--hidden-dropout", type=float, default=0.1)
    g.add_argument("--attention-dropout", type=float, default=0.1)
    g.add_argument("--save", metavar="DIR", help="save the tuned model in this folder at the end")
    g.add_argument("--log-interval", type=int, default=10)


OF_GPT = (("how it is computed", forward_options), ("parallelism", parallelism_options), ("device", device_options))
OF_RACE = (("tuning", tuning_options), ("precision", precision_options), ("parallelism", training_parallelism),
           ("device", device_options), ("memory", memory_options))
