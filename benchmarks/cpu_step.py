"""The speed of a training step on CPU cores, beside its peers and the machine's own matrix products.

    .venv/bin/python -m pip install torch==2.15.0       # jax, too, for its row
    .venv/bin/python benchmarks/cpu_step.py

For each work and number of ranks the contenders are ours and what else a user would pick, each in float32 and in
bfloat16, as far as that makes a difference; and the same number of processes that only multiply large matrices, in
float32. All are started first, and then take turns (turns.py), so that other load on the machine slows all of them
down. The tables have medians over all turns; the ratio of our fastest contender to each peer's faster format; and the
share of the rate of those matrix products that our float32 step's own products reach (works.py counts them).
"""
import argparse
import importlib.util
import socket
from statistics import median
from typing import NamedTuple

from contenders.sgemm import FLOPS
from programs import head, parse, parser_of, row
from turns import Contender, launched, median_times, program
from works import WORKS

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

BETWEEN = [("h192", 1), ("h192", 3), ("h256", 1), ("h256", 2), ("h320", 1), ("h384", 1), ("h384", 2), ("llama256", 1),
           ("llama256", 2), ("llama320", 1), ("bert256", 1), ("bert256", 2), ("bert384", 1), ("bert384", 2)]
CASES = [("h512", 1), ("h512", 2), ("h512", 8), ("h128", 1), ("h128", 2), ("h128", 8)]
FORMATS = {"float32": [], "bfloat16": ["--bf16"]}
SGEMM = "products alone"


class Way(NamedTuple):
    """A way to take a step: the contender's program, its options, and whether it is one process with all threads."""

    program: str
    options: tuple[str, ...] = ()
    threads: bool = False


# By how the ranks divide the work, and then by name. Ours come first.
WAYS = {
    "tensor": {
        "ours": Way("shardlab_gpt"),
        "ours, sequence parallel": Way("shardlab_gpt", ("--sequence-parallel",)),
        "PyTorch": Way("pytorch_gpt"),
        "PyTorch, compiled": Way("pytorch_gpt", ("--compile",)),
        "PyTorch, one process": Way("pytorch_gpt", threads=True),
        "JAX, one process": Way("jax_gpt", threads=True)},
    "data": {
        "ours": Way("shardlab_gpt", ("--data-parallel",)),
        "PyTorch DDP": Way("pytorch_gpt", ("--ddp",))},
    "zero-3": {
        "ours, --zero-stage 3": Way("shardlab_gpt", ("--data-parallel", "--zero-stage-3")),
        "PyTorch FSDP2": Way("pytorch_gpt", ("--fsdp2",))}}


def main() -> None:
    parser = parser_of("cpu_step", __doc__)
    parser.add_argument("cases", nargs="*", metavar="WORK:RANKS",
                        help=f"as h512:2; works are {', '.join(WORKS)}; 'between' is {len(BETWEEN)} smaller cases "
                             "(default: six of h512 and h128)")
    parser.add_argument("--split", choices=WAYS, default="tensor",
                        help="what ranks divide: the layers, the samples, or also all states (default: tensor)")
    parser.add_argument("--seconds", type=float, default=3.0, help="that a turn takes, about (default: 3)")
    parser.add_argument("--without", nargs="*", default=[], metavar="PART",
                        help="leave out contenders and formats whose names have such a part, as compiled (which takes "
                             "minutes to start), JAX, or bfloat16")
    options = parse(parser, turns=(7, "of each contender"))
    cases = [case for text in options.cases for case in (BETWEEN if text == "between" else [case_of(text)])] or CASES
    check(cases, options)
    print(f"{cores()} cores; one thread a rank; tokens/s, medians of {options.turns} turns each, taken in turn")
    for name, ranks in cases:
        print(f"\n{measure(name, ranks, options)}", flush=True)


def case_of(text: str) -> tuple[str, int]:
    """Return the case. Raises UserError if there is no work, or no number of ranks that divides it."""
    name, _, ranks = text.partition(":")
    if name not in WORKS or not ranks.isdecimal() or int(ranks) < 1 or (WORKS[name].g or WORKS[name].a) % int(ranks):
        raise UserError(f"There is no case {text}. Write it as {' or '.join(f'{work}:1' for work in WORKS)}, with a "
                        "number of ranks that divides the model's heads; of a Llama, those of keys and values.")
    return name, int(ranks)


def check(cases: list[tuple[str, int]], options: argparse.Namespace) -> None:
    """Raise UserError if there is a case in which nothing can be measured."""
    if not any(who.startswith("ours") and not left_out(who, options) for who in WAYS[options.split]) or all(
            left_out(form, options) for form in FORMATS):
        raise UserError(f"--without {' '.join(options.without)} leaves nothing of ours to compare with: leave out "
                        "peers, or one of the two formats.")
    for name, ranks in cases:
        if options.split != "tensor" and (ranks == 1 or WORKS[name].b % ranks):
            raise UserError(f"--split {options.split} divides the samples: {name} has {WORKS[name].b}, so the number "
                            f"of ranks must divide {WORKS[name].b}, and be more than 1; it is {ranks}.")


def measure(name: str, ranks: int, options: argparse.Namespace) -> str:
    """Measure a case, and return its table."""
    work, ways = WORKS[name], ways_of(name, ranks, options)
    commands = [contender(f"{who} {form}", way, flags, name, ranks) for who, way in ways.items()
                for form, flags in FORMATS.items() if not left_out(form, options)]
    products = Contender(SGEMM, [program("sgemm")] * ranks, thread_settings({}), ranks)
    times = median_times([*commands, products], options.turns, lambda one: warm_up(one, options.seconds))
    speed = {who: {form: work.tokens / times[f"{who} {form}"] for form in FORMATS if f"{who} {form}" in times}
             for who in ways}
    ours = [who for who in ways if who.startswith("ours")]
    best = max(rate for who in ours for rate in speed[who].values())
    lines = [head(f"{work}, on {ranks} ranks" if ranks > 1 else f"{work}, on one rank", *FORMATS, "ours / it")]
    for who in ways:
        ratio = "" if who in ours else f"**{best / max(speed[who].values()):.2f}**"
        lines.append(row(who, *(f"{speed[who][form]:,.0f}" if form in speed[who] else "" for form in FORMATS), ratio))
    if "float32" in speed[ours[0]]:
        rate = max(speed[who]["float32"] for who in ours) / work.tokens * work.flops
        lines.append(row("our products, of the rate of products alone", f"{rate / (ranks * FLOPS / times[SGEMM]):.0%}",
                         "", ""))
    return "\n".join(lines)


def left_out(name: str, options: argparse.Namespace) -> bool:
    return any(part in name for part in options.without)


def ways_of(name: str, ranks: int, options: argparse.Namespace) -> dict[str, Way]:
    """Return the ways that this work can be done. Raises UserError if a peer's library is not installed."""
    work, found = WORKS[name], {}
    for who, way in WAYS[options.split].items():
        impossible = (ranks == 1 and (way.threads and "PyTorch" in who or "sequence" in who)
                      or "sequence" in who and work.s % ranks or "JAX" in who and (work.g or work.bert))
        if not impossible and not left_out(who, options):
            found[who] = way
    for who, library in (("PyTorch", "torch"), ("JAX", "jax")):
        if any(who in one for one in found) and importlib.util.find_spec(library) is None:
            raise UserError(f"{who} is not installed. Install it into this environment, as in `pip install {library}`, "
                            f"or leave it out with --without {who}.")
    return found


def contender(who: str, way: Way, flags: list[str], name: str, ranks: int) -> Contender:
    """Start a contender."""
    work, environment = WORKS[name], thread_settings({})
    if way.program == "shardlab_gpt":
        command = launched(ranks, way.program, work.argument, "1", *way.options, *flags)
        return Contender(who, [command], environment, ranks)
    script = "pytorch_bert" if work.bert and way.program == "pytorch_gpt" else way.program
    processes = 1 if way.threads else ranks
    command = [*program(script), work.argument, *way.options, *flags]
    threads = ["--threads", str(ranks)] if way.threads else []
    return Contender(who, [[*command, *threads]] * processes, environment | torch_world(processes), processes)


def torch_world(ranks: int) -> dict[str, str]:
    """Return the environment of torch.distributed, except the rank, which turns.py adds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}


def warm_up(one: Contender, seconds: float) -> int:
    """Return how many steps fit into this many seconds, at least 1, after a first few that do not count."""
    one.turn(2)
    return max(1, round(seconds / median(one.turn(3))))


if __name__ == "__main__":
    run_alone(main)
