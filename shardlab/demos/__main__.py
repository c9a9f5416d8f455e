"""The list of demos: `python -m shardlab.demos`. One process; it starts no ranks."""
from collections.abc import Sequence

from mpi_impl.launch.entry import ArgumentParser, run_alone
from mpi_impl.runtime.rank_environment import is_first_rank
from mpi_impl.runtime.tables import aligned
from shardlab.demos import DEMOS, docstring, title

START = """
Each runs on any number of ranks, for a few seconds, and ends with a check against reference/:
  .venv/bin/shardlab demos {demo} -n 4
  mpirun -np 4 python -m shardlab.demos.{demo}
--help lists its options.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="shardlab.demos", description="List the demos, or describe one of them.")
    parser.add_argument("demo", nargs="?", choices=DEMOS, metavar="DEMO", help="describe this one")
    demo = parser.parse_args(argv).demo
    if is_first_rank():
        print(docstring(demo) if demo else aligned([[name, title(name)] for name in DEMOS], left=(0, 1)))
        print(START.format(demo=demo or "mlp"), end="")


if __name__ == "__main__":
    run_alone(main)
