"""A picture of the best plans next to one another: the use of a device's memory, and the time of a step."""
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reference.config.description import describe_savings, describe_sizes
from shardlab.plan.candidates import PlanSearch, Timed
from shardlab.report.charts import MEMORY, finish

TIME = {"products": "#0072B2", "kernels": "#56B4E9", "messages": "#EE7733", "context": "#009E73",
        "experts": "#882255", "idle": "#D8D8D8", "replicas": "#AA4499", "optimizer": "#F0C842"}
LABELS = {"products": "matrix products", "kernels": "other kernels", "messages": "tensor parallel messages",
          "context": "context parallel messages", "experts": "experts' messages", "idle": "idle",
          "replicas": "replicas' messages", "optimizer": "optimizer"}


def draw_plans(job: PlanSearch, best: Sequence[Timed], title: str) -> Figure:
    """Draw a row for each plan, the fastest on top."""
    figure = Figure((11, 0.62 * len(best) + 1.9), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    for y, one in enumerate(best):
        needs = job.needs(one.plan)._asdict()
        stack(memory, y, [(part / 1e9, MEMORY[name]) for name, part in needs.items()], "{:,.3g} GB")
        stack(time, y, [(part, TIME[name]) for name, part in one.time._asdict().items()], "{:,.3g} s")
    memory.axvline(job.memory / 1e9, color="#505050", linestyle="--", linewidth=1)
    memory.set(yticks=range(len(best)), yticklabels=[label(one) for one in best], ylim=(len(best) - 0.5, -0.5),
               xlim=(0, 1.12 * job.memory / 1e9))
    time.set(xlim=(0, 1.12 * max(one.seconds for one in best)))
    finish(memory, "GB on the fullest device; dashed: what a model gets", "memory", "x")
    finish(time, "seconds of a step, on the busiest device", "time", "x")
    for axes, names in ((memory, {name: MEMORY[name] for name in best[0].plan.memory._fields}),
                        (time, {LABELS[name]: color for name, color in TIME.items()
                                if any(getattr(one.time, name) for one in best)})):
        axes.legend(handles=[Patch(color=color, label=name) for name, color in names.items()], loc="upper left",
                    bbox_to_anchor=(0, -0.32 if len(best) < 4 else -0.2), ncols=3, frameon=False, fontsize=8,
                    handlelength=1.2, columnspacing=1.2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def stack(axes, y: int, parts: Sequence[tuple[float, str]], annotation: str) -> None:
    """Draw a bar of parts, with their sum next to it."""
    left = 0.0
    for size, color in parts:
        axes.barh(y, size, 0.66, left, color=color)
        left += size
    axes.annotate(annotation.format(left), (left, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})


def label(one: Timed) -> str:
    """Return a plan's label, in two lines."""
    p = one.plan.parallel
    saved = describe_savings(p).replace("sequence", "seq.")
    return f"{describe_sizes(p)}, b {one.plan.b}\n{saved or 'nothing saved'}"
