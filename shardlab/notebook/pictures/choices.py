"""All ways to shard a model over n ranks: what each holds and about how long a step takes, and pictures of them.

The time is an estimate, from the papers' formulas and four numbers of a machine. Nothing is run.
"""
from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.colors import LinearSegmentedColormap

from reference.config import ModelConfig, ParallelConfig, Recompute, number_of_microbatches
from reference.costs.bubbles import bubble_fraction
from reference.costs.flops import iteration_flops
from reference.costs.plans import Plan
from reference.errors import UserError
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.report.drawing import Picture, described, draw_box, draw_legend, hide_frame, name_rows, one_panel, write

SHADES = LinearSegmentedColormap.from_list("blues", ["#EAF3FA", OWNERS[0]])
TOO_MUCH, BEST = "#D0D0D0", OWNERS[1]
MOST_T = 8      # the GPUs of a server


class Machine(NamedTuple):
    """The speed of a GPU, and of its links."""

    flops: float      # FLOP/s, of matrix products
    inside: float     # bytes/s to GPUs of the same server
    outside: float    # bytes/s to others, through its own adapter
    server: int       # GPUs in a server


class Seconds(NamedTuple):
    """The parts of a step's time, without overlap."""

    compute: float
    tensor: float      # messages
    bubble: float
    pipeline: float    # messages
    data: float


def seconds(plan: Plan, machine: Machine) -> Seconds:
    """Estimate a step. A group's messages are as fast as its slowest link. Ranks are numbered t first, then d, then p.
    """
    c, p = plan.model, plan.parallel
    t, d = p.tensor_model_parallel_size, p.data_parallel_size
    flops = iteration_flops(c, plan.m * plan.b * d, c.max_position_embeddings, p.recompute.granularity)
    compute = flops / (p.world_size * machine.flops)

    def sent(size: float, span: int) -> float:
        """Return the seconds that a group takes whose ranks' numbers lie within `span` of one another."""
        return size / (machine.inside if span <= machine.server else machine.outside)

    tensor = sent(plan.messages.tensor, t)
    return Seconds(compute, tensor, idle(plan) * (compute + tensor), sent(plan.messages.pipeline, p.world_size),
                   sent(plan.messages.data, t * d))


def choices(model: ModelConfig, n: int, B: int, b: int = 1, recompute: str = "none",
            zero_stage: int = 0) -> dict[tuple[int, int], Plan | None]:
    """Return by (t, p), powers of two, the plan with d = n/(t p) replicas and a batch of B; None if it does not divide.
    """
    plans: dict[tuple[int, int], Plan | None] = {}
    powers = [2**i for i in range(n.bit_length())]
    for t, p in ((t, p) for t in powers if t <= MOST_T for p in powers if t * p <= n):
        try:
            parallel = ParallelConfig.for_world(n, t, p, recompute=Recompute(recompute), zero_stage=zero_stage,
                                                sequence_parallel=t > 1)
            plans[t, p] = Plan(model, parallel, number_of_microbatches(B, b, parallel.data_parallel_size), b)
        except UserError:
            plans[t, p] = None
    return plans


def gigabytes(plan: Plan) -> float:
    """Return the GB that the fullest rank holds."""
    return sum(plan.memory) / 1e9


def idle(plan: Plan) -> float:
    """Return the pipeline's bubble, as a fraction of the ideal time."""
    p = plan.parallel
    return bubble_fraction(p.pipeline_model_parallel_size, plan.m, p.virtual_pipeline_size or 1)


def draw_choices(found: Mapping[tuple[int, int], Plan | None], limit: float, title: str) -> Picture:
    """Draw a map of t and p with GB and bubble of each, grey and hatched if it does not fit into `limit` GB.

    The frame marks the plan that fits with the smallest t x p, and among those the one with the smallest bubble.
    """
    ts, ps = (sorted(set(sizes)) for sizes in zip(*found))
    figure, axes = one_panel(1.9 + 1.25 * len(ts), 1.3 + 0.56 * len(ps), xlabel="t", ylabel="p")
    fitting = {at: plan for at, plan in found.items() if plan and gigabytes(plan) <= limit}
    best = min(fitting, key=lambda at: (at[0] * at[1], idle(fitting[at])), default=None)
    words = []
    for (t, p), plan in found.items():
        x, y = ts.index(t), ps.index(p)
        if plan is None:
            write(axes, x + 0.5, y + 0.5, "not possible", size=7.5, color="#606060")
        else:
            held, fits = gigabytes(plan), (t, p) in fitting
            color = "white" if fits and held / limit > 0.6 else "black"
            draw_box(axes, x + 0.02, y + 0.03, 0.96, 0.94, SHADES(held / limit) if fits else TOO_MUCH,
                     edgecolor="white", linewidth=0, hatch=None if fits else "////")
            write(axes, x + 0.5, y + 0.37, f"{held:,.0f} GB", size=10, color=color)
            write(axes, x + 0.5, y + 0.72, f"bubble {idle(plan):.0%}", size=7.5, color=color)
        if (t, p) == best:
            draw_box(axes, x + 0.04, y + 0.06, 0.92, 0.88, "none", edgecolor=BEST, linewidth=3)
        words.append(f"t = {t}, p = {p}: " + (
            f"{gigabytes(plan):,.0f} GB, bubble {idle(plan):.0%}" if plan else "not possible"))
    axes.set(xlim=(0, len(ts)), xticks=[x + 0.5 for x in range(len(ts))], xticklabels=ts)
    name_rows(axes, ps)
    hide_frame(axes)
    axes.set_title(title, loc="left", fontsize=11)
    draw_legend(figure, {f"fits into {limit:g} GB": {"facecolor": SHADES(0.5)},
                         "does not": {"facecolor": TOO_MUCH, "hatch": "////", "edgecolor": "white"},
                         "smallest t x p that fits": {"fill": False, "edgecolor": BEST, "linewidth": 2}})
    chosen = f"The smallest t x p that fits into {limit:g} GB is t = {best[0]}, p = {best[1]}" if best else "None fits"
    return described(figure, f"{title}: a map of t and p. {'; '.join(words)}. {chosen}")
