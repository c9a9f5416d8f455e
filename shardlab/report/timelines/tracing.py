"""Steps that a rank traces. With --trace the last become a file for a trace viewer, and the very last a picture."""
from collections import deque
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from mpi_impl.comm.clock import Clock, VirtualClock
from mpi_impl.comm.topology import Topology
from mpi_impl.comm.trace import Slice
from reference.schedules.actions import Schedule
from reference.schedules.simulate import simulate
from shardlab.report.timelines.timelines import measured_times, slices_of

KEPT = 10       # steps
TRACE, TIMELINE = "trace.json", "timeline.png"


class TracedSteps:
    """A rank's slices of the last steps. All ranks call its methods together."""

    def __init__(self, topology: Topology, clock: Clock | None = None):
        """Begin on the run's clock, or on another one, which replaces it while a step is traced."""
        self.topology, self.trace = topology, topology.world.trace
        self.clock = clock or self.trace.clock
        self.steps: deque[list[Slice]] = deque(maxlen=KEPT)
        topology.world.allgather_objects(None)       # all clocks start together
        self.clock.restart()

    @contextmanager
    def step(self):
        """Trace the body of a `with` block."""
        self.meet()
        runs, self.trace.clock, self.trace.recording = self.trace.clock, self.clock, True
        try:
            yield
        finally:
            self.trace.clock, self.trace.recording = runs, False
        self.steps.append(list(self.trace.slices))
        self.trace.slices.clear()

    def meet(self) -> None:
        """Wait for all ranks between steps, where one of them may do more, so that a step begins at one time."""
        if isinstance(self.clock, VirtualClock):
            self.clock.reach(max(self.topology.world.allgather_objects(self.clock.now())))

    def write(self, folder: str, schedule: Schedule, message_bytes: int) -> None:
        """Write trace.json, of all ranks, and timeline.png, of rank 0's pipeline.

        `message_bytes` is the size of a message from one rank to the next stage.
        """
        everyone = self.topology.world.allgather_objects(list(self.steps))
        pipeline = self.topology.pipeline.allgather_objects(list(self.steps))
        if self.topology.world.rank == 0:
            from shardlab.report.timelines.chrome_trace import write_chrome_trace
            from shardlab.report.timelines.gantt import Panel, draw_timelines  # matplotlib takes a second to import

            write_chrome_trace(str(Path(folder, TRACE)), [list(chain(*steps)) for steps in everyone])
            clock = self.clock
            sending = clock.link.seconds("send", 2, message_bytes) if isinstance(clock, VirtualClock) else 0.0
            predicted = simulate(schedule, measured_times(pipeline, schedule, sending))
            draw_timelines(str(Path(folder, TIMELINE)), [
                Panel("measured, last step", [steps[-1] for steps in pipeline]),
                Panel(f"predicted from the medians of the last {len(self.steps)} steps", slices_of(predicted))])
