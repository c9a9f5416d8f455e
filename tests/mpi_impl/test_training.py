"""The main theorem: training on t x p x d ranks, by any schedule, is training in one process."""
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.prediction.predict import PassCounts
from reference.config import CP_COMM_TYPES, ModelConfig, Recompute
from reference.parallel.stages import schedule_of
from reference.schedules.generators import SCHEDULES, make, takes_v
from tests.mpi_impl.test_pipeline import orders
from tests.rank_theorems import as_is
from tests.strategies import ANY_MODEL, Case, cases, instances, recomputes
from tests.training_theorems import Plan, ledger_is_predicted, no_cache_outlives_its_use, training_equals_one_process

WITHOUT_V = tuple(name for name in SCHEDULES if not takes_v(name))


def places(ranks=8):
    """Return all (t, p, d) that fit on so many ranks."""
    return [(t, p, d) for t in range(1, ranks + 1) for p in range(1, ranks // t + 1)
            for d in range(1, ranks // (t * p) + 1)]


@st.composite
def runs(draw, least_c=1, experts=False):
    """Draw the number of ranks, a case, the number of microbatches, and a plan. With `experts` e is any divisor."""
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
                1 if e else draw(instances(c * d, stage), "instances"))
    return t * p * c * d, case, m, plan


@given(runs(), st.integers(1, 2), st.sampled_from([0.0, 0.05, 1e6]))
def test_any_run(ranks, run, steps, clip):
    """Ragged models, more layers than stages, m below p and above, buckets of any size; clipped and not."""
    n, case, m, plan = run
    ranks.run(n, training_equals_one_process, case, steps, m, clip, plan)


@given(runs(experts=True), st.integers(1, 2), st.sampled_from([0.0, 0.05, 1e6]))
def test_any_run_with_experts(ranks, run, steps, clip):
    """Dealt out or not; uneven loads, experts without tokens, samples of one token."""
    n, case, m, plan = run
    ranks.run(n, training_equals_one_process, case, steps, m, clip, plan)


@settings(max_examples=settings().max_examples // 2)
@given(runs(least_c=2), st.integers(1, 2))
def test_any_run_with_dealt_positions(ranks, run, steps):
    """Each of several ranks has its own positions of every sequence; everything else is as ragged as before."""
    n, case, m, plan = run
    ranks.run(n, training_equals_one_process, case, steps, m, 0.05, plan)


@settings(max_examples=settings().max_examples // 5)
@given(runs(), st.data())
def test_any_order(ranks, run, data):
    """A schedule is a value: any other order of the stages' work that ends gives the same."""
    n, case, m, plan = run
    order = data.draw(orders(schedule_of(plan.parallel(n, case), m).placement(), m), "order")
    ranks.run(n, training_equals_one_process, case, 1, m, 0.05, plan, as_is, order)


def schedules_of(p: int) -> list[tuple[str, int | None]]:
    """Return every schedule with its v: all that make at most eight stages, and at least v = 2."""
    several = [("interleaved", v) for v in range(2, max(2, 8 // p) + 1)]
    return [(name, None) for name in WITHOUT_V] + several


EVERY = [(t, p, d, schedule, v) for t, p, d in places() for schedule, v in schedules_of(p)]
# Of every fourth t, p and d one schedule, of each schedule and a p of 2 and 3 one t and d; the others are deep.
SOME = {(t, p, d, *schedules_of(p)[i % len(schedules_of(p))]) for i, (t, p, d) in enumerate(places()) if i % 4 == 1} | {
    (*max((t, q, d) for t, q, d in places() if q == p and t * d <= 2), schedule, v)
    for p in (2, 3) for schedule, v in schedules_of(p)}


RECOMPUTES = (Recompute(), Recompute("selective"), Recompute("full"), Recompute("full", "uniform", 2),
              Recompute("full", "block", 1))


@pytest.mark.parametrize("t, p, d, schedule, v", [
    pytest.param(*one, marks=[] if one in SOME else pytest.mark.deep) for one in EVERY])
def test_every_place_and_schedule_on_up_to_eight_ranks(ranks, t, p, d, schedule, v):
    """With clipping at work, dropout on, as many heads as t needs, and a layer that does not divide.

    What is kept where goes through all choices in turn: ZeRO's stages, the sequence cut or not, recompute.
    """
    turn = EVERY.index((t, p, d, schedule, v))
    one_place_kept_where(ranks, t, p, d, schedule, v, turn % 4, bool(turn // 4 % 2), RECOMPUTES[turn % 5])


@pytest.mark.parametrize("t, p, d, schedule, v", [
    (1, 1, 2, "1f1b", None), (2, 1, 1, "1f1b", None), (2, 2, 2, "1f1b", None), (3, 2, 1, "zb-h1", None),
    (2, 2, 1, "interleaved", 2), (1, 2, 3, "zb-v", None), (2, 1, 4, "1f1b", None), (4, 2, 1, "gpipe", None)])
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.deep
def test_every_choice_of_what_is_kept_where(ranks, t, p, d, schedule, v, zero_stage, cut, recompute):
    """In some places, every choice with every other."""
    one_place_kept_where(ranks, t, p, d, schedule, v, zero_stage, cut, recompute)


def one_place_kept_where(ranks, t, p, d, *choices):
    case, m, plan = place_and_plan(t, p, d, *choices)
    ranks.run(t * p * d, training_equals_one_process, case, 1, m, 0.05, plan)


def place_and_plan(t, p, d, schedule, v, zero_stage, cut, recompute) -> tuple[Case, int, Plan]:
    """Return a case, the number of microbatches and a plan for these choices."""
    model = ModelConfig(make(schedule, p, p, v).stages + 1, 4 * t, t, 17, 2 * t + 4, make_vocab_size_divisible_by=3,
                        untie_embeddings_and_output_weights=bool(d % 2 and p % 2))
    m = p if schedule == "interleaved" else p + 1 if p <= 4 else p // 2
    case = Case(t, model, 1, 2 * t if cut else 3, seed=t * 10 + d, sequence_parallel=cut and t > 1)
    return case, m, Plan(p, schedule, v, True, 500, zero_stage, zero_stage == 3, recompute)


@settings(max_examples=settings().max_examples * 2 // 5)
@given(runs(), st.integers(1, 2), st.integers(0, 2))
def test_what_is_sent_is_what_the_formulas_say(ranks, run, steps, evaluations):
    """For any run. The lines of ranks without a counterpart are there too: they move nothing."""
    n, case, m, plan = run
    ranks.run(n, ledger_is_predicted, case, PassCounts(steps, steps * m, evaluations, evaluations * m), plan)


@settings(max_examples=settings().max_examples // 2)
@given(runs(experts=True), st.integers(1, 2), st.integers(0, 2))
def test_what_experts_send_is_what_the_formulas_say(ranks, run, steps, evaluations):
    """Dispatched copies too, whose number depends on the data: what went there came back."""
    n, case, m, plan = run
    ranks.run(n, ledger_is_predicted, case, PassCounts(steps, steps * m, evaluations, evaluations * m), plan)


KNOWN = {
    "a BERT that learns words and the order of sentences, its sequence cut": (
        2, 2, 1, ("bert", ("lm", "sop")), True, Plan(2)),
    "the same, its sequence whole, on two replicas": (2, 1, 2, ("bert", ("lm", "sop")), False, Plan()),
    "a BERT that chooses, its sequence cut": (2, 2, 1, ("bert", ("choice",)), True, Plan(2)),
    "a BERT that chooses, on one rank of each pipeline": (1, 3, 1, ("bert", ("choice",)), False, Plan(3, "gpipe")),
    "a BERT that learns words, ZeRO-3, in groups": (1, 1, 2, ("bert", ("lm",)), False, Plan(
        zero_stage=3, recompute=Recompute("full", "uniform", 3))),
    "a GPT in a V, ZeRO-3, some layers recomputed": (1, 2, 2, ("gpt", ("lm",)), False, Plan(
        2, "zb-v", zero_stage=3, recompute=Recompute("full", "block", 2))),
    "a GPT whose table is on the first rank and the last of three, ZeRO-1": (1, 3, 2, ("gpt", ("lm",)), False, Plan(
        3, bucket_size=1 << 30, zero_stage=1)),
    "a GPT interleaved, ZeRO-2, its sequence cut": (2, 2, 2, ("gpt", ("lm",)), True, Plan(
        2, "interleaved", 1, bucket_size=7, zero_stage=2, recompute=Recompute("selective"))),
    "a GPT, ZeRO-1 in each of two instances, its sequence cut": (2, 1, 4, ("gpt", ("lm",)), True, Plan(
        bucket_size=300, zero_stage=1, instances=2)),
    "a BERT, ZeRO-3 in each of three instances, a pipeline": (1, 2, 3, ("bert", ("lm", "sop")), False, Plan(
        2, zero_stage=3, instances=3)),
    "a GPT that keeps what was gathered, without a pipeline": (2, 1, 1, ("gpt", ("lm",)), True, Plan()),
    "a GPT whose results are sent whole": (3, 2, 1, ("gpt", ("lm",)), False, Plan(2, scatter_gather=False)),
    "a GPT whose keys travel around a ring of three": (1, 2, 1, ("gpt", ("lm",)), False, Plan(
        2, c=3, recompute=Recompute("full", "block", 1))),
    "a GPT whose keys are gathered, its sequence cut": (2, 1, 2, ("gpt", ("lm",)), True, Plan(
        c=2, cp_comm_type="all_gather", zero_stage=2)),
    "a BERT whose heads are exchanged for positions": (2, 2, 1, ("bert", ("lm", "sop")), False, Plan(
        2, c=2, cp_comm_type="a2a", recompute=Recompute("selective"))),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_known_runs_send_is_what_the_formulas_say(ranks, name):
    """Each line of the formulas counts in one of these. Two samples in a microbatch, two steps, three evaluations."""
    t, p, d, (architecture, heads), cut, plan = KNOWN[name]
    c = plan.c
    model = ModelConfig(5, 4 * t * c, t * c, 17, 4 * c, make_vocab_size_divisible_by=3, architecture=architecture,
                        heads=heads)
    case = Case(t, model, 2, 4 * c, seed=5, sequence_parallel=cut, keep_gathered_inputs=cut and p == 1)
    ranks.run(t * p * c * d, ledger_is_predicted, case, PassCounts(2, 2 * 2 * p, 3, 3 * 2 * p), plan)


@pytest.mark.parametrize("t", [2, 4])
def test_scatter_and_gather_send_a_part_of_t(ranks, t):
    """Between stages t times fewer elements, forward and backward, with as many messages; and they are gathered."""
    model = ModelConfig(2, 4 * t, t, 17, 4)
    case, work = Case(t, model, 2, 3, seed=1), PassCounts(1, 3, 1, 3)
    parts, whole = (ranks.run(2 * t, ledger_is_predicted, case, work, Plan(2, scatter_gather=scatter))[0]
                    for scatter in (True, False))
    for phase in ("forward", "backward", "evaluation"):
        sent = {"operation": "send", "phase": phase}
        assert whole.elements(**sent) == t * parts.elements(**sent) == 3 * 2 * 3 * 4 * t   # m b s h
        assert whole.calls(**sent) == parts.calls(**sent) == 3
        gathered = {"operation": "all_gather", "group": "tensor", "phase": phase}
        assert parts.elements(**gathered) == whole.elements(**sent) and whole.elements(**gathered) == 0


@settings(max_examples=settings().max_examples // 5)
@given(runs())
def test_no_cache_outlives_its_use(ranks, run):
    n, case, m, plan = run
    ranks.run(n, no_cache_outlives_its_use, case, m, plan)
