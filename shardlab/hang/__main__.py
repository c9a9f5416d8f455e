"""`shardlab hang DUMPS` says which rank of a hanging PyTorch job did not come to which collective.

    shardlab hang comm_traces/          # a folder with a dump of each rank
    shardlab hang nccl_trace_rank_*

It reads the dumps of PyTorch's flight recorder, pickles or JSON, without PyTorch and without executing anything in
them. In each group it names the first collective that the ranks have called differently. For each rank it says where it
waits and for whom, and follows that to a rank that waits for nobody, or to ranks that wait for one another in a circle.

Without dumps, the lines of PyTorch's watchdog tell less: `shardlab hang slurm-*.out` says which rank waited in which
call, and which have not made the same ones.

The exit status is 1 if anybody waits or ranks disagree, and 0 if all has ended.
"""
import sys

from mpi_impl.launch.entry import ArgumentParser, run_alone
from shardlab.hang import logs
from shardlab.hang.dumps import read_all
from shardlab.hang.waits import Job, report


def main() -> None:
    parser = ArgumentParser(prog="shardlab hang", description="Say who did not come to which collective, from dumps of "
                            "PyTorch's flight recorder, or from logs.")
    parser.add_argument("dumps", nargs="+", metavar="DUMPS", help="a folder with the dumps of a job, or the dumps, "
                        "whose names end in their ranks; or files with the lines of PyTorch's watchdog")
    paths = parser.parse_args().dumps
    if timeouts := logs.timeouts_in(paths):
        print(logs.report(timeouts))
        sys.exit(1)
    job = Job(read_all(paths))
    print(report(job))
    sys.exit(int(bool(job.waits or job.disagreements)))


if __name__ == "__main__":
    run_alone(main)
