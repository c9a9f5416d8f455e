"""Training in 16 bits on ranks: as close to float32 as the format lets it be, and skipped on all ranks or on none."""
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.config import ModelConfig
from reference.optimizers.adam import OptimizerConfig
from reference.precision import FORMATS, LossScaling, Precision
from tests import precision_theorems as theorems
from tests.deep import every_other_deep, one_fast_of
from tests.mpi_impl.test_training import runs
from tests.precision_theorems import CASE, LOSSES, OPTIMIZER, one_step
from tests.strategies import Case
from tests.training_theorems import ALONE, Plan, trainer_on

HALVES = ["float16", "bfloat16"]
PLANS = {"zb-h1, ZeRO-1": Plan(2, "zb-h1", zero_stage=1), "interleaved": Plan(2, "interleaved", 1),
         "1f1b, ZeRO-3, offload": Plan(2, zero_stage=3, cpu_offload=True), "one stage, ZeRO-2": Plan(zero_stage=2)}
EVERY_PLAN = pytest.mark.parametrize("name", one_fast_of(len(PLANS), PLANS))
EVERY_HALF = pytest.mark.parametrize("compute", HALVES)


# ---- how far from float32 -------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 5)
@given(runs(), st.sampled_from(HALVES))
def test_a_step_is_as_close_to_float32_as_the_format_explains(ranks, run, compute):
    """On every topology, by every schedule, from the same weights.

    Not where rounding is magnified: by a layer norm of two elements, or by ReLU, when its input is rounded across 0.
    """
    n, case, m, plan = run
    h, activation = case.model.hidden_size, case.model.activation
    case = replace(case, model=replace(case.model, hidden_size=h * -(-8 // h),
                                       activation="gelu" if activation == "relu" else activation))
    ranks.run(n, theorems.close_to_float32, case, m, plan, compute)


@EVERY_HALF
def test_a_step_is_no_closer_than_16_bits_can_be(ranks, compute):
    """What moves between ranks, and what they compute, is really rounded: not to float32, nor to the other format."""
    for error in ranks.run(4, theorems.relative_error, CASE, Plan(2), compute):
        assert FORMATS[compute].epsilon / 8 < error < 4 * FORMATS[compute].epsilon


# ---- the loss scale -------------------------------------------------------------------------------------------------


@EVERY_PLAN
def test_a_power_of_two_changes_no_bit(ranks, name):
    """Multiplied into the loss and divided out of the gradients, where nothing is too small or too large for it."""
    unscaled, scaled = (ranks.run(8, steps_scaled_by, CASE, PLANS[name], scale) for scale in (1.0, 2.0**40))
    for (results, states), (again, others) in zip(unscaled, scaled, strict=True):
        assert [result[:3] for result in results] == [result[:3] for result in again]
        assert all(np.array_equal(state, other) for state, other in zip(states, others, strict=True))


def steps_scaled_by(group, case: Case, plan: Plan, scale: float, optimizer: OptimizerConfig = OPTIMIZER):
    """Return the results of three steps, and the whole states and gradients after them."""
    precision = Precision("bfloat16", LossScaling(loss_scale=scale))
    with trainer_on(group, case, plan, precision, optimizer) as trainer:
        results = [one_step(trainer, case, 2, step) for step in range(3)]
        buffers = *trainer.state.optimizer_states.values(), trainer.state.gradients.own
        return results, [trainer.state.whole(buffer).copy() for buffer in buffers]


@EVERY_PLAN
def test_too_large_a_scale_is_halved_until_it_is_not(ranks, name):
    """Every rank skips the same steps."""
    assert len(set(ranks.run(8, theorems.scale_is_found, CASE, PLANS[name]))) == 1


@settings(max_examples=settings().max_examples // 5)
@given(st.sampled_from(sorted(PLANS)), st.integers(0, 7), st.sampled_from([np.inf, -np.inf, np.nan]),
       st.integers(0, 10**6))
def test_one_overflow_on_one_rank_skips_the_step_on_all(ranks, plan, rank, value, where):
    ranks.run(8, theorems.one_overflow_skips_on_all, CASE, PLANS[plan], rank, value, where)


# ---- what float32 is kept for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute, lr", every_other_deep([("bfloat16", 2.0**-12), ("float16", 2.0**-15)]))
def test_small_updates_are_not_lost(ranks, compute, lr):
    """The master weights move all the same, and after enough steps so do the model's."""
    ranks.run(2, theorems.gains_move, compute, lr)


def test_gradients_are_not_rounded_before_the_end(ranks):
    """Not after the product that makes them, nor over microbatches, nor over replicas."""
    ranks.run(4, theorems.main_gradients_have_more_digits, "bfloat16")


def test_a_loss_in_float16_loses_no_gradient_of_logits(ranks):
    """Of many words each has a small one, and together they are half of it: of order 2^-15 here, with its scale."""
    model = ModelConfig(1, 16, 2, 3000, 8, hidden_dropout=0.0, attention_dropout=0.0, fp16_lm_cross_entropy=True)
    error, = ranks.run(1, theorems.relative_error, Case(1, model, 8, 8, seed=3), ALONE, "float16", 1, 4.0)
    assert error < 4 * FORMATS["float16"].epsilon


@EVERY_HALF
@pytest.mark.parametrize("asked_for", [False, True])
@pytest.mark.parametrize("architecture", LOSSES)
def test_softmax_and_loss_are_in_float32(ranks, compute, asked_for, architecture):
    """Unless --fp16-lm-cross-entropy asks for less; and so is its gradient, until it is that of the logits."""
    ranks.run(2, theorems.the_loss_has_its_format, compute, asked_for, architecture)
