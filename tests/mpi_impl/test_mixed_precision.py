"""Training in 16 bits on ranks: as close to float32 as the format lets it be, and skipped on all ranks or on none."""
from dataclasses import replace
from math import isfinite, sqrt
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpi_impl.models import bert, gpt
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.parallel.tiles import tiles
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.training.trainer import StepResult, Trainer
from mpi_impl.training.verify import Verifier
from reference.config import ModelConfig
from reference.models.stage import join_stages
from reference.optimizer import OptimizerConfig, learning_rate
from reference.params import assign, join, leaves, tree_map
from reference.precision import FORMATS, LossScaling, Precision
from reference.training import trainer as training
from tests.deep import every_other_deep, one_fast_of
from tests.mpi_impl.test_training import runs
from tests.rank_theorems import first_checks
from tests.strategies import Case
from tests.training_theorems import Plan, connected, dealt

HALVES = ["float16", "bfloat16"]
OPTIMIZER = OptimizerConfig(1e-2, 10, clip_grad=0.5)
CASE = Case(2, ModelConfig(3, 16, 4, 21, 6, make_vocab_size_divisible_by=3), 2, 6, seed=11)
PLANS = {"zb-h1, ZeRO-1": Plan(2, "zb-h1", zero_stage=1), "interleaved": Plan(2, "interleaved", 1),
         "1f1b, ZeRO-3, offload": Plan(2, zero_stage=3, cpu_offload=True), "one stage, ZeRO-2": Plan(zero_stage=2)}
EVERY_PLAN = pytest.mark.parametrize("name", one_fast_of(len(PLANS), PLANS))
EVERY_PLAN_AND_HALF = pytest.mark.parametrize("name, compute", one_fast_of(3, (
    (name, compute) for i, name in enumerate(PLANS) for compute in (HALVES if i % 2 else HALVES[::-1]))))


def precision_of(compute: str) -> Precision:
    """Return a precision whose loss scale avoids nearly all overflow and underflow."""
    return Precision(compute, LossScaling(loss_scale=256.0 if compute == "float16" else 1.0))


def batch_of(trainer: Trainer, case: Case, m: int, step: int):
    """Return the global batch of a step, and its size."""
    n = m * trainer.topology.data.size * case.b
    return case.batch(str(step), n), n


def one_step(trainer: Trainer, case: Case, m: int, step: int) -> StepResult:
    batch, n = batch_of(trainer, case, m, step)
    with np.errstate(over="ignore", invalid="ignore"):
        return trainer.step(dealt(trainer, case.b, batch), n)


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
    ranks.run(n, close_to_float32, case, m, plan, compute)


@EVERY_PLAN_AND_HALF
def test_with_relu_as_well(ranks, name, compute):
    """In a model of which no input of ReLU is so near to 0."""
    relu = replace(CASE, model=replace(CASE.model, activation="relu"))
    ranks.run(8, close_to_float32, relu, 2, PLANS[name], compute)


def close_to_float32(group, case: Case, m: int, plan: Plan, compute: str, steps: int = 2, skips: int = 0) -> None:
    """Check each step against the textbook's. In the first `skips` steps the loss scale is so large that gradients
    overflow.
    """
    with connected(group, plan.parallel(group.size, case)) as topology:
        ours = Trainer(ModelState(case.model, topology, case.seed, precision_of(compute)), OPTIMIZER)
        textbook = training.Trainer(case.model, OPTIMIZER, case.seed, ours.state.precision)
        usual = ours.scaler.state
        for step in range(steps):
            ours.scaler.state = usual._replace(scale=2.0**100) if step < skips else usual
            result = one_step(ours, case, m, step)
            assert result.skipped or step >= skips
            batch, _ = batch_of(ours, case, m, step)
            flats = [ours.state.whole(buffer)
                     for buffer in (ours.state.gradients.own, ours.state.optimizer_states["parameters"])]
            found = topology.place, result, ours.state.layout.tensors, *map(ours.state.layout.views, flats)
            first_checks(group, found, lambda everyone, batch=batch: as_the_format_explains(
                textbook, batch, everyone, FORMATS[compute].epsilon))


def as_the_format_explains(textbook: training.Trainer, batch, everyone, epsilon: float) -> None:
    """Assert that the ranks differ from the textbook by no more than rounding explains.

    Each layer rounds about 12 times forward and 12 times backward; the embedding, the head and the loss round 8 times
    in all. A rounding's error is at most epsilon / 2, and errors are nearly independent, so epsilon sqrt(n) is twice
    the expected size.
    """
    results = [result for _, result, *_ in everyone]
    (skipped,) = {result.skipped for result in results}
    loss, norm, expected = textbook.step(batch, skipped)
    assert abs(results[0].loss - loss) <= epsilon / 4 * max(1, loss)
    if skipped:
        return
    assert len(set(results)) == 1, "ranks report different losses or norms"
    stages = {place.pipeline: [one for one in everyone if one[0][1:] == (0, 0, place.pipeline)]
              for place, *_ in everyone}
    grads, params = (join_stages([join([one[field] for one in stages[stage]], stages[stage][0][2])
                                  for stage in sorted(stages)]) for field in (3, 4))
    n = 24 * textbook.model.num_layers + 8
    assert distance(grads, expected) <= epsilon * sqrt(n) * length(expected)
    assert abs(results[0].grad_norm - norm) <= epsilon * sqrt(n) * norm
    tree_map(assign, textbook.params, params)     # each step is compared from the same weights


def length(tree) -> float:
    return sqrt(sum(float(np.vdot(x, x)) for _, x in leaves(tree)))


def distance(tree, expected) -> float:
    return length(tree_map(np.subtract, tree, expected))


@EVERY_PLAN_AND_HALF
def test_an_evaluation_is_as_close(ranks, name, compute):
    """Stages send halves there, too. From weights of order 1, so that what they send matters."""
    ranks.run(8, evaluation_is_close, CASE, PLANS[name], compute)


def evaluation_is_close(group, case: Case, plan: Plan, compute: str) -> None:
    case = replace(case, model=replace(case.model, init_method_std=0.5))
    with connected(group, plan.parallel(group.size, case)) as topology:
        ours = Trainer(ModelState(case.model, topology, case.seed, precision_of(compute)), OPTIMIZER)
        textbook = training.Trainer(case.model, OPTIMIZER, case.seed, ours.state.precision)
        batch, n = batch_of(ours, case, 2, 0)
        found, = ours.evaluate(dealt(ours, case.b, batch), n)
        expected, _ = training.loss_and_gradients(batch, textbook.params, case.model)
        assert abs(found - expected) <= FORMATS[compute].epsilon * expected


@pytest.mark.parametrize("compute", HALVES)
def test_a_step_is_no_closer_than_16_bits_can_be(ranks, compute):
    """What moves between ranks, and what they compute, is really rounded: not to float32, nor to the other format."""
    for error in ranks.run(4, relative_error, CASE, Plan(2), compute):
        assert FORMATS[compute].epsilon / 8 < error < 4 * FORMATS[compute].epsilon


def relative_error(group, case: Case, plan: Plan, compute: str) -> float:
    """Return the relative error of this rank's gradients against those in float32 from the same weights."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        ours, exact = (Trainer(ModelState(case.model, topology, case.seed, precision), OPTIMIZER)
                       for precision in (precision_of(compute), Precision("float32")))
        exact.state.parameters.own.flat[...] = ours.state.optimizer_states["parameters"].flat
        for trainer in (ours, exact):
            one_step(trainer, case, 2, 0)
        found, expected = ours.state.gradients.own.flat, exact.state.gradients.own.flat
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---- the loss scale -------------------------------------------------------------------------------------------------


@EVERY_PLAN
def test_a_power_of_two_changes_no_bit(ranks, name):
    """Multiplied into the loss and divided out of the gradients, where nothing is too small or too large for it."""
    precisions = (Precision("bfloat16", LossScaling(loss_scale=scale)) for scale in (1.0, 2.0**40))
    unscaled, scaled = (ranks.run(8, states_after, CASE, PLANS[name], precision, 3) for precision in precisions)
    for (results, states), (again, others) in zip(unscaled, scaled, strict=True):
        assert [result[:3] for result in results] == [result[:3] for result in again]
        for name, state in states.items():
            assert np.array_equal(state, others[name]), name


def states_after(group, case: Case, plan: Plan, precision: Precision, steps: int):
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, precision), OPTIMIZER)
        results = [one_step(trainer, case, 2, step) for step in range(steps)]
        states = trainer.state.optimizer_states
        return results, {name: trainer.state.whole(buffer).copy() for name, buffer in states.items()}


@pytest.mark.parametrize("clip_grad", [0.0, 0.5, 1e6])
def test_the_scale_is_divided_out_however_gradients_are_clipped(ranks, clip_grad):
    """At all, hardly, or not: the gradients that Adam is given, and not the norm alone, are those of the loss."""
    one, other = (ranks.run(1, gradients_after_a_step, OptimizerConfig(1e-2, 10, clip_grad=clip_grad), scale)[0]
                  for scale in (1.0, 2.0**20))
    assert np.array_equal(one, other)


def gradients_after_a_step(group, optimizer: OptimizerConfig, scale: float):
    case = replace(CASE, t=1)
    with connected(group, Plan().parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision("bfloat16",
                                     LossScaling(loss_scale=scale))), optimizer)
        one_step(trainer, case, 1, 0)
        return trainer.state.gradients.own.flat.copy()


@EVERY_PLAN
def test_too_large_a_scale_is_halved_until_it_is_not(ranks, name):
    """Every rank skips the same steps."""
    skipped = ranks.run(8, scale_is_found, CASE, PLANS[name])
    assert skipped == [skipped[0]] * 8


def scale_is_found(group, case: Case, plan: Plan, steps: int = 14) -> int:
    """Check that the loss scale is halved after each skipped step but the first, which hysteresis allows, and that
    skipped steps neither count as updates nor advance the learning rate. Return the number of skipped steps.
    """
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision("float16",
                                     LossScaling(initial_loss_scale=2.0**24))), OPTIMIZER)
        results = [one_step(trainer, case, 2, step) for step in range(steps)]
        first = [result.skipped for result in results].index(False)
        assert 3 < first < steps - 1 and not any(result.skipped for result in results[first:])
        assert all(isfinite(result.loss) for result in results)
        assert [result.loss_scale for result in results] == [2.0**min(24, 25 - min(i, first)) for i in range(steps)]
        assert (trainer.iteration, trainer.optimizer.iteration) == (steps, steps - first)
        assert [result.learning_rate for result in results[first:]] == [
            learning_rate(OPTIMIZER, 1 + i) for i in range(steps - first)]
        return first


@settings(max_examples=settings().max_examples // 5)
@given(st.sampled_from(sorted(PLANS)), st.integers(0, 7), st.sampled_from([np.inf, -np.inf, np.nan]),
       st.integers(0, 10**6))
def test_one_overflow_on_one_rank_skips_the_step_on_all(ranks, plan, rank, value, where):
    """Whoever finds it, wherever: no rank moves a weight, or a moment, and all halve the scale."""
    ranks.run(8, one_overflow_skips_on_all, CASE, PLANS[plan], rank, value, where)


def one_overflow_skips_on_all(group, case: Case, plan: Plan, rank: int, value: float, where: int) -> None:
    with connected(group, plan.parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision("float16",
                                     LossScaling(initial_loss_scale=128.0, hysteresis=1))), OPTIMIZER)
        one_step(trainer, case, 2, 0)
        before = {name: buffer.flat.copy() for name, buffer in buffers(trainer).items()}
        if group.rank == rank:
            spoil_once(trainer, value, where)
        result = one_step(trainer, case, 2, 1)
        assert result.skipped and trainer.scaler.scale == 64.0
        assert (trainer.iteration, trainer.optimizer.iteration) == (2, 1)
        assert all(np.array_equal(before[name], buffer.flat) for name, buffer in buffers(trainer).items())


def buffers(trainer: Trainer):
    return trainer.state.optimizer_states | {"of the model": trainer.state.parameters.own}


def spoil_once(trainer: Trainer, value: float, where: int) -> None:
    """Set one element of a weight gradient to a value in the middle of the step, before it is sent, as if a matrix
    product had computed it.
    """
    expect = trainer.state.gradients.expect

    def spoiled(microbatches: int) -> None:
        expect(microbatches)
        pieces = [piece for piece in trainer.state.counted if piece.size] or trainer.state.pieces
        piece = pieces[where % len(pieces)]
        at = trainer.state.gradients.own.load(piece)
        at[where % at.size] = value

    trainer.state.gradients.expect = spoiled


@EVERY_PLAN_AND_HALF
def test_master_weights_that_were_loaded_are_rounded_to_the_models(ranks, name, compute):
    ranks.run(8, weights_are_the_masters, CASE, PLANS[name], compute)


def weights_are_the_masters(group, case: Case, plan: Plan, compute: str) -> None:
    """Change the master weights, as a checkpoint does: the model's follow on all replicas."""
    with connected(group, plan.parallel(group.size, case)) as topology:
        state = ModelState(case.model, topology, case.seed, Precision(compute))
        master = state.optimizer_states["parameters"]
        for tile in tiles(state.pieces, state.device_prototype):
            master.store(tile.place, 3 * master.load(tile.place))
        expected = state.whole(master).astype(dtype_of(compute))
        state.adopt_master_weights()
        assert expected.any() and state.whole(state.parameters.own).tobytes() == expected.tobytes()
        if plan.zero_stage < 3:     # all parameters are on every replica
            assert state.parameters.own.flat.tobytes() == expected.tobytes()


@pytest.mark.parametrize("compute", HALVES)
def test_verify_measures_weights_by_the_rate(compute):
    """They are master weights, in float32: what their copy in 16 bits is rounded to is no excuse."""
    params = {"weight": np.ones(3, np.float32)}
    verifier = SimpleNamespace(precision=Precision(compute), textbook=SimpleNamespace(params=params))
    assert Verifier.step_size(verifier, StepResult((5.0,), 1.0, 1e-3)) == pytest.approx(1e-3, rel=0.01)


# ---- what float32 is kept for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute, lr", every_other_deep([("bfloat16", 2.0**-12), ("float16", 2.0**-15)]))
def test_small_updates_are_not_lost(ranks, compute, lr):
    """A step of lr on a weight near 1 is below the format's half distance: the master weights move all the same, and
    after enough steps so do the model's.
    """
    ranks.run(2, gains_move, compute, lr)


def gains_move(group, compute: str, lr: float, steps: int = 40) -> None:
    """Check that the gains of the final layer norm, which start at 1, move in the master weights and in the model."""
    with connected(group, Plan().parallel(group.size, CASE)) as topology:
        trainer = Trainer(ModelState(CASE.model, topology, CASE.seed, precision_of(compute)),
                          OptimizerConfig(lr, steps, lr_decay_style="constant"))
        for _ in range(steps):
            one_step(trainer, CASE, 1, step=0)
        master, model = (trainer.state.layout.views(trainer.state.whole(buffer)).final_layernorm.weight
                         for buffer in (trainer.state.optimizer_states["parameters"], trainer.state.parameters.own))
        assert (abs(master - 1) > 8 * lr).mean() > 0.5
        assert (model == master.astype(model.dtype)).all() and (model != 1).any()


def test_gradients_are_not_rounded_before_the_end(ranks):
    """Not after the product that makes them, nor over microbatches, nor over replicas."""
    ranks.run(4, main_gradients_have_more_digits, "bfloat16")


def main_gradients_have_more_digits(group, compute: str) -> None:
    """Check that most sums of weight gradients are no numbers of the model's format.

    All microbatches of all replicas are equal, and nothing is dropped, so the sum is a power of two times each. If one
    of them were rounded on its way, the sum would be a number of that format.
    """
    case = replace(CASE, model=replace(CASE.model, hidden_dropout=0.0, attention_dropout=0.0))
    with connected(group, Plan().parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, case.seed, Precision(compute)),
                          replace(OPTIMIZER, clip_grad=0.0))
        trainer.step([case.batch("", case.b)] * 2, 2 * topology.data.size * case.b)
        for name, x in leaves(trainer.state.layout.views(trainer.state.gradients.own.flat)):
            if x.ndim > 1 and "embedding" not in name:
                assert (x.astype(dtype_of(compute)) != x).mean() > 0.5, name


def test_a_loss_in_float16_loses_no_gradient_of_logits(ranks):
    """Of many words each has a small one, and together they are half of it: of order 2^-15 here, with its scale."""
    model = ModelConfig(1, 16, 2, 3000, 8, hidden_dropout=0.0, attention_dropout=0.0, fp16_lm_cross_entropy=True)
    (error,) = ranks.run(1, relative_error_of_the_loss, Case(1, model, 8, 8, seed=3))
    assert error < 4 * FORMATS["float16"].epsilon


def relative_error_of_the_loss(group, case: Case, scale: float = 4.0) -> float:
    """Return the gradients' relative error as relative_error does, with a scale at which a logit's gradient is small
    but still a number of float16.
    """
    with connected(group, Plan().parallel(group.size, case)) as topology:
        ours, exact = (Trainer(ModelState(case.model, topology, case.seed, precision), OPTIMIZER) for precision in
                       (Precision("float16", LossScaling(loss_scale=scale)), Precision("float32")))
        exact.state.parameters.own.flat[...] = ours.state.optimizer_states["parameters"].flat
        for trainer in (ours, exact):
            one_step(trainer, case, 1, 0)
        found, expected = ours.state.gradients.own.flat, exact.state.gradients.own.flat
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


LOSSES = {"gpt": (gpt, "logits_backward"), "bert": (bert, "masked_lm_backward")}      # of words, and what follows


@pytest.mark.parametrize("compute", HALVES)
@pytest.mark.parametrize("asked_for", [False, True])
@pytest.mark.parametrize("architecture", LOSSES)
def test_softmax_and_loss_are_in_float32(ranks, compute, asked_for, architecture):
    """Unless --fp16-lm-cross-entropy asks for less; and so is its gradient, until it is that of the logits."""
    ranks.run(2, the_loss_has_its_format, compute, asked_for, architecture)


def the_loss_has_its_format(group, compute: str, asked_for: bool, architecture: str = "gpt") -> None:
    case = replace(CASE, model=replace(CASE.model, architecture=architecture, fp16_lm_cross_entropy=asked_for))
    module, following = LOSSES[architecture]
    expected = np.float32 if not asked_for else dtype_of(compute)
    with (connected(group, Plan().parallel(group.size, case)) as topology,
          mock.patch.object(module, "cross_entropy_backward", wraps=module.cross_entropy_backward) as backward,
          mock.patch.object(module, following, wraps=getattr(module, following)) as after):
        result = one_step(Trainer(ModelState(case.model, topology, case.seed, precision_of(compute)),
                                  OPTIMIZER), case, 1, 0)
        dloss, (kept, highest, total, *_) = backward.call_args.args
        assert dloss.dtype == highest.dtype == total.dtype == expected and kept.dtype == dtype_of(compute)
        assert after.call_args.args[0].dtype == dtype_of(compute) and not result.skipped
