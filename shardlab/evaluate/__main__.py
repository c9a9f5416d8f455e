"""The evaluation of a model on published data, on any number of ranks, which changes no figure:

    mpirun -np 8 python -m shardlab.evaluate --task wikitext103 --data-path wiki.test.tokens --load GPT
    mpirun -np 8 python -m shardlab.evaluate --task lambada --data-path lambada_test.jsonl --load-hf GPT2
    mpirun -np 8 python -m shardlab.evaluate --task race --data-path RACE --load BERT --tensor-model-parallel-size 2
        --epochs 3 --lr 2e-5 --lr-warmup-fraction 0.06 --micro-batch-size 4 --global-batch-size 32

Tasks for a BERT are also mnli, qqp and squad.
"""
from functools import partial

from mpi_impl.launch.entry import run
from shardlab.evaluate.arguments import parse
from shardlab.evaluate.protocol import evaluation
from shardlab.programs.program import run_program


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    run_program(partial(evaluation, args), args)


if __name__ == "__main__":
    run(main)
