"""A deadlock on real ranks, and how to find it: `mpirun -np 4 python -m shardlab.demos.deadlock`.

In every rank a second thread prints the line in which the first one is stuck, and the rank for which it waits. The
waits form a cycle, which the demo then breaks, so that all ranks finish. `reference.schedules.validate` finds the same
cycle beforehand, from nothing but the planned order of work.
"""
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from textwrap import fill, indent
from typing import NamedTuple

import numpy as np

from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.watchdog import Watchdog
from mpi_impl.runtime.tables import WIDTH
from reference.schedules import validate
from reference.schedules.actions import Action, Receive, Schedule, Send, Step, lower
from reference.schedules.generators import evaluation_schedule
from shardlab.demos.printing import prefix_with_ranks, say
from shardlab.demos.runner import Demo, parser_of, program, run_demo

PATIENCE = 1.0      # seconds in one wait, until the other threads look where the ranks are stuck

ALONE = """\
A deadlock is a cycle of ranks that wait for one another. A single rank has nobody to wait for, so there is nothing to
see. Start more: `python -m mpi_impl.launch -n 4 -m shardlab.demos.deadlock`.
"""

INTRODUCTION = """\
Ranks that send one another messages can end up waiting for one another forever: a deadlock. Nothing fails, nothing is
printed, nothing moves, and no rank does anything visibly wrong. Here is one, made on purpose.

{ranks} hold {layers} layers, each of which adds its number: rank r has layer r, and layer {n} + r as well. So a sample
that goes through the layers in order goes through all ranks, and then through all of them once more. Each rank has a
list of what to do:
  1F0      compute layer 1
  0F0<0    wait for rank 0's message, the output of layer 0
  1F0>{next}    send rank {next} a message, the output of layer 1
Somebody has written rank 0's list in the wrong order, so that its second layer comes first:
{lists}

They start, and are silent. After {patience:g} s of that, another thread of each rank looks where its rank is stuck:
"""

READING = """\
How to read that. A rank's last line is where it is stuck. A wait alone is not an error: the other rank may be slow.
So follow the waits from rank to rank. If you come to a rank that works, look there. If you come back to where you
began, that cycle never ends, since each rank would send what the next one waits for only after its own wait.

How to break it. In the cycle look for an action that waits for nobody, and that comes after a wait. In rank 0's list
that is 0F0. Rank 0's other thread does that now, and sends the result; then all ranks go on.
"""


class Wait(NamedTuple):
    """The place where a rank is stuck."""

    whom: int            # the rank that it waits for
    what: str
    stack: list[str]     # of this file's lines, the innermost last


@program(lambda argv, n: parser_of("deadlock").parse_args(argv))
def show(demo: Demo, options) -> None:
    n = demo.n
    if n == 1:
        demo.say(ALONE)
        return
    right = evaluation_schedule([[rank, n + rank] for rank in range(n)], m=1)
    wrong = Schedule((right.ranks[0][::-1], *right.ranks[1:]))
    demo.introduce(INTRODUCTION, n=n, layers=2 * n, next=2 % n, lists=lists(wrong), patience=PATIENCE)
    circle, freed = play_until_freed(demo.ranks, wrong)
    demo.say(f"All came to the end of their lists; the output is {freed:g}.\n\nNone of that had to happen. "
             f"reference/schedules/validate.py checks them before anything runs, and says:\n{complaint(wrong)}\n")
    validate.validate(right)
    mended = demo.ranks.allgather_objects(play(demo.ranks, lower(right)[demo.rank], set()))[-1]
    demo.say(f"In the right order they pass. The ranks play them, and the output is {mended:g}:\n{lists(right)}\n")
    demo.equal("the cycle", circle, validate.wait_cycle(validate.play(lower(wrong), blocking=False)))
    demo.equal("the output", [freed, mended], [sum(range(2 * n))] * 2)


# ---- the deadlock ---------------------------------------------------------------------------------------------------


def play_until_freed(ranks: Group, wrong: Schedule) -> tuple[list[int], float]:
    """Play the wrong order until it is stuck and freed. Return the cycle of ranks, and the output.

    The watchdog calls `look` in a second thread of each rank when the first one has waited too long.
    """
    steps, done, everyone, over = lower(wrong)[ranks.rank], set[Step](), list[Wait](), threading.Event()
    first = Action(0, "F", 0)                     # it waits for nobody: do it, and all that comes after it
    behind = steps[steps.index(first):] if first in steps else []
    stuck, beside = threading.get_ident(), ranks.split(0, "beside")     # or messages of two threads might be mixed up

    def look(_: str) -> None:
        try:
            assert watchdog.wait is not None
            since, _group, what, (whom,), _while_silent = watchdog.wait
            everyone.extend(beside.allgather_objects(Wait(ranks.ranks.index(whom), what, stack_of(stuck))))
            say(ranks, report(everyone, time.monotonic() - since))
        finally:            # in any case: otherwise the rank would wait forever
            play(ranks, behind, done)
            over.set()

    watchdog = Watchdog(PATIENCE, look)
    watched = Group(ranks.comm, ranks.name, Instruments(watchdog=watchdog))
    output = play(watched, steps, done)
    over.wait()
    beside.free()
    return circle_of(everyone), ranks.allgather_objects(output)[-1]


def play(group: Group, steps: Sequence[Step], done: set[Step]) -> float:
    """Work through a rank's list, except what the rank's other thread has done already. Return the last output."""
    x, sent = np.zeros(1), []
    for step in steps:
        if step in done:
            continue
        done.add(step)
        match step:
            case Receive(action, source):
                x = np.empty(1)
                group.post_receive(x, source, action.stage, str(action)).wait()
            case Send(action, to):
                sent.append(group.post_send(x, to, action.stage, str(action)))
            case Action(layer):
                x = x + layer
    for pending in sent:
        pending.wait()
    return x.item()


def stack_of(thread: int) -> list[str]:
    """Return the innermost lines of this file in a thread's stack."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    own = [frame for frame in frames if frame.filename == __file__]
    return [f"line {frame.lineno}, in {frame.name}: {frame.line}" for frame in own[-2:]]


def circle_of(everyone: Sequence[Wait]) -> list[int]:
    """Return a cycle of ranks in which each waits for the next, and the last for the first."""
    return validate.wait_cycle({rank: Receive(Action(wait.whom, "F", 0), wait.whom)
                                for rank, wait in enumerate(everyone)})


# ---- output ---------------------------------------------------------------------------------------------------------


def lists(schedule: Schedule) -> str:
    return prefix_with_ranks([" ".join(map(str, steps)) for steps in lower(schedule)])


def report(everyone: Sequence[Wait], seconds: float) -> str:
    """Describe where all ranks are stuck, and what that means."""
    stacks = prefix_with_ranks(["\n".join([*wait.stack, f"waits for rank {wait.whom}: {wait.what}"])
                                for wait in everyone])
    first, *others = circle_of(everyone)
    circle = f"rank {first} waits for " + ", which waits for ".join(f"rank {rank}" for rank in (*others, first))
    return f"{stacks}\n\nAfter {seconds:.1f} seconds there is a cycle:\n{fill(circle + '.', WIDTH)}\n\n{READING}"


def complaint(schedule: Schedule) -> str:
    """Return the textbook's error for an order. Raises AssertionError if there is none."""
    try:
        validate.validate(schedule)
    except validate.ScheduleError as error:
        sentence, _, table = str(error).partition("\n")
        return indent(f"{fill(sentence, WIDTH - 2)}\n{table}", "  ")
    raise AssertionError("reference/schedules/validate.py finds nothing wrong with the order that has just deadlocked")


if __name__ == "__main__":
    run_demo(show)
