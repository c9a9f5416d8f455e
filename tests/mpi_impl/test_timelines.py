"""Timelines of runs and of schedules: traced, written for a viewer, drawn; --trace and plot_schedule."""
import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.clock import VirtualClock, WallClock
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.comm.trace import Slice, Trace
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.parallel.stages import schedule_of
from reference.precision import Precision
from reference.schedules.actions import to_csv
from reference.schedules.generators import make
from reference.schedules.simulate import Times, activations_in_flight, simulate
from shardlab.plot_schedule import main
from shardlab.report.timelines import gantt
from shardlab.report.timelines.chrome_trace import complete_events, write_chrome_trace
from shardlab.report.timelines.gantt import COLORS, cells_of, shade
from shardlab.report.timelines.timelines import measured_times, slices_of, timeline_of
from shardlab.report.timelines.tracing import KEPT, TracedSteps
from tests.launching import command
from tests.reference.test_schedules import schedules
from tests.training_theorems import connected

TIME = st.floats(0.1, 10)


# ---- the picture ----------------------------------------------------------------------------------------------------


@given(schedules(most=4), TIME, TIME, st.floats(0, 3))
def test_every_action_has_its_rectangle(schedule, forward, weight_gradient, communication):
    """One each, in its rank's row, over its own time, in the colour of its kind, with its microbatch; none overlap. And
    slices give back the timeline.
    """
    timeline = simulate(schedule, Times(forward, 1.0, weight_gradient, communication))
    assert timeline_of(slices_of(timeline)) == timeline
    cells, placement = cells_of(slices_of(timeline), scale=2.0), schedule.placement()
    spans = [(rank, span) for rank, own in enumerate(timeline.ranks) for span in own]
    for cell, (rank, (action, start, end)) in zip(cells, spans, strict=True):
        stages = placement[rank]
        assert (cell.start, cell.end, cell.label) == (2 * start, 2 * end, str(action.microbatch))
        assert rank < cell.top < cell.bottom < rank + 1
        assert cell.color == shade(COLORS[action.kind], stages.index(action.stage), len(stages))
    assert all(one.top != other.top or one.end <= other.start for one, other in zip(cells, cells[1:]))


# ---- a file for a viewer --------------------------------------------------------------------------------------------


@given(schedules(most=4), st.integers(0, 10**9))
def test_every_slice_comes_back(tmp_path, schedule, start):
    """Ranks are processes and streams are threads: named, computing above communication; no number is 0, and no thread
    has another rank's number. An action has its stage and microbatch.
    """
    ranks = [[s._replace(start=s.start + start, end=s.end + start) for s in own]
             for own in slices_of(simulate(schedule, Times()))]
    for i, own in enumerate(ranks):
        own.insert(0, Slice("communication", "wait", "communication", start, start + i))
    write_chrome_trace(str(tmp_path / "trace.json"), ranks)
    names, back = defaultdict(list), defaultdict(list)
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        where = event["pid"], event.get("tid")
        if event["ph"] == "M":
            names[where] += event["args"].values()
        else:
            assert event["cat"] not in "FBIW" or event["name"] == "{stage}{cat}{microbatch}".format(**event,
                                                                                                    **event["args"])
            back[where].append((event["name"], event["cat"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    for r, own in enumerate(ranks):
        assert names[r + 1, None] == [f"rank {r}", r]
        for i, stream in enumerate(("compute", "communication")):
            where = r + 1, r + 1 + i * len(ranks)
            assert names[where] == [stream, i]
            assert sorted(back[where]) == sorted((s.name, s.kind, s.start, s.end) for s in own if s.stream == stream)


def test_slices_of_a_stream_must_not_overlap(tmp_path):
    """A viewer would draw one of them wrong. The sentence says which rank, and which two; nothing is written."""
    two = [Slice("compute", "1F0", "F", 0.0, 1.0), Slice("compute", "1B0", "B", 0.999, 2.0)]
    with pytest.raises(ValueError, match="Rank 1: 1F0 and 1B0 overlap"):
        write_chrome_trace(str(tmp_path / "trace.json"), [[], two])
    assert not (tmp_path / "trace.json").exists()


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=50), st.floats(0, 1e5))
def test_rounding_is_no_overlap_and_makes_none(lengths, start):
    """Slices that touch, but for rounding, touch or stand apart in the file, to the nanosecond."""
    slices = []
    for i, length in enumerate(lengths):
        slices.append(Slice("compute", f"0F{i}", "F", start * (1 - 2**-53), start + length))
        start += length
    events = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in complete_events(slices, 0)]
    assert len(events) == len(slices)
    assert all(ts + dur <= following for (ts, dur), (following, _) in zip(events, events[1:]))


# ---- --trace --------------------------------------------------------------------------------------------------------

MICROBATCHES = 4


@given(schedules(most=4), st.data())
def test_times_are_read_off_a_timeline(schedule, data):
    """They are medians over two steps, by stage; an undivided backward gives the sum of I and W."""
    by_stage = st.lists(TIME, min_size=schedule.stages, max_size=schedule.stages)
    given_times = Times(data.draw(by_stage), data.draw(by_stage), data.draw(by_stage), 0.5)
    actions = {action for actions in schedule.ranks for action in actions}
    if {action.kind for action in actions} != {"F"}:
        found = measured_times([[own, own] for own in slices_of(simulate(schedule, given_times))], schedule, 0.5)
        assert found.communication == 0.5
        assert all(found.of(action) == pytest.approx(given_times.of(action)) for action in actions)


@pytest.mark.parametrize("clock, t, p, d, steps", [(VirtualClock, 1, 2, 2, 2), (WallClock, 1, 4, 1, KEPT + 2)])
def test_the_last_steps_of_all_ranks_are_written(ranks, tmp_path, clock, t, p, d, steps):
    """A process for each rank, and in it every action of the last steps, once a step; and a picture."""
    ranks.run(t * p * d, trace_steps, str(tmp_path), clock, t, p, steps)
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(t * p * d):
        names = Counter(event["name"] for event in events if event["pid"] == rank + 1 and event["cat"] in "FB")
        assert names == {f"{rank // (t * d)}{kind}{i}": min(steps, KEPT)
                         for kind in "FB" for i in range(MICROBATCHES)}
    updates = [event for event in events if event["name"] == "optimizer" and event["cat"] == "other"]
    assert len(updates) == t * p * d * min(steps, KEPT)
    assert all(event["tid"] == event["pid"] for event in updates), "the stream of computation is the first of each rank"
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def trace_steps(group, folder, clock, t, p, steps):
    """Run some steps of a small GPT, and after each an evaluation, which belongs to no step."""
    watched = Group(group.comm, "world", Instruments(trace=Trace(clock(), recording=True)))
    tokens = np.arange(16).reshape(2, 8)
    with connected(watched, ParallelConfig.for_world(group.size, t, p)) as topology:
        trainer = Trainer(ModelState(ModelConfig(4, 8, 2, 16, 8), topology, 1, Precision("float32")),
                          OptimizerConfig(1e-3, 10))
        batch = [GPTBatch(tokens, tokens)] * MICROBATCHES, 2 * MICROBATCHES * topology.data.size
        traced_steps = TracedSteps(topology)
        for _ in range(steps):
            with traced_steps.step():
                trainer.step(*batch)
            trainer.evaluate(*batch)
        traced_steps.write(folder, schedule_of(topology.config, MICROBATCHES), 1024)


def test_a_step_begins_at_one_time_by_its_own_clock(ranks):
    """However long a rank has been busy with something else: checking it, for instance. After the step the run has its
    clock again, and carries no time stamps.
    """
    starts, traced = zip(*ranks.run(3, clocks_of_steps))
    assert starts[0][0] >= 100 and starts == (starts[0],) * 3 and traced == (["a sum"],) * 3


def clocks_of_steps(group):
    """Return when two steps start, and what was traced in the last."""
    clock, watched, starts = VirtualClock(times=Times()), Group(group.comm, "world", Instruments()), []
    with connected(watched, ParallelConfig(pipeline_model_parallel_size=3)) as topology:
        traced = TracedSteps(topology, clock)
        for _ in range(2):
            clock.reach(clock.now() + 100 * (group.rank == 0))
            with traced.step():
                starts.append(clock.now())
                assert watched.trace.clock is clock
                topology.pipeline.all_reduce(np.ones(1), "a sum")
        assert watched.trace.clock is not clock
        topology.pipeline.all_reduce(np.ones(1), "another sum")
    return starts, [one.name for one in traced.steps[-1]]


# ---- plot_schedule --------------------------------------------------------------------------------------------------


def test_the_printed_numbers_are_the_simulators(tmp_path, monkeypatch, capsys):
    """By hand: each of a rank's v stages takes 1/v of the rank's time. A schedule from a file is drawn below the named
    ones; an empty last line is not a rank. The panels show those timelines.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text(to_csv(make("1f1b", 3, 6)) + "\n\n")
    panels = []
    monkeypatch.setattr(gantt, "draw_timelines", lambda path, drawn, seconds: panels.extend(drawn))
    main("--schedule 1f1b --schedule interleaved -p 3 -m 6 -v 2 --csv mine.csv --forward 4 --input-gradient 5 "
         "--weight-gradient 3 --communication 0.25 --output picture.png".split())
    *lines, last = capsys.readouterr().out.splitlines()
    plain, chunks = (make("1f1b", 3, 6), Times(4, 5, 3, 0.25)), (make("interleaved", 3, 6, 2), Times(2, 2.5, 1.5, 0.25))
    for line, panel, name, (schedule, given_times) in zip(
            lines, panels, ("1f1b, p = 3, m = 6", "interleaved, p = 3, m = 6, v = 2", "mine.csv, p = 3, m = 6"),
            (plain, chunks, plain), strict=True):
        timeline = simulate(schedule, given_times)
        assert line.startswith(f"{name}: makespan {timeline.makespan:.4g}, bubble {timeline.bubble_fraction:.4g} (")
        assert line.endswith(f"in flight {' '.join(map(str, activations_in_flight(schedule)))}")
        assert panel == (name, slices_of(timeline))
    assert last == "schedules drawn in picture.png"


def test_the_program(tmp_path):
    """A process of its own, without MPI."""
    program = ("-c", "import runpy, sys; sys.modules['mpi4py'] = None\n"
                     "runpy.run_module('shardlab.plot_schedule', None, '__main__')")
    done = command(*program, "-p", "2", "-m", "2", "--output", tmp_path / "picture.png")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1f1b, p = 2, m = 2: makespan 9,")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
