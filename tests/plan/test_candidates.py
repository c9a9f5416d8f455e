"""Every plan that a run could have is looked at, and no other; those that fit are ranked by their time; and where there
is none, a sentence says what would make one fit.
"""
import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import pytest
from hypothesis import Phase, given, settings, strategies as st

from reference.config import (RECOMPUTE, ParallelConfig, Recompute, check_model_fits, check_sequence_fits,
                              number_of_microbatches)
from reference.costs.memory import most_in_flight
from reference.costs.plans import Plan
from reference.costs.step_time import step_time
from reference.errors import UserError
from reference.parallel.stages import schedule_of, stages_of_ranks
from reference.precision import Precision
from shardlab.plan import candidates
from shardlab.plan.candidates import PlanSearch, check, divisors
from shardlab.plan.confirmation import predicted_bytes
from shardlab.predict.predict import predict_alone
from shardlab.predict.rank import ImaginedWorld
from tests.deep import one_fast_of
from tests.plan_cases import REAL, model_of, plans


@cache
def job(L: int, n: int, B: int, memory: float = REAL.memory, s: int = 16, a: int = 4) -> PlanSearch:
    """Return a search, which is cached, since its plans are."""
    return PlanSearch(model_of(L, a, s=s), n, B, replace(REAL, memory=memory))


@st.composite
def jobs(draw):
    """Draw small searches, of which at least one plan fits."""
    L, n, B = draw(st.integers(1, 7)), draw(st.sampled_from((1, 2, 4, 6, 8))), draw(st.sampled_from((4, 6, 8, 12)))
    found = job(L, n, B)
    sizes = sorted(sum(found.needs(plan)) for plan in found.plans)
    if not sizes:
        return job(4, 8, 8)
    return job(L, n, B, 1 + REAL.reserved + sizes[int(draw(st.sampled_from((0, 0.1, 0.5, 1))) * (len(sizes) - 1))])


# ---- which there are ------------------------------------------------------------------------------------------------


def possible(job: PlanSearch) -> set:
    """Return the combinations that the configuration, the model and the schedule accept."""
    found, c = set(), job.model
    for t, p, v, b in product(range(1, job.n + 1), range(1, job.n + 1), (None, 2, 3, 4, 5, 6, 7), range(1, job.B + 1)):
        try:
            parallel = ParallelConfig.for_world(job.n, t, p, pipeline_schedule="interleaved" if v else "1f1b",
                                                virtual_pipeline_size=v)
            m = number_of_microbatches(job.B, b, parallel.data_parallel_size)
            check_model_fits(c, parallel)
            stages_of_ranks(c, parallel)
            schedule_of(parallel, m)
        except UserError:
            continue
        if v and (p == 1 or c.num_layers % (p * v)):      # no pipeline, or uneven stages: left out on purpose
            continue
        for zero, cut, recompute in product(range(4), (False, True), RECOMPUTE):
            if zero and parallel.data_parallel_size == 1:
                continue
            try:
                whole = replace(parallel, zero_stage=zero, sequence_parallel=cut, recompute=Recompute(recompute))
                check_sequence_fits(c.max_position_embeddings, whole)
            except UserError:
                continue
            found.add(Plan(c, whole, m, b))
    return found


@pytest.mark.parametrize("L, n, B, s", [(4, 4, 4, 16), (6, 6, 6, 15), (7, 8, 8, 2)])
def test_every_plan_that_is_possible_is_there_once(L, n, B, s):
    plans = job(L, n, B, s=s).plans
    assert len(plans) == len(set(plans)) and set(plans) == possible(job(L, n, B, s=s))


def test_microbatches_are_not_larger_than_needed_nor_more_than_a_run_takes():
    assert {plan.b for plan in job(1, 1, 256).plans} == {1, 2, 4, 8, 16, 32, 64}
    forwards = [plan.m * plan.parallel.pipeline_model_parallel_size * (plan.parallel.virtual_pipeline_size or 1)
                for plan in job(4, 4, 6_000_000).plans]
    assert max(forwards) == 250_000


# ---- which fit, and which is the fastest ----------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(jobs())
def test_what_fits_is_ranked_by_its_time_and_nothing_else_is_dropped(job):
    room = job.hardware.memory - job.hardware.reserved
    fitting = {one.plan for one in job.fitting}
    assert fitting == {plan for plan in job.plans if sum(job.needs(plan)) <= room} and len(fitting) == len(job.fitting)
    times = [one.seconds for one in job.fitting]
    assert times == sorted(times)
    assert all(one.time == step_time(one.plan, job.hardware, closed_form=True) for one in job.fitting[::7])


@settings(max_examples=settings().max_examples // 2)
@given(jobs())
def test_the_best_are_the_fastest_of_each_shape_in_order(job):
    """Compared with a simulation of every plan that fits, the first may be 1 % slower, those of other shapes 25 %."""
    played = {one.plan: step_time(one.plan, job.hardware).total for one in job.fitting}
    seconds = [one.seconds for one in job.best]
    assert seconds == sorted(seconds)
    assert [one.seconds for one in job.best] == [played[one.plan] for one in job.best]
    assert seconds[0] <= min(played.values()) * 1.01
    shapes = [one.shape for one in job.best]
    assert len(set(shapes)) == len(shapes) == min(candidates.SIMULATED, len({one.shape for one in job.fitting}))
    for one in job.best:
        assert prod(one.shape) == job.n
        rivals = [time for plan, time in played.items() if candidates.shape_of(plan) == one.shape]
        assert one.seconds <= 1.25 * min(rivals)


# ---- what they hold, predicted --------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 3)
@given(jobs())
def test_no_plan_is_shown_that_does_not_fit(job):
    """Of those shown, every rank of a pipeline is predicted to fit; of each shape left out, its fastest is not."""
    job = replace(job, predict=predicted_bytes, shown=2)
    sizes = {one.plan: most_held(one.plan) for one in replace(job, predict=unknown, shown=6).best}
    for one in job.best:
        assert most_held(one.plan) <= job.memory
    missing = [plan for plan in sizes if candidates.shape_of(plan) not in {one.shape for one in job.best}]
    assert len(job.best) == 2 or all(sizes[plan] > job.memory for plan in missing)


def unknown(plan, hardware):
    return 0.0


def held_by_ranks(plan):
    """Predict every rank of a pipeline, in the whole of its step."""
    return [one.held for one in predict_alone(ImaginedWorld(
        plan.model, plan.parallel, Precision("float16"), plan.b, plan.positions, plan.m))]


def most_held(plan):
    return max(map(sum, held_by_ranks(plan)))


@settings(max_examples=settings().max_examples // 2, phases=[Phase.generate])
@given(plans(most_m=2))
def test_the_formula_of_a_plans_memory_is_a_bound(plan):
    """But for what the papers leave out: some numbers a position, inputs that are gathered and kept, what tensor
    parallelism leaves whole before and after the layers, what ZeRO has whole for a while, and its buckets' padding.
    """
    p, layers = plan.parallel, len(plan.layers)
    search = PlanSearch(plan.model, p.world_size, plan.m * plan.b * p.data_parallel_size, REAL)
    tokens = plan.b * plan.positions * most_in_flight(p.pipeline_schedule, p.pipeline_model_parallel_size, plan.m, 0,
                                                      p.virtual_pipeline_size or 1)
    positions = tokens * (8 * layers + 4 * 8)       # 1 / std of two norms; ids, and sums of the loss
    x = tokens * plan.model.hidden_size
    whole = 4 * x * layers * p.keep_gathered_inputs + (0 if p.sequence_parallel else 5 * x)
    padding = 18 * p.data_parallel_size * (layers + 3) * bool(p.zero_stage)
    for held in held_by_ranks(plan):
        assert sum(held) - held.gathered - held.unreduced <= sum(search.needs(plan)) + positions + whole + padding


# ---- where there is none --------------------------------------------------------------------------------------------


def said(job: PlanSearch) -> str:
    with pytest.raises(UserError) as found:
        check(job)
    return str(found.value)


@pytest.mark.parametrize("L, n, B", [(5, 11, 2), (4, 10**6, 5)])
def test_a_world_that_does_not_divide(L, n, B):
    """The three nearest products of a divisor of the heads, of layers, and of a divisor of the samples are named."""
    products = {t * p * d for t in (1, 3) for p in range(1, L + 1) for d in divisors(B)}
    near = sorted(sorted(products, key=lambda one: (abs(one - n), one))[:3])
    text = said(PlanSearch(model_of(L, a=3), n, B, REAL))
    assert f"--num-gpus is {n}, but" in text and f"The nearest possible numbers: {', '.join(map(str, near))}." in text
    assert all(PlanSearch(model_of(L, a=3), one, B, REAL).plans for one in near)


@pytest.mark.parametrize("L, n, B, share", one_fast_of(2, (
    (*job, share) for share in (0.15, 0.3, 0.6) for job in ((4, 2, 3), (5, 1, 8)))))
def test_where_nothing_fits_the_next_number_of_devices_is_named(L, n, B, share):
    """Beside looking at every larger number; and with it a plan does fit."""
    whole = sum(min(map(job(L, 1, B).needs, job(L, 1, B).plans), key=sum))
    small = job(L, n, B, REAL.reserved + share * whole)
    if small.fitting:
        check(small)
        return
    text = said(small)
    fits = [more for more in range(n + 1, 4 * L * B + 1) if PlanSearch(small.model, more, B, small.hardware).fitting]
    assert ("No number of them would do" in text) == (not fits)
    if fits:
        assert int(re.search(r"With --num-gpus (\d+) one fits", text)[1]) == fits[0]
    leanest = min(sum(small.needs(plan)) for plan in small.plans)
    assert f"the leanest holds {leanest / 1e9:,.1f} GB" in text


def test_where_no_number_of_devices_helps():
    """A model too large for any of them, and a batch that no plan splits into few microbatches."""
    assert "No number of them would do" in said(job(4, 2, 2, REAL.reserved + 10))
    assert "--global-batch-size is 1000003, but the schedule of every plan" in said(job(1, 1, 1_000_003))
