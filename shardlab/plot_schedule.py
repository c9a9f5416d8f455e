"""A picture of pipeline schedules above one another, as the simulator plays them:

    python -m shardlab.plot_schedule --schedule 1f1b --schedule zb-h1 -p 4 -m 8 --output schedules.png

One process; it starts no ranks.
"""
from collections.abc import Sequence

from mpi_impl.launch.entry import run_alone
from mpi_impl.launch.option_fields import option_field, option_group, parse_given
from mpi_impl.runtime.files import read_text
from mpi_impl.runtime.outputs import check_outputs
from reference.config import option, require_not_negative
from reference.errors import UserError
from reference.schedules.actions import Schedule, from_csv
from reference.schedules.generators import SCHEDULES, make, takes_v
from reference.schedules.simulate import Timeline, Times, activations_in_flight, simulate
from reference.schedules.validate import validate
from shardlab.report.timelines.timelines import slices_of

LARGEST_CSV = 1 << 23      # bytes: of a schedule with as many actions as reference.schedules.generators lists


@option_group
class ScheduleOptions:
    """The schedules."""

    schedule: tuple[str, ...] = option_field(
        (), "may be given again, for another panel (default: 1f1b)", choices=SCHEDULES, repeated=True)
    p: int = option_field(4, "ranks, for every --schedule")
    m: int = option_field(8, "microbatches, for every --schedule")
    v: int | None = option_field(None, "stages on each rank, for every --schedule that lets you choose")
    csv: tuple[str, ...] = option_field(
        (), "draw the schedule in this file, which reference.schedules --csv may have printed", "F",
        repeated=True)


@option_group
class TimeOptions:
    """Their times."""

    forward: float = option_field(1.0, "time of the forward on all layers of a rank", "T")
    input_gradient: float = option_field(1.0, "time of the input gradient on all layers of a rank", "T")
    weight_gradient: float = option_field(1.0, "time of the weight gradient on all layers of a rank", "T")
    communication: float = option_field(0.0, "time that what is sent is under way (default: 0)", "T")


@option_group
class PlotOptions(ScheduleOptions, TimeOptions):
    """The output."""

    output: str = option_field("schedule.png", "the picture, a .png, .pdf or .svg", "F")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    schedules = [*named_schedules(options), *map(read_csv, options.csv)]
    check_outputs(options)
    names = [*options.schedule, *options.csv]
    timelines = [simulate(schedule, times(schedule, options)) for schedule in schedules]
    draw(options.output, [title(name, schedule) for name, schedule in zip(names, schedules)], timelines)
    for name, schedule, timeline in zip(names, schedules, timelines):
        print(summary(name, schedule, timeline))
    print(f"schedules drawn in {options.output}")


def parse_options(argv: Sequence[str] | None) -> PlotOptions:
    given = parse_given("shardlab.plot_schedule", "Draw pipeline schedules, say what they cost.", PlotOptions, argv)
    options = PlotOptions(**({} if "csv" in given else {"schedule": ("1f1b",)}) | given)
    for part in ("forward", "input_gradient", "weight_gradient"):
        if not 1e-9 <= (time := getattr(options, part)) <= 1e9:
            raise UserError(f"{option(part)} is {time:g}, but must be a time from 1e-9 to 1e9.")
    require_not_negative("communication", options.communication)
    return options


def named_schedules(options: PlotOptions) -> list[Schedule]:
    """Make the schedules asked for by name. Those that take -v get it; if none does, the first one says so."""
    choose = [name for name in options.schedule if takes_v(name)]
    return [make(name, options.p, options.m, options.v if name in choose or not choose else None)
            for name in options.schedule]


def read_csv(path: str) -> Schedule:
    """Read the schedule in a file. Raises UserError if it cannot be read or cannot run."""
    text = read_text(path, LARGEST_CSV).rstrip()
    try:
        schedule = from_csv(text)
    except UserError as error:
        raise UserError(f"--csv {path} holds no schedule. {error}") from error
    if not schedule.ranks or not all(schedule.ranks):
        raise UserError(f"--csv {path} has an empty line or none, but each line is a rank, with at least one action.")
    try:
        validate(schedule)
    except UserError as error:
        raise UserError(f"--csv {path} holds a schedule that cannot run. {error}") from error
    return schedule


def times(schedule: Schedule, options: TimeOptions) -> Times:
    """Return the times of stages: each takes an equal share of the time that its rank's layers take."""
    rank_of, placement = schedule.rank_of(), schedule.placement()
    shares = [1 / len(placement[rank_of[stage]]) for stage in range(schedule.stages)]
    forward, i, w = ([share * time for share in shares]
                     for time in (options.forward, options.input_gradient, options.weight_gradient))
    return Times(forward, i, w, options.communication)


def title(name: str, schedule: Schedule) -> str:
    """Return `1f1b, p = 4, m = 8`, with v where every rank has v > 1 stages."""
    stages = {len(stages) for stages in schedule.placement()}
    v = f", v = {max(stages)}" if len(stages) == 1 and max(stages) > 1 else ""
    return f"{name}, p = {schedule.p}, m = {schedule.microbatches}{v}"


def summary(name: str, schedule: Schedule, timeline: Timeline) -> str:
    """Tell in a line what a schedule costs."""
    return (f"{title(name, schedule)}: makespan {timeline.makespan:.4g}, bubble {timeline.bubble_fraction:.4g} (idle / "
            f"ideal time), stages' activations in flight {' '.join(map(str, activations_in_flight(schedule)))}")


def draw(path: str, names: list[str], timelines: list[Timeline]) -> None:
    from shardlab.report.timelines.gantt import Panel, draw_timelines  # matplotlib takes a second to import

    draw_timelines(path, [Panel(name, slices_of(t)) for name, t in zip(names, timelines)], seconds=False)


if __name__ == "__main__":
    run_alone(main)
