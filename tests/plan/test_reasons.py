"""The sentences about the three rules and their numbers are right."""
import re
from dataclasses import replace
from functools import cache
from math import prod

import pytest

from reference.costs.hardware import Link
from reference.costs.plans import Plan
from reference.costs.step_time import StepTime, step_time
from shardlab.plan.candidates import PlanSearch, Timed, in_words, shape_of
from shardlab.plan.reasons import AS_FAST, NAMES, reasons
from tests.plan_cases import REAL, model_of

COMPARED = re.compile(r"best plan \(([^)]*)\) (?:is as fast|takes (\d+)% longer, mostly for ([^:]+): (\S+) s of a "
                      r"step, where it is (\S+))\.(?= |$)")
SLOW, FAST = Link(2e-6, 1e10), Link(1e-8, 1e12)

# Of few and many layers; where tensor parallelism is cheap and where it is not; with much memory and with little.
CASES = [(L, a, n, B, server, inside, between, share)
         for L, a, n, B in ((6, 4, 8, 8), (4, 8, 8, 4), (7, 1, 7, 4), (8, 2, 4, 12), (4, 4, 1, 4), (2, 8, 16, 2))
         for server in (2, 4) for inside, between in ((FAST, SLOW), (SLOW, FAST), (FAST, FAST))
         for share in (0, 0.02, 1)]


@cache
def job(L, a, n, B, server, inside, between, share) -> PlanSearch:
    found = PlanSearch(model_of(L, a), n, B, replace(REAL, server=server, inside=inside, between=between))
    sizes = sorted(sum(found.needs(plan)) for plan in found.plans)
    return replace(found, hardware=replace(found.hardware, memory=1 + REAL.reserved
                                           + sizes[int(share * (len(sizes) - 1))]))


def compared(job: PlanSearch, text: str) -> list[Plan]:
    """Return the plans that a text compares with the best one. Check its numbers: how much longer each takes, and which
    part of a step makes most of the difference.
    """
    plans, best, found = {in_words(plan): plan for plan in job.plans}, job.best[0], []
    for description, percent, part, there, here in COMPARED.findall(text):
        found.append(plans[description])
        time = step_time(found[-1], job.hardware)
        longer = time.total / best.seconds - 1
        assert f"{longer:.0%}" == f"{percent}%" if percent else longer < AS_FAST
        if percent:
            field = max(StepTime._fields, key=lambda name: getattr(time, name) - getattr(best.time, name))
            assert part == NAMES[field]
            assert [there, here] == [f"{getattr(one, field):.3g}" for one in (time, best.time)]
    return found


def fastest(job: PlanSearch, *conditions) -> list[Plan]:
    """Return the fastest plan that meets each condition, if there is one."""
    found = [next((one.plan for one in job.fitting if like(one)), None) for like in conditions]
    return [plan for plan in found if plan]


def is_plain(one: Timed) -> bool:
    """Report whether a plan does without what is newer than the paper, which has full recompute."""
    p = one.plan.parallel
    return not (p.zero_stage or p.sequence_parallel or p.recompute.granularity == "selective")


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_the_three_rules(case):
    found = job(*case)
    tensor, pipeline, microbatch, saving = reasons(found)
    best, server = found.best[0], found.hardware.server
    t, p, *_ = best.shape

    # 1
    widest = max((one.shape[0] for one in found.fitting if one.shape[0] <= server), default=0)
    assert ("holds" in tensor) != ("beaten" in tensor) == (t > server or (p > 1 and t < widest))
    assert ("no pipeline is needed" in tensor) == (p == 1 and t <= server)
    compared(found, tensor)

    # 2
    smaller = fastest(found, lambda one: prod(one.shape[:2]) < t * p)
    assert ("holds" in pipeline) != ("beaten" in pipeline) == bool(smaller)
    assert compared(found, pipeline) == (smaller or fastest(found, lambda one: prod(one.shape[:2]) > t * p))
    possible = any(prod(shape_of(plan)[:2]) < t * p for plan in found.plans)
    why = "nothing is smaller" if t * p == 1 else "nothing fits" if possible else "is not possible"
    assert smaller or why in pipeline

    # 3
    sizes = {plan.b for plan in found.plans if shape_of(plan) == best.shape}
    fitting = {b: fastest(found, lambda one, b=b: one.shape == best.shape and one.plan.b == b) for b in sizes}
    assert ("so b = 1" in microbatch) == (sizes == {1})
    assert ("does not fit" in microbatch) == (not all(fitting.values()))
    assert all(plan.b != best.plan.b for plan in compared(found, microbatch))

    # and what came later
    plain = [] if is_plain(best) else fastest(found, is_plain)
    assert compared(found, saving) == plain
    assert plain or ("gain nothing here" if is_plain(best) else "nothing would fit") in saving


def test_all_verdicts_are_met_in_these_cases():
    """So every assertion above is used."""
    said = " ".join(sentence for case in CASES[::4] for sentence in reasons(job(*case)))
    for verdict in ("server, and only then p: beaten", "holds, for no pipeline", "is the largest up to it",
                    "only then p: holds.", "nothing is smaller", "nothing fits", "a smaller one fits, too",
                    "is not possible", "so b = 1", "does not fit", "gain nothing", "nothing would fit", "Without ZeRO",
                    "is as fast"):
        assert verdict in said, verdict
