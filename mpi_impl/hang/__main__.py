"""Who did not come to which collective: `shardlab hang DUMPS`, for a job of PyTorch's that hangs.

    shardlab hang comm_traces/          # a folder with a dump of each rank
    shardlab hang /tmp/nccl_trace_rank_*

Reads the dumps of PyTorch's flight recorder, pickles or JSON, without PyTorch, and without executing anything in them.
It names the first collective of each group that its ranks have not called alike; says of each rank where it waits, and
for whom; and follows that to the rank that waits for nobody, or to the circle of ranks that wait for one another.

The exit status is 1 if anybody waits or ranks disagree, and 0 if all has ended.
"""
import sys

from mpi_impl.hang.dumps import read_all
from mpi_impl.hang.waits import Job, report
from mpi_impl.launch.entry import ArgumentParser, run_alone


def main() -> None:
    parser = ArgumentParser(prog="shardlab hang", description="Say who did not come to which collective, from dumps of "
                            "PyTorch's flight recorder.")
    parser.add_argument("dumps", nargs="+", metavar="DUMPS", help="a folder with the dumps of a job, or the dumps, "
                        "whose names end in their ranks")
    job = Job(read_all(parser.parse_args().dumps))
    print(report(job))
    sys.exit(int(bool(job.waits or job.disagreements)))


if __name__ == "__main__":
    run_alone(main)
