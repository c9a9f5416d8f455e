"""The main theorem: training on any ranks, by any schedule, is training in one process; and it sends what formulas say.

It holds for floats, but for rounding, and for exact numbers, which have none: two steps that agree on random ones are
the same formulas, but for a chance that `proved` asserts to be small.
"""
from collections import defaultdict
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from reference.config import ARCHITECTURES, CP_COMM_TYPES, MUON_SCALE_MODES, MUON_TP_MODES, ModelConfig
from reference.costs.volumes import PassCounts
from reference.ops import ACTIVATIONS
from reference.parallel.stages import schedule_of
from reference.schedules.generators import SCHEDULES, make, takes_v
from tests.cases import MuonChoices
from tests.deep import every_other_deep, one_fast_of
from tests.exact_theorems import proved, training_that_clips
from tests.mpi_impl.test_pipeline import orders
from tests.rank_theorems import as_is
from tests.sampled_runs import MODELS, RANKS, RUNS, Choices, legal_choices, muon_runs, sampled_runs
from tests.strategies import ANY_MODEL, Case, cases, instances, recomputes
from tests.training_theorems import Plan, ledger_is_predicted, no_cache_outlives_its_use, training_equals_one_process

WITHOUT_V = tuple(name for name in SCHEDULES if not takes_v(name))


def places(ranks=8):
    """Return all (t, p, d) that fit on this many ranks."""
    return [(t, p, d) for t in range(1, ranks + 1) for p in range(1, ranks // t + 1)
            for d in range(1, ranks // (t * p) + 1)]


@st.composite
def runs(draw, least_c=1, experts=False):
    """Draw the number of ranks, a case, the number of microbatches, and a plan. With `experts` e is any divisor.

    Models are ragged and may have more layers than stages, m is below p and above, buckets have any size.
    """
    t, p, d = draw(st.sampled_from(places(8 // least_c)), "t, p, d")
    c = draw(st.integers(least_c, 8 // (t * p * d)), "c")
    way = draw(st.sampled_from(CP_COMM_TYPES), "cp comm type") if c > 1 else "p2p"
    e = draw(st.sampled_from([e for e in range(c * d, 0, -1) if c * d % e == 0]), "e") if experts else None
    schedule = draw(st.sampled_from([*WITHOUT_V, "interleaved"]), "schedule")
    v = draw(st.integers(1, 3), "v") if schedule == "interleaved" else None
    m = p * draw(st.integers(1, 2)) if schedule == "interleaved" else draw(st.integers(1, p + 2), "m")
    stages = make(schedule, p, p, v).stages
    case = draw(cases(sizes=st.just(t), architectures=ANY_MODEL, num_layers=draw(st.integers(stages, stages + 2), "L"),
                      c=c, heads_of=c if way == "a2a" else 1, experts=e))
    shared = not (case.model.experts and case.model.experts.moe_layer_freq > 1) and draw(st.booleans(), "share layers")
    case = replace(case, model=replace(case.model, share_layers=shared))
    bucket_size = draw(st.sampled_from([1, 7, 100, 1000, 1 << 30]), "bucket size")
    stage = draw(st.integers(0, 2 if shared else 3), "ZeRO stage")
    plan = Plan(p, schedule, v, draw(st.booleans(), "scatter/gather"), bucket_size, stage,
                stage > 0 and draw(st.booleans(), "offload"), draw(recomputes(), "recompute"), c, way, e or 1,
                1 if e else draw(instances(c * d, stage), "instances"), draw(muons()) if stage < 2 else None)
    return t * p * c * d, case, m, plan


def muons():
    """Draw Muon's choices, or None for Adam."""
    return st.none() | st.builds(MuonChoices, st.sampled_from(MUON_TP_MODES), st.booleans(), st.integers(1, 5),
                                 st.sampled_from(MUON_SCALE_MODES))


ANY_RUN = st.one_of(runs(), runs(least_c=2), runs(experts=True))
SAMPLES = [(model, number) for model in MODELS for number in range(RUNS)]


# ---- one loss curve -------------------------------------------------------------------------------------------------


@given(ANY_RUN, st.integers(1, 2), st.sampled_from([0.0, 0.05, 1e6]))
def test_any_run(ranks, run, steps, clip):
    """Clipped and not; of experts some have no tokens, and of ranks some have no copies."""
    n, case, m, plan = run
    ranks.run(n, training_equals_one_process, case, steps, m, clip, plan)


@settings(max_examples=settings().max_examples // 5)
@given(runs(), st.data())
def test_any_order(ranks, run, data):
    """A schedule is a value: any other order of the stages' work that ends gives the same."""
    n, case, m, plan = run
    order = data.draw(orders(schedule_of(plan.parallel(n, case), m).placement(), m), "order")
    ranks.run(n, training_equals_one_process, case, 1, m, 0.05, plan, as_is, order)


@pytest.mark.parametrize("model, number", one_fast_of(RUNS // 2, SAMPLES))
def test_floats(ranks, model, number):
    """In four steps losses differ by less than 1e-11, and gradients and weights by less than 1e-10."""
    choices, case, m, plan = sampled_runs(model)[number]
    ranks.run(choices.ranks, training_equals_one_process, case, 4, m, 0.05, plan, timeout=120.0)


@pytest.mark.parametrize("model, number", one_fast_of(RUNS, SAMPLES))
def test_exact_numbers(ranks, model, number):
    """Two steps and an evaluation; one step of a deep model, since the chance of an error grows with the degree."""
    choices, case, m, plan = sampled_runs(model)[number]
    steps = 2 if case.model.num_layers < 8 else 1
    ranks.run(choices.ranks, proved, training_equals_one_process, case.exactly(), steps, m, 0.5, plan, timeout=300.0)


@pytest.mark.parametrize("model, number", one_fast_of(RUNS // 2, SAMPLES))
def test_muon(ranks, model, number):
    """Newton-Schulz multiplies what is rounded by up to a few hundred, and still all differ by less than that."""
    choices, case, m, plan = muon_runs(model)[number]
    ranks.run(choices.ranks, training_equals_one_process, case, 4, m, 0.05, plan, timeout=120.0)


@pytest.mark.parametrize("model, number", one_fast_of(RUNS, SAMPLES))
def test_muon_on_exact_numbers(ranks, model, number):
    """A round of Newton-Schulz multiplies the degree by 5, and all five of it by 3,125: of what is large, one step."""
    choices, case, m, plan = muon_runs(model)[number]
    ranks.run(choices.ranks, proved, training_equals_one_process, case.exactly(), 1, m, 0.5, plan, timeout=300.0)


@pytest.mark.parametrize("clips", every_other_deep([True, False]))
def test_exact_numbers_are_clipped(ranks, clips):
    """Where the norm is above its bound, and where it is not. (Exact numbers are compared in a random order.)"""
    case = Case(2, ModelConfig(2, 8, 4, 10, 4, make_vocab_size_divisible_by=3), 1, 3, seed=2).exactly()
    ranks.run(4, proved, training_that_clips, case, clips, 2, Plan(zero_stage=1), timeout=120.0)


@settings(max_examples=settings().max_examples // 5)
@given(runs())
def test_no_cache_outlives_its_use(ranks, run):
    n, case, m, plan = run
    ranks.run(n, no_cache_outlives_its_use, case, m, plan)


# ---- what is sent ---------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(ANY_RUN, st.integers(1, 2), st.integers(0, 2))
def test_what_is_sent_is_what_the_formulas_say(ranks, run, steps, evaluations):
    """Ranks without a counterpart have their lines, too: they move nothing."""
    n, case, m, plan = run
    ranks.run(n, ledger_is_predicted, case, PassCounts(steps, steps * m, evaluations, evaluations * m), plan)


# ---- the samples ----------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_every_two_choices_meet_that_go_together(model):
    chosen = [run.choices for run in sampled_runs(model)]
    assert pairs(chosen) == pairs(legal_choices(model == "experts"))
    assert len(set(chosen)) == RUNS >= 60 and max(choices.ranks for choices in chosen) == RANKS


def pairs(rows: list[Choices]) -> set[tuple]:
    """Return all pairs of values of two choices that occur in a row."""
    columns = list(zip(*rows))
    return {(i, j, *values) for i, j in combinations(range(len(columns)), 2) for values in zip(columns[i], columns[j])}


# Sharding does not touch these; layers that are shared, and Muon, are drawn by `runs`, and experts that drop tokens
# drop others on every topology.
NOT_DRAWN = {"integers", "init_method_std", "layernorm_epsilon", "rope_scaling_factor", "fp16_lm_cross_entropy",
             "share_layers", "muon", "moe_expert_capacity_factor"}


def test_every_choice_is_met():
    """And in the runs of each model what is ragged is: layers, vocabularies, one position, one microbatch."""
    values = defaultdict(set)
    for model in MODELS:
        for run in sampled_runs(model):
            for config in filter(None, (run.case, run.case.model, run.case.model.experts, run.plan)):
                for name, value in vars(config).items():
                    values[name].add(str(value))
        either(sampled_runs(model), lambda run: run.microbatches < run.plan.p, lambda run: run.microbatches > 1,
               lambda run: run.case.b > 1, lambda run: run.case.s == 1,
               lambda run: run.case.model.num_layers % run.plan.p,
               lambda run: run.case.model.vocab_size % run.case.model.make_vocab_size_divisible_by)
    assert {name for name, found in values.items() if len(found) == 1} == NOT_DRAWN
    assert values["activation"] == set(ACTIVATIONS)
    assert values["heads"] == {str(heads) for each in ARCHITECTURES.values() for heads in each}
    either(sampled_runs("llama"), lambda run: run.case.model.groups < run.case.t)
    either(sampled_runs("experts"), lambda run: run.case.model.experts.num_experts > run.plan.e > 1)


def either(several, *properties) -> None:
    """Assert that some have each property, and others have not."""
    for has in properties:
        assert {bool(has(one)) for one in several} == {False, True}
