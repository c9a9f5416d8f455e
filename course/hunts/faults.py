"""The bugs that can be hunted: those of the zoo, and mutants that people could have written; and who gets which.

A level says where a bug shows first. A fault of a level is drawn by a digest of the course's secret, the student and
the fault itself. So nobody without the secret can find out which one is theirs, each student's can be drawn again at
any time, and a fault that comes or goes later changes few other students'.
"""
import ast
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.bug_matrix import results
from benchmarks.bug_matrix.hunt import hunts, lines_of
from tests.planted import source_of
from tests.zoo.entry import Bug
from tools.mutants.operators import COMMUNICATION, Change, Mutant, Place, but, called, is_text, mutants

CATALOGUE = Path(__file__).with_name("catalogue.json")
LEVELS = {"forward": ("forward",), "backward": ("backward", "gradients"), "step": ("reduction", "step")}     # phases

SIZES = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--vocab-size",
         "301", "--make-vocab-size-divisible-by", "4", "--global-batch-size", "8")
TENSOR, PIPELINE = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
RUNS = {"tensor": (2, (*SIZES, *TENSOR)),
        "sequence": (2, (*SIZES, *TENSOR, "--sequence-parallel")),
        "pipeline": (4, (*SIZES, *TENSOR, *PIPELINE, "--micro-batch-size", "2")),
        "data": (4, (*SIZES, *TENSOR, "--micro-batch-size", "2", "--zero-stage", "1", "--ddp-bucket-size", "4036"))}
LAYERS = "attention", "block", "core_attention", "cross_entropy", "embedding", "mlp"
PLACES = {"comm/mappings": ("tensor", "sequence"), **{f"layers/{name}": ("tensor",) for name in LAYERS},
          "models/gpt": ("pipeline",), "models/stage": ("pipeline",), "parallel/data_parallel": ("data",),
          "parallel/model_state": ("data", "pipeline"), "parallel/passes": ("pipeline",),
          "parallel/pipeline": ("pipeline",), "parallel/sinks": ("data",), "parallel/zero": ("data",),
          "training/optimizer": ("data",), "training/trainer": ("data", "pipeline")}
KINDS = {"drop communication": "missing communication", "group": "wrong group", "rescale": "scaling",
         "alias": "aliasing", **dict.fromkeys(("drop update", "+= to =", "sign", "swap operands", "axis", "off by one",
                                               "comparison", "condition", "offset"), "computation")}
GIVE_ARRAYS = set("""linear total rows reshape sum mean max exp log sqrt square tanh where concatenate stack astype copy
    einsum matmul swapaxes widened output_table take_along_axis lookup dropout dropout_backward residual
    residual_backward mask_padding layer_norm clip_coefficient learning_rate global_norm sum_of_squares
    core_attention_backward core_attention_forward ravel""".split())
SENDS = re.compile(r"[\w.]*\b(all_reduce|all_gather|reduce_scatter|broadcast|enter|leave|enter_backward|leave_backward)"
                   r"\(")


class Fault(NamedTuple):
    """A bug to find, and the run in which it is live."""

    name: str
    kind: str               # one of the zoo's
    bug: Bug
    lines: tuple[int, int]  # the first and the last line of the file that count as found
    ranks: int
    options: tuple[str, ...]


@cache
def faults(level: str) -> tuple[Fault, ...]:
    """Return all faults of a level."""
    known = results.read()
    zoo = (Fault(hunt.entry.name, hunt.entry.kind, hunt.entry.bug,
                 (lines_of(hunt.entry).start, lines_of(hunt.entry).stop - 1), hunt.ranks, without_steps(hunt.options))
           for hunt in hunts() if level_of(known[hunt.entry.name]["compare"].says) == level)
    catalogue = json.loads(CATALOGUE.read_text())
    return (*zoo, *(fault for run in RUNS for fault in mutations(run) if catalogue.get(fault.name) == [level, run]))


def without_steps(options: list[str]) -> tuple[str, ...]:
    """Return the options without the number of steps, which all hunts share."""
    at = options.index("--train-iters")
    return (*options[:at], *options[at + 2:])


def level_of(says: str) -> str:
    """Return the level of a difference such as '1 forward: embedding.output', or nothing if it comes too late."""
    return next((level for level, phases in LEVELS.items()
                 if says.startswith(tuple(f"1 {phase}:" for phase in phases))), "")


def in_order(faults: Iterable[Fault], secret: str, student: str) -> list[Fault]:
    """Return the faults in an order that nobody can compute without the secret: the first is the student's."""
    def drawn(fault: Fault) -> bytes:
        return hmac.digest(secret.encode(), f"{student}\n{fault.name}".encode(), hashlib.sha256)

    return sorted(faults, key=drawn)


@cache
def mutations(run: str, secret: str = "") -> tuple[Fault, ...]:
    """Return the mutants that look like a person's mistake and could be live in a run; or a course's, by its secret."""
    found = []
    for path in (f"mpi_impl/{place}.py" for place, runs in PLACES.items() if run in runs):
        for mutant in mutants(path, partial(drawn, secret) if secret else None):
            fewer = len(SENDS.findall(mutant.after)) < len(SENDS.findall(mutant.before))
            if mutant.operator in KINDS and (mutant.operator != "drop communication" or fewer):
                bug, lines = as_bug(mutant)
                name = f"{run}: {mutant.name}" if secret else mutant.name
                found.append(Fault(name, KINDS[mutant.operator], bug, lines, *RUNS[run]))
    return tuple(found)


def answer_of(fault: Fault) -> tuple:
    """Return what a student has to find out."""
    return fault.bug.module, fault.lines, fault.kind


def probable_level(fault: Fault) -> str:
    """Return the level at which a mutant shows probably, by its name."""
    path, function, _ = fault.name.split(" | ", 2)
    return "backward" if "backward" in function else "step" if re.search("training|parallel/[dmz]", path) else "forward"


def drawn(secret: str, place: Place) -> Iterator[Change]:
    """Yield changes of a place with numbers that only the secret tells."""
    random = Random(f"{secret}\n{ast.unparse(place.statement)}\n{ast.unparse(place.nodes[0])}")
    for number in random.sample((*range(40, 96), *range(105, 196)), 2):
        yield from changes_by(ast.Constant(number / 100), place)


def changes_by(number: ast.Constant, place: Place) -> Iterator[Change]:
    """Yield a place's changes by a number: a wrong factor, an offset, a multiple in the place of a message."""
    node = place.nodes[0]
    match node:
        case ast.BinOp(left, op, right) if not (is_text(left) or is_text(right)):
            if isinstance(op, ast.Add | ast.Sub):
                yield "offset", ast.BinOp(left, op, number)
                yield "rescale", ast.BinOp(left, op, ast.BinOp(right, ast.Mult(), number))
            else:
                yield "rescale", ast.BinOp(node, ast.Mult(), number)
                yield "offset", ast.BinOp(node, ast.Add(), number)
        case ast.Call(args=[argument, *others]) if called(node) in COMMUNICATION:
            yield "drop communication", ast.BinOp(argument, ast.Mult(), number)
            yield "rescale", but(node, args=[ast.BinOp(argument, ast.Mult(), number), *others])
            yield "offset", but(node, args=[ast.BinOp(argument, ast.Add(), number), *others])
        case ast.Call() if called(node) in GIVE_ARRAYS:
            yield "rescale", ast.BinOp(node, ast.Mult(), number)
            yield "offset", ast.BinOp(node, ast.Add(), number)


def as_bug(mutant: Mutant) -> tuple[Bug, tuple[int, int]]:
    """Return the mutant as lines in the place of others, with those before them until they occur only once; and the
    first and the last line that it changes.
    """
    source = source_of(mutant.module)
    lines, statement = source.splitlines(keepends=True), statements(source)[mutant.statement]
    first = statement.lineno - 1
    last = statement.body[0].lineno - 1 if hasattr(statement, "body") else statement.end_lineno
    wrong = " " * statement.col_offset + mutant.after + "\n"
    start = next(start for start in range(first, -1, -1) if source.count("".join(lines[start:last])) == 1)
    bug = Bug(mutant.module, "".join(lines[start:last]), "".join(lines[start:first]) + wrong)
    return bug, (first + 1, last)


@cache
def statements(source: str) -> dict[int, Any]:
    """Map the line on which a statement begins to its node: the innermost one."""
    return {node.lineno: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)}
