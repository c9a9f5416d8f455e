"""Train a BERT: `mpirun -np 8 python -m mpi_impl.pretrain_bert --tensor-model-parallel-size 4 ...`."""
from mpi_impl.launch.entry import run
from shardlab.programs.options import parse_options


def main(argv: list[str] | None = None) -> None:
    """Run the program on all ranks of the world."""
    given = parse_options(argv, "bert")
    from shardlab.programs.bert import PretrainingBERT  # all that computes, which --help does without
    PretrainingBERT.start(given)


if __name__ == "__main__":
    run(main)
