"""The picture of a choice of t, p, d, v, m and a ZeRO stage: a rank's memory, traffic and idle time.

All numbers are the papers' formulas (reference/costs/plans.py); nothing is run.
"""

from reference.config import ParallelConfig
from reference.costs.parameters import parameters
from reference.costs.plans import Plan
from reference.costs.published import PTD_P
from reference.errors import UserError
from shardlab.notebook.pictures.shards import OWNERS, color_of
from shardlab.report.charts import COLORS, MEMORY, finish
from shardlab.report.drawing import Picture, described, draw_box, hide_frame, name_rows, several_panels

MOST = 16                   # stages that are drawn, twice as many as replicas; and numbers of ranks in a row
SHOWN_MICROBATCHES = 24     # more do not fit into the picture of a pipeline

MODELS = {f"{run.billions}B": run.model for run in PTD_P}


def plan(model: str, t: int, p: int, d: int, v: int, m: int, zero_stage: int, sequence_parallel: bool = False) -> Plan:
    """Make the plan from the sliders' values: v = 1 is 1F1B, larger v is interleaved. Raises UserError."""
    if v > 1 and p == 1:
        raise UserError("v is the number of stages on each rank of a pipeline, but with p = 1 there is no pipeline: "
                        "choose v = 1, or a larger p.")
    layers = MODELS[model].num_layers
    if p * v > layers:
        raise UserError(f"p = {p} times v = {v} is {p * v} stages, but the model has {layers} layers, and every stage "
                        "needs one: choose a smaller p or v, or a larger model.")
    parallel = ParallelConfig(t, p, d, "interleaved" if v > 1 else "1f1b", v if v > 1 else None, zero_stage=zero_stage,
                              sequence_parallel=sequence_parallel and t > 1)
    return Plan(MODELS[model], parallel, m)


# ---- the picture ----------------------------------------------------------------------------------------------------


def draw_plan(plan: Plan) -> Picture:
    """Draw the ranks' grid, a rank's memory, its traffic, and the pipeline's timeline."""
    figure, (grid, memory, time, traffic) = several_panels(10, 5.6, 2, 2, width_ratios=(1.15, 1))
    draw_grid(grid, plan.parallel)
    held, sent = plan.memory._asdict(), plan.messages._asdict()
    draw_bar(memory, held, MEMORY, f"the fullest rank holds {sum(held.values()) / 1e9:,.1f} GB", 80.0)
    memory.text(80, -0.52, " an A100 has 80 ", fontsize=8, ha="right", va="bottom", color="#505050")
    draw_time(time, plan)
    draw_bar(traffic, sent, dict(zip(sent, OWNERS)), f"and sends {sum(sent.values()) / 1e9:,.1f} GB a step", None)
    p, c = plan.parallel, plan.model
    figure.suptitle(f"{parameters(c) / 1e9:,.1f} billion parameters, L = {c.num_layers}, h = {c.hidden_size}, on "
                    f"{p.world_size:,} ranks; {plan.m * plan.b * p.data_parallel_size:,} samples a step", x=0.01,
                    ha="left", fontsize=11)
    return described(figure, f"{figure.get_suptitle()}. ", (
        ", ".join([axes.get_title(loc="left"), *axes.get_legend_handles_labels()[1]]) for axes in figure.axes))


def draw_grid(axes, p: ParallelConfig) -> None:
    """Draw a row for each replica, and in it a box for each stage with its t ranks. Of many, draw the first."""
    t, stages, d = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.data_parallel_size
    columns, rows = min(stages, MOST), min(d, MOST // 2)
    for row in range(rows):
        for column in range(columns):
            for i in range(t):
                number = f"{i + t * (row + d * column)}" if t * columns <= MOST else ""
                draw_box(axes, column + 0.06 + 0.88 * i / t, row + 0.1, 0.88 / t, 0.8, color_of(i), number, 8,
                         edgecolor="white", linewidth=0.5)
    axes.set(xlim=(0, columns), xticks=[i + 0.5 for i in range(columns)], xticklabels=range(columns))
    name_rows(axes, range(rows))
    shown = f" (of which {columns} x {rows} are shown)" if (columns, rows) != (stages, d) else ""
    axes.set_title(f"t = {t}, p = {stages}, d = {d}{shown}", loc="left", fontsize=10)
    axes.set_xlabel("stage of the pipeline; a colour for each tensor-parallel rank", fontsize=8)
    axes.set_ylabel("replica", fontsize=8)
    hide_frame(axes, 8)


def draw_bar(axes, parts: dict[str, float], colors, title: str, limit: float | None) -> None:
    """Draw one bar of GB, with each part named below."""
    left = 0.0
    for name, size in parts.items():
        axes.barh(0, size / 1e9, 0.7, left, color=colors[name], label=f"{name} {size / 1e9:,.2f}")
        left += size / 1e9
    if limit:
        axes.axvline(limit, color="#505050", linestyle="--", linewidth=1)
    axes.set(yticks=[], ylim=(0.8, -0.8), xlim=(0, max(left, limit or 0) * 1.08 or 1))
    finish(axes, "GB", "", "x")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.28), ncols=2, frameon=False, fontsize=8, handlelength=1.2)


def draw_time(axes, plan: Plan) -> None:
    """Draw the pipeline's timeline, if there is room for its microbatches, and its idle time."""
    ranks = plan.timeline.ranks
    bubble = f"the pipeline idles {plan.timeline.bubble_fraction:.1%} of its ideal time"
    axes.set_title(bubble if len(ranks) > 1 else "one stage: no pipeline, no bubble", loc="left", fontsize=10)
    shown = plan.m * len(ranks) <= SHOWN_MICROBATCHES * 16
    for row, spans in enumerate(ranks):
        for span in spans if shown else ():
            draw_box(axes, span.start, row + 0.08, span.end - span.start, 0.84, COLORS[span.action.kind],
                     edgecolor="white", linewidth=0.4)
    if not shown:
        axes.text(0.5, 0.5, "too many microbatches to draw", transform=axes.transAxes, ha="center", fontsize=9)
    axes.set(xlim=(0, plan.timeline.makespan), ylim=(len(ranks), 0), yticks=[])
    axes.set_facecolor("#F5F5F5")
    axes.set_xlabel("time; a rank's forward takes 1 (blue), its backward 2 (green)", fontsize=8)
    axes.set_ylabel("stage", fontsize=8)
    hide_frame(axes, 8, below=True)
