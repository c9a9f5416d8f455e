"""The language of pipeline schedules: actions, their durations, schedules as values, and transfers between ranks.

A model is divided into stages, numbered from the embedding to the loss. An action is one stage's work for one
microbatch, and prints as stage, kind, microbatch: `2F0` is stage 2's forward of microbatch 0. The kinds:

    F   forward                                       needs the stage before
    B   backward, all of it: I and W together         needs the stage after, and its own F
    I   the gradient of the input alone               needs the stage after, and its own F
    W   the gradients of the weights alone            needs its own I, and nobody waits for it

A schedule lists each rank's actions in order; the placement of stages on ranks follows from that. Transfers are not
listed: `lower` adds them.
"""
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from reference.errors import UserError

KINDS = "FBIW"


class Action(NamedTuple):
    """One stage's work for one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Parse `2F0` to Action(2, "F", 0). Raise UserError for anything else."""
    match = re.fullmatch(rf"([0-9]{{1,9}})([{KINDS}])([0-9]{{1,9}})", text.strip())
    if not match:
        raise UserError(f"{text.strip()[:40]!r} is not an action. An action is a stage, one of {', '.join(KINDS)}, and "
                        "a microbatch, as in 2F0.")
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order. Equal, hashable and printable, like any value."""

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def p(self) -> int:
        """Return the number of ranks in the pipeline."""
        return len(self.ranks)

    @cached_property
    def stages(self) -> int:
        return 1 + max((action.stage for rank in self.ranks for action in rank), default=-1)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for rank in self.ranks for action in rank), default=-1)

    def rank_of(self) -> dict[int, int]:
        """Map each stage to the rank that holds it."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each rank, the stages that it holds, ascending."""
        return tuple(tuple(sorted({action.stage for action in actions})) for actions in self.ranks)

    def __str__(self):
        """Format a row for each rank, actions in columns."""
        return table(self)


def table(schedule: Schedule, marked: Iterable[tuple[int, int]] = ()) -> str:
    """Format a row for each rank; `marked` cells, given as (rank, place), get angle brackets."""
    marked = set(marked)
    cells = [[f">{action}<" if (r, i) in marked else str(action) for i, action in enumerate(actions)]
             for r, actions in enumerate(schedule.ranks)]
    width = max((len(cell) for row in cells for cell in row), default=0)
    return "\n".join(f"rank {r}: " + " ".join(cell.rjust(width) for cell in row) for r, row in enumerate(cells))


def to_csv(schedule: Schedule) -> str:
    """Format a line for each rank, its actions separated by commas."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule.ranks)


def from_csv(text: str) -> Schedule:
    """Parse the output of to_csv. Raise UserError for a cell that is not an action."""
    return Schedule(tuple(tuple(parse_action(cell) for cell in line.split(",") if cell.strip())
                          for line in text.splitlines()))


# ---- durations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Durations, in any unit, of F, I and W (B takes I and W) and of sending. A number, or a sequence by stage."""

    forward: float | Sequence[float] = 1.0
    input_gradient: float | Sequence[float] = 1.0
    weight_gradient: float | Sequence[float] = 1.0
    communication: float = 0.0

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        forward, i, w = (at_stage(time, action.stage)
                         for time in (self.forward, self.input_gradient, self.weight_gradient))
        return {"F": forward, "B": i + w, "I": i, "W": w}[action.kind]


def at_stage(time: float | Sequence[float], stage: int) -> float:
    return time[stage] if isinstance(time, Sequence) else time


# ---- transfers between ranks ----------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A send of an action's result to another rank."""

    action: Action
    to: int

    def __str__(self):
        return f"{self.action}>{self.to}"


class Receive(NamedTuple):
    """A wait for an action's result from another rank."""

    action: Action
    source: int

    def __str__(self):
        return f"{self.action}<{self.source}"


Step = Action | Send | Receive


def needs(action: Action, stages: int) -> Action | None:
    """Return the action of a neighbouring stage that an action needs: an activation from before, a gradient from after.

    It also needs its own stage's F, and W its I: those come earlier in the rank's own list.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return Action(stage - 1, "F", microbatch) if stage > 0 else None
    if kind == "W" or stage == stages - 1:
        return None
    return Action(stage + 1, "B", microbatch)


def user_stage(action: Action, stages: int) -> int | None:
    """Return the stage that needs an action's result, if there is one: the inverse of `needs`."""
    stage, kind, _ = action
    if kind == "F":
        return stage + 1 if stage < stages - 1 else None
    return None if kind == "W" or stage == 0 else stage - 1


def lower(schedule: Schedule) -> list[list[Step]]:
    """Add transfers to each rank's actions: receives before the actions that need them, sends after their sources."""
    rank_of, stages = schedule.rank_of(), schedule.stages
    lowered: list[list[Step]] = []
    for r, actions in enumerate(schedule.ranks):
        steps: list[Step] = []
        for action in actions:
            need, user = needs(action, stages), user_stage(action, stages)
            if need is not None and rank_of[need.stage] != r:
                steps.append(Receive(need, rank_of[need.stage]))
            steps.append(action)
            if user is not None and rank_of[user] != r:
                steps.append(Send(result(action), rank_of[user]))
        lowered.append(steps)
    return lowered


def result(action: Action) -> Action:
    """Return the action under which others know a result: the gradient of a stage's input is its B, even from I."""
    return Action(action.stage, "B", action.microbatch) if action.kind == "I" else action
