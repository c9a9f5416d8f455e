"""Plays a schedule on one rank of a pipeline. There is one loop for all schedules: they differ as values.

Sends are posted and waited for at the end; receives are posted a little before they are needed and waited for where
they are. A message's tag says which result it is, so two of them never cross: not with p = 2 and v > 1, where a rank's
neighbour before is also the one after, and not where a rank receives in another order than was sent.

With t > 1, all t ranks of a stage hold the same activation. So each of them sends 1/t of it to its counterpart, and the
receivers gather it from one another, on the faster links inside a server (Narayanan et al. 2021, section 4.1: the
scatter/gather optimization).
"""
from collections import deque
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from mpi_impl.comm.group import Pending
from mpi_impl.comm.topology import Topology
from reference.schedules import Action, Receive, Schedule, Send, lower, needs, result

AHEAD = 2       # receives that are posted before they are waited for
PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}    # of the ledger
CONTENT = {"F": "activation", "B": "gradient"}                                  # what a result is


class Pipeline:
    """This rank's part of a schedule, to be played as often as one likes."""

    def __init__(self, schedule: Schedule, topology: Topology):
        self.group, self.tensor, self.stages = topology.pipeline, topology.tensor, schedule.stages
        self.scatters = topology.config.scatter_gather_tensors_in_pipeline and topology.tensor.size > 1
        self.steps = lower(schedule)[self.group.rank]
        self.receives = [step for step in self.steps if isinstance(step, Receive)]

    def play(self, compute: Mapping[str, Callable], like, shape, phases: Mapping[str, str] = PHASES) -> None:
        """`compute[kind](action, x)` does an action; x is what a neighbouring stage gave it, its result is for another.

        What moves between ranks has this shape, which the tensor group's size divides, and is of the kind of `like`.
        `phases` are the ledger's, by kind.
        """
        self.like, self.shape = like, shape
        self.results: dict[Action | None, Any] = {}          # what has arrived, or waits to be sent or used
        self.coming, self.later = deque[Pending](), iter(self.receives)
        self.sent: list[Pending] = []
        for _ in range(AHEAD):
            self.post_next()
        handlers: dict[type, Callable] = {
            Action: lambda action: self.act(action, compute[action.kind]), Send: self.send, Receive: self.receive}
        for step in self.steps:
            kind = step.kind if isinstance(step, Action) else step.action.kind
            with self.group.ledger.phase(phases[kind]):
                handlers[type(step)](step)
        for pending in self.sent:
            pending.wait()

    def act(self, action: Action, function: Callable) -> None:
        trace = self.group.trace
        x = self.results.pop(needs(action, self.stages), None)
        with trace.slice("compute", str(action), action.kind), trace.clock.computing(action):
            y = function(action, x)
        if y is not None:
            self.results[result(action)] = y
        for pending in self.sent:
            pending.poll()

    def send(self, step: Send) -> None:
        y = self.results.pop(step.action).reshape(-1)
        if self.scatters:
            n = y.size // self.tensor.size
            y = y[self.tensor.rank * n:(self.tensor.rank + 1) * n]
        self.sent.append(self.group.post_send(y, step.to, self.tag(step.action), CONTENT[step.action.kind]))

    def receive(self, step: Receive) -> None:
        self.post_next()
        x = self.coming.popleft().wait()
        if self.scatters:
            x = self.tensor.all_gather(x, 0, f"gathered {CONTENT[step.action.kind]}")
        self.results[step.action] = x.reshape(self.shape)

    def post_next(self) -> None:
        """Post the next receive, in the order in which they will be needed, if there is one left."""
        if (step := next(self.later, None)) is not None:
            size = prod(self.shape) // (self.tensor.size if self.scatters else 1)
            piece = np.empty_like(self.like, shape=size)
            self.coming.append(self.group.post_receive(piece, step.source, self.tag(step.action),
                                                       CONTENT[step.action.kind]))

    def tag(self, action: Action) -> int:
        """A number of the result's own."""
        return 2 * (action.microbatch * self.stages + action.stage) + (action.kind == "F")
