"""A rank of an imagined world: `python -m shardlab.dry_run --world-size 3072 --rank 0 --rank 511 ...`.

It takes pretrain_gpt's options, or pretrain_bert's with --model bert. The trainer, the schedule and ZeRO are the
program's own; only arrays have no data, and groups answer immediately. One process, no GPU, seconds for each rank.

The exit status is 1 if the messages of ranks do not match.
"""
import os
from collections.abc import Sequence

from mpi_impl.launch.entry import run_alone
from shardlab.dry_run import report, scale
from shardlab.dry_run.options import parse
from shardlab.dry_run.world import DryRun, kinds_of_ranks
from shardlab.predict.rank import RankRun
from shardlab.report.timelines.chrome_trace import write_chrome_trace
from shardlab.report.timelines.tracing import TRACE


def main(argv: Sequence[str] | None = None) -> None:
    request = parse(argv)
    world, dry = request.world, DryRun(request.world)
    print(report.introduction(world))
    if request.ignored:
        print(f"without effect on a dry run: {', '.join(request.ignored)}")
    if request.program:
        print(f"\n{scale.describe(scale.count_all(dry, request.program))}")
        return
    kinds = [dry.of_pipeline_rank(kind.pipeline_ranks[0]) for kind in kinds_of_ranks(world)]
    runs = list[RankRun]()
    for rank in request.ranks or kinds:
        runs.append(dry.run(rank))
        print(f"\n{report.describe_rank(runs[-1], world)}")
    print(f"\n{report.describe_time(runs, world)}")
    if request.trace:
        write_trace(request.trace, runs)
    if not request.ranks:
        match(dry)


def match(dry: DryRun) -> None:
    """Match the messages of all kinds of ranks; end with status 1 if they do not match."""
    ranks, mistake = dry.match()
    print(mistake or report.matched(ranks))
    if mistake:
        raise SystemExit(1)


def write_trace(folder: str, runs: Sequence[RankRun]) -> None:
    path = os.path.join(folder, TRACE)
    write_chrome_trace(path, [run.slices for run in runs], [run.rank for run in runs])
    print(f"the timelines of {len(runs)} ranks are in {path}, for https://ui.perfetto.dev")


if __name__ == "__main__":
    run_alone(main)
