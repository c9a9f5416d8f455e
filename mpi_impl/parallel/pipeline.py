"""A pipeline's rank, which plays a schedule. There is one loop for all schedules: they differ as values.

Sends are posted, and released as soon as they are done; receives are posted a little before they are needed, and waited
for where they are needed. A message's tag says which result it is, so two are never confused: not with p = 2 and v > 1,
where a rank's neighbour before is also the one after, and not where a rank receives in another order than was sent.

With t > 1, all t ranks of a stage hold the same activation. So each of them sends 1/t of it to its counterpart, and the
receivers all-gather it, on the faster links inside a server (Narayanan et al. 2021, section 4.1: the scatter/gather
optimization).
"""
from collections import deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from mpi_impl.comm.group import Pending
from mpi_impl.comm.topology import Topology
from reference.errors import UserError
from reference.schedules.actions import Action, Receive, Schedule, Send, lower, needs, result

AHEAD = 2       # receives that are posted before they are waited for
PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}    # of the ledger
CONTENT = {"F": "activation", "B": "gradient"}                                  # what a result is


class Pipeline:
    """This rank's part of a schedule, which can be played any number of times."""

    def __init__(self, schedule: Schedule, topology: Topology):
        """List this rank's steps. Raises UserError if there are more messages than MPI has tags for."""
        self.group, self.tensor, self.stages = topology.pipeline, topology.tensor, schedule.stages
        self.scattered_parts = topology.config.scattered_parts
        self.steps = lower(schedule)[self.group.rank]
        if largest_tag(schedule) > self.group.largest_tag:
            raise UserError(f"{schedule.microbatches:,} microbatches through {self.stages} stages are more messages "
                            "than this MPI can tell apart. Choose a smaller --global-batch-size, or a larger "
                            "--micro-batch-size.")

    def play(self, compute: Mapping[str, Callable], like, shape, phases: Mapping[str, str] = PHASES) -> None:
        """Do all actions in order. `compute[kind](action, x)` does one: it takes what one stage has sent, and returns
        what is sent to another.

        Messages have this shape, which the number of pieces divides, and are arrays of the kind of `like`. `phases` are
        the ledger's, by kind.
        """
        self.like, self.shape = like, shape
        self.results: dict[Action | None, Any] = {}          # what has arrived, or waits to be sent or used
        self.unposted = iter([step for step in self.steps if isinstance(step, Receive)])
        self.posted, self.sent = deque[Pending](), list[Pending]()
        for _ in range(AHEAD):
            self.post_next()
        for step in self.steps:
            action = step if isinstance(step, Action) else step.action
            with self.group.ledger.phase(phases[action.kind]):
                match step:
                    case Action():
                        self.act(step, compute[step.kind])
                    case Send():
                        self.send(step)
                    case Receive():
                        self.receive(step)
        while self.sent:
            self.sent.pop().wait()

    def act(self, action: Action, function: Callable) -> None:
        """Do an action with what has arrived for it, and keep its result."""
        trace = self.group.trace
        x = self.results.pop(needs(action, self.stages), None)
        with trace.slice("compute", str(action), action.kind), trace.clock.computing(action):
            y = function(action, x)
        if y is not None:
            self.results[result(action)] = y
        self.sent = [pending for pending in self.sent if not pending.poll()]

    def send(self, step: Send) -> None:
        """Post the send of a result, or of this rank's piece of it."""
        y = self.results.pop(step.action).reshape(-1)
        if self.scattered_parts > 1:
            n = y.size // self.scattered_parts
            y = y[self.tensor.rank * n:(self.tensor.rank + 1) * n]
        self.sent.append(self.group.post_send(y, step.to, tag(step.action, self.stages), CONTENT[step.action.kind]))

    def receive(self, step: Receive) -> None:
        """Wait for a result, after posting the next receive."""
        self.post_next()
        x = self.posted.popleft().wait()
        if self.scattered_parts > 1:
            x = self.tensor.all_gather(x, 0, f"gathered {CONTENT[step.action.kind]}")
        self.results[step.action] = x.reshape(self.shape)

    def post_next(self) -> None:
        """Post the next receive, in the order in which they will be needed, if there is one left."""
        if (step := next(self.unposted, None)) is not None:
            piece = np.empty_like(self.like, shape=prod(self.shape) // self.scattered_parts)
            self.posted.append(self.group.post_receive(piece, step.source, tag(step.action, self.stages),
                                                       CONTENT[step.action.kind]))


def largest_tag(schedule: Schedule) -> int:
    """Return the tag of a step's last message."""
    return tag(Action(schedule.stages - 1, "F", schedule.microbatches - 1), schedule.stages)


def tag(action: Action, stages: int) -> int:
    """Return a number that no other result has."""
    return 2 * (action.microbatch * stages + action.stage) + (action.kind == "F")
