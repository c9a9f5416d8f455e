"""Evaluate a model on published data, on any number of ranks, which changes no figure:

    mpirun -np 8 python -m mpi_impl.evaluate --task wikitext103 --data-path wiki.test.tokens --load GPT
    mpirun -np 8 python -m mpi_impl.evaluate --task lambada --data-path lambada_test.jsonl --load-hf GPT2
    mpirun -np 8 python -m mpi_impl.evaluate --task race --data-path RACE --load BERT --tensor-model-parallel-size 2
        --epochs 3 --lr 2e-5 --lr-warmup-fraction 0.06 --micro-batch-size 4 --global-batch-size 32
"""
from mpi_impl.comm.group import Instruments, world
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.evaluation.arguments import parse
from mpi_impl.evaluation.fine_tuning import FineTuning
from mpi_impl.evaluation.zero_shot import LastWords, Perplexity, ZeroShot
from mpi_impl.launching.entry import give_up, leave_within, run

PROGRAMS: dict[str, type[ZeroShot] | type[FineTuning]] = {
    "wikitext103": Perplexity, "lambada": LastWords, "race": FineTuning}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    watchdog = Watchdog(60 * args.distributed_timeout_minutes, give_up)
    PROGRAMS[args.task](args, world(Instruments(watchdog=watchdog))).run()
    leave_within(watchdog.limit)


if __name__ == "__main__":
    run(main)
