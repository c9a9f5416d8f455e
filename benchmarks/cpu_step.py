"""The speed of a training step on CPU cores, beside PyTorch over gloo and the machine's own matrix products.

    .venv/bin/python -m pip install torch==2.13.0
    .venv/bin/python benchmarks/cpu_step.py

For each work and number of ranks the contenders are ours, without and with sequence parallelism; PyTorch as it is
("eager") and with `torch.compile`; and the same number of processes that only multiply large matrices. All are started
first, and then take turns (turns.py), so that other load on the machine slows all of them down. A process has one
thread. The table has medians over all turns; the ratio of our faster contender to PyTorch's faster one; and the share
of the rate of those matrix products that our step's own products reach (works.py counts them).
"""
import argparse
import importlib.util
import socket
from collections.abc import Iterator
from statistics import median

from contenders.sgemm import FLOPS
from programs import head, parse, parser_of, row
from turns import Contender, launched, median_times, program
from works import WORKS

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

OURS, PEERS = ("ours", "sequence parallel"), ("eager", "compiled")
BETWEEN = [("h192", 1), ("h192", 3), ("h256", 1), ("h256", 2), ("h320", 1), ("h384", 1), ("h384", 2), ("llama256", 1),
           ("llama256", 2), ("llama320", 1), ("bert256", 1), ("bert256", 2), ("bert384", 1), ("bert384", 2)]
CASES = [("h512", 1), ("h512", 2), ("h512", 8), ("h128", 1), ("h128", 2), ("h128", 8)]


def main() -> None:
    parser = parser_of("cpu_step", __doc__)
    parser.add_argument("cases", nargs="*", metavar="WORK:RANKS",
                        help=f"as h512:2; works are {', '.join(WORKS)}; 'between' is {len(BETWEEN)} smaller cases "
                             "(default: six of h512 and h128)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes, about (default: 3)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes minutes to start")
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch out, and compare with products alone")
    options = parse(parser, turns=(7, "of each contender"))
    cases = [case for text in options.cases for case in (BETWEEN if text == "between" else [case_of(text)])] or CASES
    if not options.no_peer and importlib.util.find_spec("torch") is None:
        raise UserError("PyTorch is not installed. Install it into this environment, as in `pip install "
                        "torch==2.13.0`, or leave it out with --no-peer.")
    print(f"{cores()} cores; one thread a rank; tokens/s, medians of {options.turns} turns each, taken in turn\n")
    print(head("work", "ranks", "ours", "sequence parallel", "PyTorch eager", "compiled", "ours / PyTorch",
               "of sgemm's rate"), flush=True)
    for name, ranks in cases:
        print(measure(name, ranks, options), flush=True)


def case_of(text: str) -> tuple[str, int]:
    """Return the case. Raises UserError if there is no work, or no number of ranks that divides it."""
    name, _, ranks = text.partition(":")
    if name not in WORKS or not ranks.isdecimal() or int(ranks) < 1 or (WORKS[name].g or WORKS[name].a) % int(ranks):
        raise UserError(f"There is no case {text}. Write it as {' or '.join(f'{work}:1' for work in WORKS)}, with a "
                        "number of ranks that divides the model's heads; of a Llama, those of keys and values.")
    return name, int(ranks)


def measure(name: str, ranks: int, options: argparse.Namespace) -> str:
    """Measure a case, and return the row of the table."""
    work = WORKS[name]
    times = median_times(contenders(name, ranks, options), options.turns, lambda one: warm_up(one, options.seconds))
    speed = {who: work.tokens / found for who, found in times.items() if who != "sgemm"}
    ours, peers = ([speed[who] for who in names if who in speed] for names in (OURS, PEERS))
    ratio = f"**{max(ours) / max(peers):.2f}**" if peers else "-"
    share = max(ours) / work.tokens * work.flops / (ranks * FLOPS / times["sgemm"])
    columns = [f"{speed[who]:,.0f}" if who in speed else "-" for who in (*OURS, *PEERS)]
    return row(work, ranks, *columns, ratio, f"{share:.0%}")


def warm_up(contender: Contender, seconds: float) -> int:
    """Return how many steps fit into this many seconds, at least 1, after a first few that do not count."""
    contender.turn(2)
    return max(1, round(seconds / median(contender.turn(3))))


def contenders(name: str, ranks: int, options: argparse.Namespace) -> Iterator[Contender]:
    """Start the contenders for a work."""
    environment, sizes, divided = thread_settings({}), WORKS[name].argument, WORKS[name].s % ranks == 0
    peer = "pytorch_bert" if WORKS[name].bert else "pytorch_gpt"
    for who, more in zip(OURS, ([], ["--sequence-parallel"]) if ranks > 1 and divided else ([],)):
        yield Contender(who, [launched(ranks, "shardlab_gpt", sizes, "1", *more)], environment, ranks)
    if not options.no_peer:
        for who, more in zip(PEERS, ([],) if options.no_compile else ([], ["--compile"])):
            yield Contender(who, [[*program(peer), sizes, *more]] * ranks, environment | torch_world(ranks),
                            ranks)
    yield Contender("sgemm", [program("sgemm")] * ranks, environment, ranks)


def torch_world(ranks: int) -> dict[str, str]:
    """Return the environment of torch.distributed, except the rank, which turns.py adds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}


if __name__ == "__main__":
    run_alone(main)
