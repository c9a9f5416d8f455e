"""The map of choices and the estimate of a step, beside the formulas written out once more."""
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from mpi_impl.notebook.pictures.choices import BEST, TOO_MUCH, Machine, choices, draw_choices, gigabytes, idle, seconds
from mpi_impl.notebook.plan import MODELS
from reference.config import ModelConfig, ParallelConfig, Recompute
from reference.costs.plans import Plan

MACHINE = Machine(flops=140e12, inside=300e9, outside=25e9, server=8)
FOUND = choices(MODELS["39.1B"], n=64, B=128)


def test_every_choice_uses_all_gpus_and_the_whole_batch():
    assert set(FOUND) == {(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8, 16, 32, 64) if t * p <= 64}
    for (t, p), plan in FOUND.items():
        if plan is None:
            assert (t, p) == (1, 64)                # 48 layers are too few
            continue
        d = 64 // (t * p)
        assert plan.parallel.world_size == 64 and plan.m * plan.b * d == 128
        assert idle(plan) == (p - 1) / plan.m and gigabytes(plan) == sum(plan.memory) / 1e9


def test_a_batch_that_does_not_divide():
    assert choices(MODELS["39.1B"], n=8, B=4)[1, 1] is None


def test_what_saves_memory_does():
    saving = choices(MODELS["39.1B"], n=64, B=128, zero_stage=1, recompute="selective")
    assert all(gigabytes(saving[at]) < gigabytes(plan) for at, plan in FOUND.items() if plan)


def test_the_map():
    """A number for each plan; grey is what does not fit; the frame is around the smallest t p that does."""
    figure = draw_choices(FOUND, 80, "a title")
    axes, = figure.axes
    texts = [text.get_text() for text in axes.texts]
    plans = [plan for plan in FOUND.values() if plan]
    assert texts.count("not possible") == 1
    assert [text for text in texts if text.endswith("GB")] == [f"{gigabytes(plan):,.0f} GB" for plan in plans]
    assert [text for text in texts if "bubble" in text] == [f"bubble {idle(plan):.0%}" for plan in plans]
    fields = [patch for patch in axes.patches if patch.get_fill()]
    assert [to_hex(patch.get_facecolor()).upper() == TOO_MUCH for patch in fields] == [gigabytes(plan) > 80
                                                                                      for plan in plans]
    frame, = (patch for patch in axes.patches if not patch.get_fill())
    assert to_hex(frame.get_edgecolor()).upper() == BEST
    at = int(frame.get_x()), int(frame.get_y())
    assert at == (3, 1)                             # t = 8, p = 2: no other of t p <= 16 fits with less bubble
    fitting = {(t, p) for (t, p), plan in FOUND.items() if plan and gigabytes(plan) <= 80}
    assert min(t * p for t, p in fitting) == 16 and (8, 2) in fitting
    assert axes.get_title(loc="left") == "a title" and len(figure.legends[0].get_texts()) == 3


def test_a_map_on_which_nothing_fits_has_no_frame():
    axes, = draw_choices(FOUND, 1).axes
    assert all(patch.get_fill() for patch in axes.patches)


# ---- seconds --------------------------------------------------------------------------------------------------------

WIDE = ModelConfig(32, 20_480, 128, 51_200, 2048)


@pytest.mark.parametrize("t, p, d, m, full", [(8, 8, 1, 32, True), (16, 4, 1, 32, True), (2, 4, 8, 8, False),
                                              (1, 1, 16, 2, False), (4, 1, 2, 4, True)])
def test_seconds_are_the_formulas(t, p, d, m, full):
    """Written out from the papers; a group that reaches beyond a server of 8 has the slow link."""
    L, h, V, s, n, B = 32, 20_480, 51_200, 2048, t * p * d, m * d
    plan = Plan(WIDE, ParallelConfig(t, p, d, recompute=Recompute("full" if full else "none")), m)
    found = seconds(plan, MACHINE)
    flops = (96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h)) if full else
             72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h)))
    tensor = 2 * m * L / p * (12 if full else 8) * s * h * (t - 1) / t / (300e9 if t <= 8 else 25e9)
    assert found.compute == pytest.approx(flops / (n * 140e12))
    assert found.tensor == pytest.approx(tensor)
    assert found.bubble == pytest.approx((p - 1) / m * (found.compute + tensor))
    assert found.pipeline == pytest.approx((2 * m * s * h / t if p > 1 else 0) / (300e9 if n <= 8 else 25e9))
    assert found.data == pytest.approx(2 * 2 * plan.psi * (d - 1) / d / (300e9 if t * d <= 8 else 25e9))


@pytest.mark.parametrize("B", [32, 128])
def test_a_server_is_the_best_tensor_group(B):
    """Takeaway 1 of Narayanan et al. 2021: up to it the step gets shorter, beyond it longer."""
    total = [sum(seconds(Plan(WIDE, ParallelConfig(t, 64 // t, recompute=Recompute("full")), B), MACHINE))
             for t in (2, 4, 8, 16, 32)]
    assert [later < earlier for earlier, later in pairwise(total)] == [True, True, False, False]
