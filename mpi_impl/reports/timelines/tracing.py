"""--trace: the last steps of a run as a file for a trace viewer, and the very last one drawn beside its prediction."""
from collections import deque
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from mpi_impl.comm.clock import VirtualClock
from mpi_impl.comm.topology import Topology
from mpi_impl.comm.trace import Slice
from mpi_impl.reports.timelines.timelines import measured_times, slices_of
from reference.schedules.actions import Schedule
from reference.schedules.simulate import simulate

KEPT = 10       # steps
TRACE, TIMELINE = "trace.json", "timeline.png"


class TracedSteps:
    """Keeps a rank's slices of the last steps. Its methods are called by all ranks together."""

    def __init__(self, topology: Topology):
        self.topology, self.trace = topology, topology.world.trace
        self.steps: deque[list[Slice]] = deque(maxlen=KEPT)
        topology.world.allgather_objects(None)       # all clocks start together
        self.trace.clock.restart()

    @contextmanager
    def step(self):
        """What happens inside the `with` block is traced."""
        self.meet()
        self.trace.recording = True
        yield
        self.trace.recording = False
        self.steps.append(list(self.trace.slices))
        self.trace.slices.clear()

    def meet(self) -> None:
        """Between steps ranks do what is no part of one, and one of them may do more: a step begins at one time."""
        clock = self.trace.clock
        if isinstance(clock, VirtualClock):
            clock.reach(max(self.topology.world.allgather_objects(clock.now())))

    def write(self, folder: str, schedule: Schedule, message_bytes: int) -> None:
        """Write trace.json, of all ranks, and timeline.png, of rank 0's pipeline.

        `message_bytes`: of what one rank sends from stage to stage.
        """
        everyone = self.topology.world.allgather_objects(list(self.steps))
        pipeline = self.topology.pipeline.allgather_objects(list(self.steps))
        if self.topology.world.rank == 0:
            from mpi_impl.reports.timelines.chrome_trace import write_chrome_trace
            from mpi_impl.reports.timelines.gantt import Panel, draw_timelines  # matplotlib takes a second to import

            write_chrome_trace(str(Path(folder, TRACE)), [list(chain(*steps)) for steps in everyone])
            clock = self.trace.clock
            sending = clock.link.seconds("send", 2, message_bytes) if isinstance(clock, VirtualClock) else 0.0
            predicted = simulate(schedule, measured_times(pipeline, schedule, sending))
            draw_timelines(str(Path(folder, TIMELINE)), [
                Panel("measured, last step", [steps[-1] for steps in pipeline]),
                Panel(f"predicted from the medians of the last {len(self.steps)} steps", slices_of(predicted))])
