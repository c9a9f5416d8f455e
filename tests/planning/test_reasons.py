"""The sentences about the three rules and their numbers are right, beside a simulation of every plan that fits."""
import re
from dataclasses import replace
from functools import cache

import pytest

from mpi_impl.planning.candidates import PlanSearch, Timed, check
from mpi_impl.planning.reasons import AS_FAST, NAMES, is_plain, reasons
from reference.config import ParallelConfig, Recompute
from reference.costs.hardware import Link
from reference.costs.step_time import StepTime, step_time
from reference.errors import UserError
from tests.plan_cases import REAL, model_of

NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
SLOW, FAST = Link(2e-6, 1e10), Link(1e-8, 1e12)

# Of few and many layers; where tensor parallelism is cheap and where it is not; with much memory and with little.
CASES = [(L, a, n, B, server, inside, between, share)
         for L, a, n, B in ((6, 4, 8, 8), (4, 8, 8, 4), (7, 1, 7, 4), (8, 2, 4, 12), (4, 4, 1, 4), (2, 8, 16, 2))
         for server in (2, 4) for inside, between in ((FAST, SLOW), (SLOW, FAST), (FAST, FAST))
         for share in (0, 0.02, 1)]


@cache
def job(L, a, n, B, server, inside, between, share) -> PlanSearch:
    found = PlanSearch(model_of(L, a), n, B, replace(REAL, server=server, inside=inside, between=between))
    sizes = sorted(sum(plan.memory) for plan in found.plans)
    return replace(found, hardware=replace(found.hardware, memory=1 + REAL.reserved
                                           + sizes[int(share * (len(sizes) - 1))]))


@cache
def everything(job) -> tuple[Timed, ...]:
    """Return all plans that fit, simulated."""
    return tuple(sorted((Timed(one.plan, step_time(one.plan, job.hardware)) for one in job.fitting),
                        key=lambda one: one.seconds))


def longer(text: str) -> list[float]:
    """Return how much longer the other plans take that a text names, as shares; 0 for one that is as fast."""
    found = re.findall(r"\) (?:takes (\d+)% longer|is as fast)", text)
    return [int(one or 0) / 100 for one in found]


def near(said: float, job, like) -> bool:
    """Report whether the fastest such plan takes so much longer than the best. The text is about the closed form's."""
    true = next(one.seconds for one in everything(job) if like(one)) / job.best[0].seconds - 1
    return abs(said - max(0.0, true)) <= 0.005 + AS_FAST + 0.04 * (1 + max(0.0, true))


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_the_three_rules(case):
    found = job(*case)
    tensor, pipeline, microbatch, saving = reasons(found)
    t, p, d, _ = found.best[0].shape
    server = found.hardware.server
    shapes = {one.shape for one in everything(found)}

    # 1
    widest = max((one[0] for one in shapes if one[0] <= server), default=0)
    assert ("beaten" in tensor) == (t > server or (p > 1 and t < widest))
    assert ("holds" in tensor) != ("beaten" in tensor)
    assert ("no pipeline is needed" in tensor) == (p == 1 and t <= server)
    alternatives = []
    if t > server:
        alternatives.append(lambda one: one.shape[0] <= server)
    elif p == 1:
        alternatives.append(lambda one: t < one.shape[0] <= server)
    elif t == widest:
        alternatives.append(lambda one: one.shape[0] < t and one.shape[1] > 1)
    else:
        alternatives.append(lambda one: one.shape[0] == widest)
    alternatives += [lambda one: one.shape[0] > server] if t <= server else []
    alternatives = [like for like in alternatives if any(map(like, everything(found)))]
    assert len(longer(tensor)) == len(alternatives)
    assert all(near(said, found, like) for said, like in zip(longer(tensor), alternatives))

    # 2
    def smaller(one) -> bool:
        return one.shape[0] * one.shape[1] < t * p

    def larger(one) -> bool:
        return one.shape[0] * one.shape[1] > t * p

    beaten = any(map(smaller, everything(found)))
    assert ("beaten" in pipeline) == beaten and ("holds" in pipeline) != beaten
    if not beaten:
        possible = any(a.tensor_model_parallel_size * a.pipeline_model_parallel_size < t * p
                       for a in (plan.parallel for plan in found.plans))
        assert ("nothing is smaller" in pipeline) == (t * p == 1) and ("nothing fits" in pipeline) == possible
        assert ("is not possible" in pipeline) == (not possible and t * p > 1)
    like = smaller if beaten else larger
    assert len(longer(pipeline)) == any(map(like, everything(found)))
    assert all(near(said, found, like) for said in longer(pipeline))

    # 3
    mine = [one for one in everything(found) if one.shape == (t, p, d, 1)]
    sizes = {plan.b for plan in found.plans if Timed(plan, mine[0].time).shape == (t, p, d, 1)}
    told = {int(b): float(seconds) for seconds, b in re.findall(rf"{NUMBER} s with b = (\d+)", microbatch)}
    if sizes == {1}:
        assert "so b = 1" in microbatch and not told
    else:
        assert set(told) == {one.plan.b for one in mine}
        assert {int(b) for b in re.findall(r"b = ([\d or]+) does not fit", " ".join(microbatch.split(" or ")))
                for b in b.split()} == sizes - set(told)
        for b, seconds in told.items():
            assert seconds == pytest.approx(min(one.seconds for one in mine if one.plan.b == b), rel=0.05)
        assert min(told.values()) >= told[found.best[0].plan.b] * (1 - AS_FAST)

    # and what came later
    def plain(one) -> bool:
        a = one.plan.parallel
        return not (a.zero_stage or a.sequence_parallel or a.recompute.selective)
    if plain(found.best[0]):
        assert "gain nothing here" in saving
    elif any(map(plain, everything(found))):
        assert near(longer(saving)[0], found, plain)
    else:
        assert "nothing would fit" in saving


@pytest.mark.parametrize("case", CASES[1::4], ids=str)
def test_what_makes_the_difference_is_the_part_that_does(case):
    """Read from the sentences: the part that is named has the seconds that are told, in the plan and in the best."""
    found = job(*case)
    best = found.best[0].time
    for name, there, here in re.findall(rf"mostly for ([^:]+): {NUMBER} s of a step, where it is {NUMBER}",
                                        " ".join(reasons(found))):
        field = next(key for key, words in NAMES.items() if words == name)
        assert float(here) == pytest.approx(getattr(best, field), rel=0.006, abs=1e-12)
        others = [one.time for one in everything(found)
                  if float(there) == pytest.approx(getattr(one.time, field), rel=0.006, abs=1e-12)]
        assert any(max(StepTime._fields, key=lambda part: getattr(one, part) - getattr(best, part)) == field
                   for one in others)


def test_what_that_paper_does_without():
    """Full recompute it has."""
    plain = job(*CASES[0]).best[0]
    for choice, has in (({"zero_stage": 1}, False), ({"sequence_parallel": True}, False), ({}, True),
                        ({"recompute": Recompute("selective")}, False), ({"recompute": Recompute("full")}, True)):
        plan = replace(plain.plan, parallel=ParallelConfig(2, 2, 2, **choice))
        assert is_plain(plain._replace(plan=plan)) == has


def test_all_verdicts_are_met_in_these_cases():
    """So every assertion above is used."""
    said = " ".join(sentence for case in CASES[::2] for sentence in reasons(job(*case)))
    for verdict in ("server, and only then p: beaten", "holds, for no pipeline", "is the largest up to it",
                    "only then p: holds.", "nothing is smaller", "nothing fits", "a smaller one fits, too",
                    "is not possible", "so b = 1", "does not fit", "gain nothing", "nothing would fit",
                    "Without ZeRO, sequence parallelism and selective recompute, as in that paper", "is as fast"):
        assert verdict in said, verdict


def test_there_are_reasons_only_where_there_is_a_plan():
    with pytest.raises(UserError, match="No plan fits"):
        check(replace(job(*CASES[0]), hardware=replace(REAL, memory=REAL.reserved + 1)))
