"""A plan's memory, traffic, idle time and seconds, beside the papers' formulas; and the map of choices."""
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from mpi_impl.notebook.pictures.choices import Machine, choices, seconds
from mpi_impl.notebook.plan import MODELS, plan
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.plans import Plan
from reference.errors import UserError

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
def test_a_plan_is_that_of_the_papers(chosen):
    """Rajbhandari et al. 2020 for the states and their traffic, Korthikanti et al. 2022 for the activations, Narayanan
    et al. 2021 for the microbatches that a rank holds, its messages and its idle time. A number has two bytes.
    """
    name, t, p, d, v, m, zero, sequence_parallel = chosen
    h, L, a = MODELS[name].hidden_size, MODELS[name].num_layers, MODELS[name].num_attention_heads
    found, sequence = plan(*chosen), t if sequence_parallel else 1
    layers = sum(L // (p * v) + (stage < L % (p * v)) for stage in range(0, p * v, p))
    psi = V * h // t + S * h + layers * ((12 * h**2 + 7 * h) // t + 6 * h) + (2 * h if p == 1 else 0)
    assert found.psi == psi
    w, g, k = (2 / (d if zero == 3 else 1), 2 / (d if zero >= 2 else 1), 12 / (d if zero >= 1 else 1))
    layer = S * h * (10 / sequence + 24 / t + 5 * a * S / (h * t))
    in_flight = min(m * v, p if v == 1 else 2 * (p - 1) + (v - 1) * p + 1)
    outside = p * S * h / t + (4 * S * h / t * (1 + V / h) if p == 1 else 0)
    assert found.memory == pytest.approx((w * psi, g * psi, k * psi, in_flight * layers / v * layer + outside))

    in_layer = (10 if sequence > 1 else 8) * S * h * (t - 1) / t
    between = (2 * v - 1) * S * h / t if p > 1 else 0       # backward from all its stages but the first
    times = (2, 2, m + 1, 3 * m)[zero]
    assert found.messages == pytest.approx((2 * m * layers * in_layer, 2 * m * between, 2 * times * psi * (d - 1) / d))

    assert found.timeline.bubble_fraction == pytest.approx((p - 1) / (v * m))
    assert found.timeline.work == pytest.approx(3 * m)      # a forward of all layers takes 1, a backward 2


@pytest.mark.parametrize("wrong, word", [((1, 1, 1, 2, 8, 0), "no pipeline"), ((1, 64, 1, 1, 64, 0), "needs one"),
                                         ((5, 1, 1, 1, 1, 0), "--tensor-model-parallel-size")])
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
    saving = choices(MODELS["39.1B"], n=64, B=128, zero_stage=1, recompute="selective")
    assert all(sum(saving[at].memory) < sum(chosen.memory) for at, chosen in found.items() if chosen)


# ---- seconds ---------------------------------------------------------------------------------------------------------

WIDE = ModelConfig(32, 20_480, 128, V, S)
MACHINE = Machine(flops=140e12, inside=300e9, outside=25e9, server=8)


@pytest.mark.parametrize("t, p, d, m, full", [(8, 8, 1, 32, True), (16, 4, 1, 32, True), (2, 4, 8, 8, False),
                                              (4, 1, 2, 4, True)])
def test_seconds_are_the_formulas(t, p, d, m, full):
    """Written out from the papers; a group that reaches beyond a server of 8 has the slow link."""
    L, h, n, B = 32, 20_480, t * p * d, m * d
    plan = Plan(WIDE, ParallelConfig(t, p, d, recompute=Recompute("full" if full else "none")), m)
    flops = 24 * (4 if full else 3) * B * S * L * h**2 * (1 + S / (6 * h) + V / ((16 if full else 12) * L * h))
    compute, tensor = flops / (n * 140e12), 2 * m * L / p * (12 if full else 8) * S * h * (t - 1) / t
    link = [300e9 if span <= 8 else 25e9 for span in (t, n, t * d)]
    assert seconds(plan, MACHINE)._asdict() == pytest.approx({
        "compute": compute, "tensor": tensor / link[0], "bubble": (p - 1) / m * (compute + tensor / link[0]),
        "pipeline": (2 * m * S * h / t if p > 1 else 0) / link[1], "data": 4 * plan.psi * (d - 1) / d / link[2]})


def test_a_server_is_the_best_tensor_group():
    """Takeaway 1 of Narayanan et al. 2021: up to it the step gets shorter, beyond it longer."""
    total = [sum(seconds(Plan(WIDE, ParallelConfig(t, 64 // t, recompute=Recompute("full")), 32), MACHINE))
             for t in (2, 4, 8, 16, 32)]
    assert [later < earlier for earlier, later in pairwise(total)] == [True, True, False, False]
