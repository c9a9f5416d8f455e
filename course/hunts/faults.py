"""The bugs that can be hunted: mutants with numbers that only a course's secret tells. A level says where a bug shows
first.

The secret also orders them, by a digest of each. So nobody without it can find out which bugs a course has, they can be
drawn again at any time, and a bug that comes or goes later moves few others.
"""
import ast
import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

from tests.planted import source_of
from tests.zoo.entry import Bug
from tools.mutants.operators import COMMUNICATION, Change, Mutant, Place, but, called, is_text, mutants

LEVELS = {"forward": ("forward",), "backward": ("backward", "gradients"), "step": ("reduction", "step")}     # phases

SIZES = ("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16", "--vocab-size",
         "301", "--make-vocab-size-divisible-by", "4", "--global-batch-size", "8")
TENSOR, PIPELINE = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
RUNS = {"tensor": (2, (*SIZES, *TENSOR)),
        "sequence": (2, (*SIZES, *TENSOR, "--sequence-parallel")),
        "pipeline": (4, (*SIZES, *TENSOR, *PIPELINE, "--micro-batch-size", "2")),
        "data": (4, (*SIZES, *TENSOR, "--micro-batch-size", "2", "--zero-stage", "1", "--ddp-bucket-size", "4036"))}
LAYERS = "attention", "block", "core_attention", "cross_entropy", "embedding", "mlp"
PLACES = {"comm/regions": ("tensor", "sequence"), **{f"layers/{name}": ("tensor",) for name in LAYERS},
          "models/gpt": ("pipeline",), "models/stage": ("pipeline",), "parallel/data_parallel": ("data",),
          "parallel/model_state": ("data", "pipeline"), "parallel/passes": ("pipeline",),
          "parallel/pipeline": ("pipeline",), "parallel/sinks": ("data",), "parallel/zero": ("data",),
          "training/optimizer": ("data",), "training/trainer": ("data", "pipeline")}
KINDS = {"drop communication": "missing communication", "rescale": "scaling", "offset": "computation"}
SENDS = set("all_reduce all_gather reduce_scatter broadcast enter leave enter_backward leave_backward".split())
NUMBERS = 4     # of each place: as many cases differ in nothing else
GIVE_ARRAYS = set("""linear total rows reshape sum mean max exp log sqrt square tanh where concatenate stack astype copy
    einsum matmul swapaxes widened output_table take_along_axis lookup dropout dropout_backward residual
    residual_backward mask_padding layer_norm clip_coefficient learning_rate global_norm sum_of_squares
    core_attention_backward core_attention_forward ravel""".split())


class Fault(NamedTuple):
    """A bug to find, and the run in which it is live."""

    name: str
    kind: str               # one of the zoo's
    bug: Bug
    lines: tuple[int, int]  # the first and the last line of the file that count as found
    ranks: int
    options: tuple[str, ...]


def level_of(says: str) -> str:
    """Return the level of a difference such as '1 forward: embedding.output', or nothing if it comes too late."""
    return next((level for level, phases in LEVELS.items()
                 if says.startswith(tuple(f"1 {phase}:" for phase in phases))), "")


def in_order(faults: Iterable[Fault], secret: str, purpose: str) -> list[Fault]:
    """Return the faults in an order that nobody can compute without the secret, another one for each purpose."""
    def drawn(fault: Fault) -> bytes:
        return hmac.digest(secret.encode(), f"{purpose}\n{fault.name}".encode(), hashlib.sha256)

    return sorted(faults, key=drawn)


@cache
def drawn_faults(secret: str) -> dict[str, Fault]:
    """Return all mutants that a course may draw, by name: each in the runs in which it could be live."""
    found = {}
    for place, runs in PLACES.items():
        for mutant in mutants(f"mpi_impl/{place}.py", partial(drawn, secret)):
            for run in runs:
                name = f"{run}: {mutant.name}"
                found[name] = Fault(name, KINDS[mutant.operator], *as_bug(mutant), *RUNS[run])
    return found


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
    for number in random.sample((*range(40, 96), *range(105, 196)), NUMBERS):
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
            if called(node) in SENDS:
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
