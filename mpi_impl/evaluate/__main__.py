"""The evaluation of a model on published data, on any number of ranks, which changes no figure:

    mpirun -np 8 python -m mpi_impl.evaluate --task wikitext103 --data-path wiki.test.tokens --load GPT
    mpirun -np 8 python -m mpi_impl.evaluate --task lambada --data-path lambada_test.jsonl --load-hf GPT2
    mpirun -np 8 python -m mpi_impl.evaluate --task race --data-path RACE --load BERT --tensor-model-parallel-size 2
        --epochs 3 --lr 2e-5 --lr-warmup-fraction 0.06 --micro-batch-size 4 --global-batch-size 32

Tasks for a BERT are also mnli, qqp and squad.
"""
from collections.abc import Callable
from functools import partial

from mpi_impl.evaluate.arguments import parse
from mpi_impl.evaluate.options import HEADS
from mpi_impl.evaluate.protocol import fine_tuning
from mpi_impl.evaluate.zero_shot import LastWords, Perplexity
from mpi_impl.launch.entry import run
from mpi_impl.programs.program import run_program

PROGRAMS: dict[str, Callable] = {"wikitext103": Perplexity, "lambada": LastWords,
                                 **dict.fromkeys(HEADS, fine_tuning)}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    run_program(partial(PROGRAMS[args.task], args), args)


if __name__ == "__main__":
    run(main)
