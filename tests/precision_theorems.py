"""Theorems about training in 16 bits on real ranks: how far it may be from float32, and what must stay in float32."""
from dataclasses import replace
from functools import partial
from math import isfinite, sqrt
from unittest import mock

import numpy as np

from mpi_impl.models import bert, gpt
from mpi_impl.runtime.arrays import dtype_of
from mpi_impl.training.trainer import StepResult, Trainer
from reference.config import ModelConfig
from reference.layer_context import LayerContext
from reference.layers.cross_entropy import cross_entropy_backward
from reference.models import bert as textbook_bert
from reference.models.bert import SCORES
from reference.models.model import model_backward, model_forward, sequences_of
from reference.models.stage import join_stages
from reference.optimizers.adam import OptimizerConfig, clip_coefficient, learning_rate
from reference.params import assign, join, leaves, tree_map
from reference.precision import FORMATS, LossScaling, Precision
from reference.random.dropout import Dropout
from reference.training import trainer as training
from tests.cases import Case
from tests.rank_theorems import first_checks
from tests.training_theorems import ALONE, Plan, batch_of, trainer_on

CASE = Case(2, ModelConfig(3, 16, 4, 21, 6, make_vocab_size_divisible_by=3), 2, 6, seed=11)
OPTIMIZER = OptimizerConfig(1e-2, 10, clip_grad=0.5)


def precision_of(compute: str, scale: float = 256.0) -> Precision:
    """Return a precision; in float16 the usual loss scale avoids nearly all overflow and underflow."""
    return Precision(compute, LossScaling(loss_scale=scale if compute == "float16" else 1.0))


def one_step(trainer: Trainer, case: Case, m: int, step: int) -> StepResult:
    with np.errstate(over="ignore", invalid="ignore"):
        return trainer.step(*batch_of(trainer, case, m, step))


# ---- how far from float32 -------------------------------------------------------------------------------------------


def close_to_float32(group, case: Case, m: int, plan: Plan, compute: str, steps: int = 2, skips: int = 0) -> None:
    """Check each step against the textbook's. In the first `skips` steps the loss scale is so large that gradients
    overflow.
    """
    optimizer = plan.optimizer(1e-2, 10, clip_grad=0.5)
    with trainer_on(group, case, plan, precision_of(compute), optimizer) as ours:
        textbook = training.Trainer(case.model, optimizer, case.seed, ours.state.precision)
        usual = ours.scaler.state
        for step in range(steps):
            ours.scaler.state = usual._replace(scale=2.0**100) if step < skips else usual
            result = one_step(ours, case, m, step)
            assert result.skipped or step >= skips
            batch = case.batch(str(step), m * ours.topology.data.size * case.b)
            flats = [ours.state.whole(buffer)
                     for buffer in (ours.state.gradients.own, ours.state.optimizer_states["parameters"])]
            found = ours.topology.place, result, ours.state.layout.tensors, *map(ours.state.layout.views, flats)
            first_checks(group, found, lambda everyone, batch=batch: as_the_format_explains(
                textbook, batch, everyone, FORMATS[compute].epsilon))


def as_the_format_explains(textbook: training.Trainer, batch, everyone, epsilon: float) -> None:
    """Assert that the ranks differ from the textbook by no more than rounding explains.

    Each layer rounds about 12 times forward and 12 times backward; the embedding, the head and the loss round 8 times
    in all. A rounding's error is at most epsilon / 2, and errors are nearly independent, so epsilon sqrt(n) is twice
    the expected size. It is an error of what is rounded, which is larger than their sum where answers cancel.
    """
    results = [result for _, result, *_ in everyone]
    (skipped,) = {result.skipped for result in results}
    rounded = length_of_answers(textbook, batch) if "lm" not in textbook.model.heads else 0.0
    loss, norm, expected = textbook.step(batch, skipped)
    assert abs(results[0].loss - loss) <= epsilon / 4 * max(1, loss)
    if skipped:
        return
    assert len(set(results)) == 1, "ranks report different losses or norms"
    stages = {place.pipeline: [one for one in everyone if one[0][1:] == (0, 0, place.pipeline)]
              for place, *_ in everyone}
    grads, params = (join_stages([join([one[field] for one in stages[stage]], stages[stage][0][2])
                                  for stage in sorted(stages)]) for field in (3, 4))
    n, rounded = 24 * textbook.model.num_layers + 8, max(norm, rounded)
    clip = clip_coefficient(norm, textbook.optimizer.clip_grad)
    assert distance(grads, expected) <= epsilon * sqrt(n) * rounded * clip
    assert abs(results[0].grad_norm - norm) <= epsilon * sqrt(n) * rounded
    tree_map(assign, textbook.params, params)     # each step is compared from the same weights


def length_of_answers(textbook: training.Trainer, batch) -> float:
    """Return the length of the next step's gradient if the answers' parts of it were at right angles."""
    c, p, squares = textbook.model, textbook.in_format(textbook.params), 0.0
    dropout = Dropout(c, textbook.seed, textbook.iteration + 1)
    (loss,), cache = model_forward(None, p, c, batch, LayerContext(dropout))
    (weights,) = batch.weights_of_heads(c.heads)
    dloss = (weights / max(weights.sum(), 1)).astype(loss.dtype)
    for answer in np.ndindex(*loss.shape, sequences_of(c) * SCORES.get(c.heads[0], batch.tokens.shape[1])):
        with mock.patch.object(textbook_bert, "cross_entropy_backward", partial(part_of_dlogits, answer)):
            _, grads = model_backward((dloss,), p, cache, c)
        squares += length(grads)**2
    return sqrt(squares)


def part_of_dlogits(answer: tuple[int, int], dloss, cache):
    """Return the gradient of the scores that one answer gets, and zeros for the others."""
    dlogits = cross_entropy_backward(dloss, cache)
    return np.where(np.arange(dlogits.size).reshape(dlogits.shape) == np.ravel_multi_index(answer, dlogits.shape),
                    dlogits, 0)


def length(tree) -> float:
    return sqrt(sum(float(np.vdot(x, x)) for _, x in leaves(tree)))


def distance(tree, expected) -> float:
    return length(tree_map(np.subtract, tree, expected))


def relative_error(group, case: Case, plan: Plan, compute: str, m: int = 2, scale: float = 256.0) -> float:
    """Return the relative error of this rank's gradients against those in float32 from the same weights."""
    with (trainer_on(group, case, plan, precision_of(compute, scale), OPTIMIZER) as ours,
          trainer_on(group, case, plan, Precision("float32"), OPTIMIZER) as exact):
        exact.state.parameters.own.flat[...] = ours.state.optimizer_states["parameters"].flat
        for trainer in (ours, exact):
            one_step(trainer, case, m, 0)
        found, expected = ours.state.gradients.own.flat, exact.state.gradients.own.flat
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---- the loss scale -------------------------------------------------------------------------------------------------


def scale_is_found(group, case: Case, plan: Plan, steps: int = 14) -> int:
    """Check that the loss scale is halved after each skipped step but the first, which hysteresis allows, and that
    skipped steps neither count as updates nor advance the learning rate. Return the number of skipped steps.
    """
    precision = Precision("float16", LossScaling(initial_loss_scale=2.0**24))
    with trainer_on(group, case, plan, precision, OPTIMIZER) as trainer:
        results = [one_step(trainer, case, 2, step) for step in range(steps)]
        first = [result.skipped for result in results].index(False)
        assert 3 < first < steps - 1 and not any(result.skipped for result in results[first:])
        assert all(isfinite(result.loss) for result in results)
        assert [result.loss_scale for result in results] == [2.0**min(24, 25 - min(i, first)) for i in range(steps)]
        assert (trainer.iteration, trainer.optimizer.iteration) == (steps, steps - first)
        assert [result.learning_rate for result in results[first:]] == [
            learning_rate(OPTIMIZER, 1 + i) for i in range(steps - first)]
        return first


def one_overflow_skips_on_all(group, case: Case, plan: Plan, rank: int, value: float, where: int) -> None:
    """Check that no rank moves a weight or a moment, and that all halve the scale, whoever finds the overflow."""
    precision = Precision("float16", LossScaling(initial_loss_scale=128.0, hysteresis=1))
    with trainer_on(group, case, plan, precision, OPTIMIZER) as trainer:
        one_step(trainer, case, 2, 0)
        buffers = trainer.state.optimizer_states | {"of the model": trainer.state.parameters.own}
        before = {name: buffer.flat.copy() for name, buffer in buffers.items()}
        if group.rank == rank:
            spoil_once(trainer, value, where)
        result = one_step(trainer, case, 2, 1)
        assert result.skipped and trainer.scaler.scale == 64.0
        assert (trainer.iteration, trainer.optimizer.iteration) == (2, 1)
        assert all(np.array_equal(before[name], buffer.flat) for name, buffer in buffers.items())


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


# ---- what float32 is kept for ---------------------------------------------------------------------------------------


def gains_move(group, compute: str, lr: float, steps: int = 40) -> None:
    """Check that the gains of the final layer norm, which start at 1, move in the master weights and in the model,
    though each step is below the half distance of the model's format.
    """
    optimizer = OptimizerConfig(lr, steps, lr_decay_style="constant")
    with trainer_on(group, CASE, ALONE, precision_of(compute), optimizer) as trainer:
        for _ in range(steps):
            one_step(trainer, CASE, 1, step=0)
        master, model = (trainer.state.layout.views(trainer.state.whole(buffer)).final_layernorm.weight
                         for buffer in (trainer.state.optimizer_states["parameters"], trainer.state.parameters.own))
        assert (abs(master - 1) > 8 * lr).mean() > 0.5
        assert (model == master.astype(model.dtype)).all() and (model != 1).any()


def main_gradients_have_more_digits(group, compute: str) -> None:
    """Check that most sums of weight gradients are no numbers of the model's format.

    All microbatches of all replicas are equal, and nothing is dropped, so the sum is a power of two times each. If one
    of them were rounded on its way, the sum would be a number of that format.
    """
    case = replace(CASE, model=replace(CASE.model, hidden_dropout=0.0, attention_dropout=0.0))
    with trainer_on(group, case, ALONE, Precision(compute), replace(OPTIMIZER, clip_grad=0.0)) as trainer:
        trainer.step([case.batch("", case.b)] * 2, 2 * trainer.topology.data.size * case.b)
        for name, x in leaves(trainer.state.layout.views(trainer.state.gradients.own.flat)):
            if x.ndim > 1 and "embedding" not in name:
                assert (x.astype(dtype_of(compute)) != x).mean() > 0.5, name


LOSSES = {"gpt": (gpt, "logits_backward"), "bert": (bert, "masked_lm_backward")}      # of words, and what follows


def the_loss_has_its_format(group, compute: str, asked_for: bool, architecture: str = "gpt") -> None:
    """Check that softmax, the loss and its gradient are in float32, unless --fp16-lm-cross-entropy asks for less."""
    case = replace(CASE, model=replace(CASE.model, architecture=architecture, fp16_lm_cross_entropy=asked_for))
    module, following = LOSSES[architecture]
    expected = np.float32 if not asked_for else dtype_of(compute)
    with (trainer_on(group, case, ALONE, precision_of(compute), OPTIMIZER) as trainer,
          mock.patch.object(module, "cross_entropy_backward", wraps=module.cross_entropy_backward) as backward,
          mock.patch.object(module, following, wraps=getattr(module, following)) as after):
        result = one_step(trainer, case, 1, 0)
        dloss, (kept, highest, total, *_) = backward.call_args.args
        assert dloss.dtype == highest.dtype == total.dtype == expected and kept.dtype == dtype_of(compute)
        assert after.call_args.args[0].dtype == dtype_of(compute) and not result.skipped
