"""The speed of generation on CPU cores, beside transformers' `GPT2LMHeadModel.generate`.

    .venv/bin/python -m pip install torch==2.15.0 transformers
    .venv/bin/python benchmarks/generation.py

GPT-2's smallest model, 124 million random weights, which transformers saves and all contenders load; in float32 and in
bfloat16, greedy, with a KV cache, in batches of texts. Ours is tensor-parallel, one thread a rank. transformers is one
process, with a thread for each rank, but no more than there are cores; its attention is once eager and once sdpa. All
take turns (turns.py), and the referee checks that all find the same tokens in float32. The prompts are read in one
forward, up to the first new token; the rate is that of the tokens after it. Ratios are to a peer's faster format.
"""
import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from programs import head, parse, parser_of, row
from texts import Texts
from turns import Contender, launched, output_of, program

from mpi_impl.launch.entry import run_alone
from mpi_impl.runtime.rank_environment import cores, thread_settings
from reference.errors import UserError

PEERS, FORMATS = ("eager", "sdpa"), ("float32", "bfloat16")
CASES = [(1, 1), (1, 2), (1, 4), (8, 1), (8, 2), (8, 4)]


def main() -> None:
    parser = parser_of("generation", __doc__)
    parser.add_argument("cases", nargs="*", metavar="TEXTS:RANKS", help="as 8:2, a batch of 8 (default: six of them)")
    options = parse(parser, prompt=(128, "tokens of each"), new=(64, "tokens to generate after each"),
                    turns=(5, "of each contender"))
    cases = [case_of(text) for text in options.cases] or CASES
    if options.new < 2:
        raise UserError(f"--new is {options.new}, but must be at least 2: the first token is part of the prompts' "
                        "time.")
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        raise UserError("transformers is not installed. Install it into this environment, as in `pip install "
                        "torch transformers`.")
    print(f"{cores()} cores; prompts of {options.prompt} tokens and {options.new} new ones; medians of {options.turns} "
          "turns each, taken in turn")
    with tempfile.TemporaryDirectory() as folder:
        output_of([*program("transformers_texts"), folder])
        for b, ranks in cases:
            print(f"\n{measure(Texts(b, options.prompt, options.new), ranks, folder, options.turns)}", flush=True)


def case_of(text: str) -> tuple[int, int]:
    """Return the case. Raises UserError if it is none, or GPT-2's heads cannot be dealt out to the ranks."""
    b, _, ranks = text.partition(":")
    if not b.isdecimal() or not ranks.isdecimal() or int(b) < 1 or int(ranks) < 1 or 12 % int(ranks):
        raise UserError(f"There is no case {text}. Write it as 8:2, a batch of 8 texts on 2 ranks, with a number of "
                        "ranks that divides GPT-2's 12 heads.")
    return int(b), int(ranks)


def measure(texts: Texts, ranks: int, folder: str, turns: int) -> str:
    """Measure a case, and return its table."""
    threads = min(ranks, cores())
    files = {f"{who} {form}": Path(folder, f"{who}-{form}.json") for who in ("ours", *PEERS) for form in FORMATS}
    times: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        started = [stack.enter_context(closing(one)) for one in contenders(texts, ranks, threads, folder, files)]
        for _ in range(turns):
            for one in started:
                times.setdefault(one.name, []).append(one.turn(2))
    found = {who: json.loads(file.read_text()) for who, file in files.items()}
    for who in PEERS:
        if found[f"{who} float32"] != found["ours float32"]:
            raise SystemExit(f"error: transformers ({who}) has found other tokens than we.")
    prompt = {who: median(one for one, _ in found) for who, found in times.items()}
    token = {who: median(both - one for one, both in found) / (texts.new - 1) for who, found in times.items()}
    title = f"{texts.b} texts, {ranks} ranks, {threads} threads of transformers"
    lines = [head(title, *(f"{what}, {form}" for what in ("prompts", "tokens/s") for form in FORMATS),
                  "ours / it, prompts", "ours / it, tokens")]
    for who in ("ours", *PEERS):
        ratios = [best(times, who) / best(times, "ours") for times in (prompt, token)]
        lines.append(row(who, *(f"{prompt[f'{who} {form}']:.2f} s" for form in FORMATS),
                         *(f"{texts.b / token[f'{who} {form}']:,.1f}" for form in FORMATS),
                         *(f"**{ratio:.2f}**" if who in PEERS else "" for ratio in ratios)))
    return "\n".join(lines)


def best(times: dict[str, float], who: str) -> float:
    """Return the time of a contender's faster format."""
    return min(times[f"{who} {form}"] for form in FORMATS)


def contenders(texts: Texts, ranks: int, threads: int, folder: str, files: dict[str, Path]) -> Iterator[Contender]:
    """Start the contenders for a case."""
    environment = thread_settings({})
    for name, file in files.items():
        who, form = name.split()
        what = folder, texts.argument, str(file), form
        if who == "ours":
            yield Contender(name, [launched(ranks, "shardlab_texts", *what)], environment, ranks)
        else:
            yield Contender(name, [[*program("transformers_texts"), *what, str(threads), who]], {}, 1)


if __name__ == "__main__":
    run_alone(main)
