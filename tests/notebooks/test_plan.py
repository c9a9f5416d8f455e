"""A plan's memory, traffic, idle time and seconds, beside the papers' formulas; and the map of choices."""
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.plans import Plan
from reference.errors import UserError
from shardlab.notebook.pictures.choices import Machine, choices, seconds
from shardlab.notebook.plan import MODELS, plan

S, V = 2048, 51_200
POWERS = st.sampled_from((1, 2, 4, 8))


@st.composite
def positions(draw):
    """Draw values of the sliders that fit together."""
    model, t, p, d = draw(st.sampled_from(list(MODELS))), draw(POWERS), draw(POWERS), draw(POWERS)
    v = draw(st.integers(1, 3)) if p > 1 else 1
    if p * v > MODELS[model].num_layers:
        v = 1
    return model, t, p, d, v, p * draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.booleans())


@given(positions())
def test_a_plan_is_the_one_at_which_the_sliders_stand(chosen):
    """Its costs are the papers' (tests/reference/test_step_time.py); a forward of all layers takes 1, a backward 2."""
    name, t, p, d, v, m, zero, sequence_parallel = chosen
    found, parallel = plan(*chosen), plan(*chosen).parallel
    assert found.model == MODELS[name] and parallel.world_size == t * p * d and found.m == m
    assert (parallel.zero_stage, parallel.sequence_parallel) == (zero, sequence_parallel and t > 1)
    assert (parallel.tensor_model_parallel_size, parallel.data_parallel_size) == (t, d)
    assert found.timeline.bubble_fraction == pytest.approx((p - 1) / (v * m))
    assert found.timeline.work == pytest.approx(3 * m)


@pytest.mark.parametrize("wrong, word", [((1, 1, 1, 2, 8, 0), "no pipeline"), ((1, 64, 1, 1, 64, 0), "needs one")])
def test_sliders_that_do_not_go_together_get_a_sentence(wrong, word):
    with pytest.raises(UserError, match=word):
        plan("18.4B", *wrong)


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_every_choice_uses_all_gpus_and_the_whole_batch():
    found = choices(MODELS["39.1B"], n=64, B=128)
    assert set(found) == {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16, 32, 64) if t * p <= 64}
    assert [at for at, chosen in found.items() if chosen is None] == [(1, 64)], "48 layers are too few for 64 stages"
    for (t, p), chosen in found.items():
        if chosen:
            assert chosen.parallel.world_size == 64 and chosen.m * chosen.b * 64 == 128 * t * p
    assert choices(MODELS["39.1B"], n=8, B=4)[1, 1] is None, "a batch that does not divide"


# ---- seconds ---------------------------------------------------------------------------------------------------------

WIDE = ModelConfig(32, 20_480, 128, V, S)
MACHINE = Machine(flops=140e12, inside=300e9, outside=25e9, server=8)


def test_seconds_are_the_formulas():
    """Written out from the papers; a group that reaches beyond a server of 8 has the slow link."""
    t, p, d, m = 16, 4, 2, 32
    L, h, n, B = 32, 20_480, t * p * d, m * d
    plan = Plan(WIDE, ParallelConfig(t, p, d, recompute=Recompute("full")), m)
    flops = 96 * B * S * L * h**2 * (1 + S / (6 * h) + V / (16 * L * h))
    compute, tensor = flops / (n * 140e12), 2 * m * L / p * 12 * S * h * (t - 1) / t
    assert seconds(plan, MACHINE)._asdict() == pytest.approx({
        "compute": compute, "tensor": tensor / 25e9, "bubble": (p - 1) / m * (compute + tensor / 25e9),
        "pipeline": 2 * m * S * h / t / 25e9, "data": 4 * plan.psi * (d - 1) / d / 25e9})


def test_a_server_is_the_best_tensor_group():
    """Takeaway 1 of Narayanan et al. 2021: up to it the step gets shorter, beyond it longer."""
    total = [sum(seconds(Plan(WIDE, ParallelConfig(t, 64 // t, recompute=Recompute("full")), 32), MACHINE))
             for t in (2, 4, 8, 16, 32)]
    assert [later < earlier for earlier, later in pairwise(total)] == [True, True, False, False]
