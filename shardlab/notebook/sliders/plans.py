"""The sliders of a plan: what the fullest rank holds, what it sends, and how long it idles."""
from collections.abc import Callable
from itertools import product
from typing import Any

from reference.costs.memory import most_in_flight
from reference.costs.plans import HALF, Plan
from reference.costs.volumes import data_parallel_traffic
from reference.errors import UserError
from reference.parallel.model_states import model_states
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.notebook.plan import MODELS, plan
from shardlab.notebook.sliders.page import Sliders
from shardlab.report.charts import MEMORY

POWERS = [1, 2, 4, 8, 16, 32, 64]
CONTROLS: dict[str, list[Any]] = {
    "model": list(MODELS), "t": POWERS[:4], "p": POWERS, "d": POWERS, "v": [1, 2, 3, 4], "m": POWERS,
    "zero_stage": [0, 1, 2, 3], "sequence_parallel": [False, True]}
START: dict[str, Any] = {"model": "18.4B", "t": 8, "p": 1, "d": 4, "v": 1, "m": 8, "zero_stage": 0,
                         "sequence_parallel": False}
A_PARAMETER = 2     # bytes of a parameter


def explore(**start) -> Sliders:
    """Show the sliders and the picture of a plan. `start` sets other initial values, as in explore(t=8, p=4)."""
    return Sliders("plan", CONTROLS, START | start, lambda: {
        "ranks": tabulate(rank_costs, "model", "t", "p", "v", "sequence_parallel"),
        "pipelines": tabulate(pipeline_costs, "p", "v", "m"),
        "states": tabulate(state_bytes, "zero_stage", "d"),
        "gradients": tabulate(gradient_bytes, "zero_stage", "d", "m"),
        "colors": {"memory": MEMORY, "messages": dict(zip(("tensor", "pipeline", "data"), OWNERS))}})


def tabulate(function: Callable, *names: str) -> dict:
    """Map each position of these sliders, as `8 2 1`, to the function's value there."""
    return {" ".join(str(int(value) if isinstance(value, bool) else value) for value in place): function(*place)
            for place in product(*(CONTROLS[name] for name in names))}


def state_bytes(stage: int, d: int) -> list[float]:
    """Return the bytes on a rank for each parameter: of the parameter, its gradient and its optimizer states."""
    return [float(f"{part:.6g}") for part in model_states(1, d, stage)]


def gradient_bytes(stage: int, d: int, m: int) -> float:
    """Return the bytes that a replica's rank sends in a step for each of its parameters."""
    return float(f"{HALF * data_parallel_traffic(1, d, stage, m):.6g}")


def rank_costs(model: str, t: int, p: int, v: int, sequence_parallel: bool) -> list[int] | str:
    """Return millions: of parameters, of bytes of activations for each stage cache in flight, and of other activations,
    on the first rank and on the last; then of bytes that the first sends for each microbatch, to its tensor and
    pipeline neighbours. Return a sentence where the layers do not suffice.
    """
    try:
        # Two numbers of microbatches with which the first rank has the fewest and the most in flight.
        plans = [plan(model, t, p, 1, v, m, 0, sequence_parallel) for m in ((1, p) if v == 1 else (p, 2 * p))]
    except UserError as error:
        return str(error)
    found = [number for rank in (0, p - 1) for number in held_by(plans, rank, v)]
    m, messages = plans[0].m, plans[0].messages
    return [round(size / 1e6) for size in (*found, messages.tensor / m, messages.pipeline / m)]


def held_by(plans: list[Plan], rank: int, v: int) -> tuple[float, float, float]:
    """Return a rank's parameters, and its activations as a straight line over the stage caches that are in flight."""
    p = plans[0].parallel
    (few, at_few), (many, at_many) = (
        (most_in_flight(p.pipeline_schedule, p.pipeline_model_parallel_size, each.m, rank, v),
         each.memory_of(rank).activations) for each in plans)
    slope = (at_many - at_few) / (many - few) if many > few else 0.0
    return plans[0].memory_of(rank).parameters / A_PARAMETER, slope, at_few - slope * few


def pipeline_costs(p: int, v: int, m: int) -> list[float] | str:
    """Return the stage caches in flight on the first rank and on the last, and idle / ideal time; or a sentence."""
    try:
        found = plan("1008.0B", 1, p, 1, v, m, 0) if p * v <= 128 else None
    except UserError as error:
        return str(error)
    if found is None:       # too many stages for any of the models: rank_costs says so
        return [0, 0, 0]
    name = found.parallel.pipeline_schedule
    return [*(most_in_flight(name, p, m, rank, v) for rank in (0, p - 1)),
            float(f"{found.timeline.bubble_fraction:.4g}")]
