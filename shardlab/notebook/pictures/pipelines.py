"""Pictures of pipeline schedules: the actions of each rank over time, and the activations that it holds."""
from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator, PercentFormatter

from reference.costs.bubbles import bubble_fraction
from reference.schedules.actions import Schedule
from reference.schedules.generators import make
from reference.schedules.simulate import Span, Timeline, Times, simulate
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture, described, draw_legend, one_panel, several_panels
from shardlab.report.timelines.gantt import Panel, timelines_figure
from shardlab.report.timelines.timelines import slices_of


def play(schedule: Schedule) -> Timeline:
    """Simulate with F = I = W = 1 for all layers of a rank, divided by its number of stages. B is I and W."""
    each = schedule.p / schedule.stages
    return simulate(schedule, Times(each, each, each))


def draw_schedules(schedules: Mapping[str, Schedule]) -> Picture:
    """Draw timelines one above the other, on one time axis."""
    return timelines_figure([Panel(name, slices_of(play(schedule))) for name, schedule in schedules.items()],
                            seconds=False)


def draw_bubbles(name: str, ps: Sequence[int], ms: Sequence[int]) -> Picture:
    """Draw idle / ideal time over the number of microbatches: dots from simulation, lines from the formula (p - 1)/m.
    """
    figure, axes = one_panel(8.5, 3.4)
    for color, p in zip(OWNERS, ps):
        axes.plot(ms, [bubble_fraction(p, m) for m in ms], color=color, linewidth=1.5)
        axes.plot(ms, [play(make(name, p, m)).bubble_fraction for m in ms], "o", color=color, label=f"p = {p}")
        axes.annotate(f"p = {p}", (ms[-1], bubble_fraction(p, ms[-1])), (8, 0), textcoords="offset points", va="center",
                      fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ms, [str(m) for m in ms])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    finish(axes, "microbatches m", f"The bubble of {name}: dots as simulated, lines (p - 1)/m", "both",
           "idle / ideal time")
    return described(figure, f"Idle / ideal time of {name}, from m = {ms[0]} to {ms[-1]}, falls as (p - 1)/m, as "
                     "simulated. ", (
        f"p = {p}: from {bubble_fraction(p, ms[0]):.3g} to {bubble_fraction(p, ms[-1]):.3g}" for p in ps))


def held(spans: tuple[Span, ...]) -> tuple[list[float], list[int]]:
    """Return times, and the number of forwards whose activations a rank holds from each time on.

    It holds them from the start of an F to the end of its B or W.
    """
    change: Counter[float] = Counter()
    for action, start, end in spans:
        change[start if action.kind == "F" else end] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
    times, counts = sorted(change), [0]
    for time in times:
        counts.append(counts[-1] + change[time])
    return times, counts[1:]


def draw_held(schedules: Mapping[str, Schedule]) -> Picture:
    """Draw a row for each rank: its activations over time under each schedule, in units of all of a rank's layers."""
    timelines = [play(schedule).ranks for schedule in schedules.values()]
    p = max(map(len, timelines))
    figure, panels = several_panels(8.5, 0.62 * p + 1.25, p, sharex=True, sharey=True)
    words = []
    for rank, axes in enumerate(panels):
        most = []
        for color, schedule, ranks in zip(OWNERS, schedules.values(), timelines):
            if rank < len(ranks):
                times, counts = held(ranks[rank])
                levels = [schedule.p / schedule.stages * n for n in counts]
                axes.fill_between(times, levels, step="post", color=color, alpha=0.35, linewidth=0)
                axes.step(times, levels, where="post", color=color, linewidth=1.5)
                most.append(f"{max(levels):g}")
        axes.text(1.0, 0.5, f"at most {', '.join(most)}", transform=axes.transAxes, fontsize=9, va="center")
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        axes.set_ylim(bottom=0)
        finish(axes, "time" if rank == p - 1 else "", "", "y")
        axes.set_ylabel(f"rank {rank}", fontsize=9, rotation=0, ha="right", va="center")
        words.append(f"rank {rank}: at most {', '.join(most)}")
    draw_legend(figure, {name: {"color": color, "alpha": 0.6} for color, name in zip(OWNERS, schedules)},
                "outside upper left", fontsize=9, title="microbatches whose activations a rank holds",
                title_fontsize=10, alignment="left")
    return described(figure, f"Microbatches whose activations a rank holds over time, {', '.join(schedules)}. ", words)
