"""A run that diverges ends in a sentence, and a gradient that overflows float16 is not a divergence yet."""
from math import inf, nan
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from mpi_impl.checkpoints import checkpoint
from mpi_impl.checkpoints.on_disk import tracked
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import StepResult, Trainer
from reference.config import ModelConfig
from reference.errors import UserError
from reference.optimizers.adam import OptimizerConfig
from reference.precision import UNSCALED, LossScaler, LossScaling, Precision
from shardlab.programs import divergence
from shardlab.programs.divergence import ENOUGH, DivergenceCheck
from tests.program import refusal
from tests.strategies import Case
from tests.training_theorems import Plan, connected


def check_of(compute: str, scaling: LossScaling = UNSCALED) -> DivergenceCheck:
    state = SimpleNamespace(precision=Precision(compute, scaling))
    trainer = SimpleNamespace(state=state, scaler=LossScaler(scaling))
    return DivergenceCheck(trainer, 0.5)     # type: ignore[arg-type]


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize("loss, norm, named", [(2.0, 1.0, ""), (inf, nan, "loss"), (2.0, nan, "gradient's norm")])
def test_what_ends_a_run(compute, loss, norm, named):
    """A loss in any format; a gradient, but for float16's. It is looked into if no weight has moved."""
    check, result = check_of(compute), StepResult((loss,), norm, 0.1)
    with mock.patch.object(divergence, "first_not_finite", return_value="It begins here.") as look:
        if not named or (compute == "float16" and named != "loss"):
            check.step(7, result, [], 4)
        else:
            check.last_checkpoint = "runs/iter_0000002"
            with pytest.raises(UserError, match=f"The {named} of iteration 7 is .* --lr.* runs/iter_0000002") as error:
                check.step(7, result, [], 4)
            assert ("It begins here." in str(error.value)) == result.skipped == (look.call_count == 1)


def test_too_many_skipped_steps_end_a_run():
    """Only if they come one after another."""
    overflow, fine = StepResult((2.0,), inf, 0.1, 1.0), StepResult((2.0,), 1.0, 0.1, 1.0)
    check = check_of("float16", LossScaling(loss_scale=1.0))
    for result in [*[overflow] * (ENOUGH - 1), fine, *[overflow] * (ENOUGH - 1)]:
        check.step(1, result, [], 4)
    with pytest.raises(UserError, match=f"of {ENOUGH} iterations in a row"):
        check.step(1, overflow, [], 4)


def test_the_lowest_scale_is_tried_before_a_run_ends():
    """Steps that overflowed at a higher scale do not count: at the lowest there may be no overflow."""
    check = check_of("float16", LossScaling(initial_loss_scale=2.0**40, min_loss_scale=2.0**8, hysteresis=1))
    scaler, tried = check.trainer.scaler, []
    with pytest.raises(UserError, match="a loss scale of 256,"):
        for _ in range(200):
            tried.append(scaler.scale)
            scaler.update(True)
            check.step(len(tried), StepResult((2.0,), inf, 0.1, tried[-1]), [], 4)
    assert tried.count(2.0**8) == ENOUGH


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_no_checkpoint_of_what_is_not_finite(ranks, tmp_path, compute):
    """One element of one rank is enough; the good checkpoint stays."""
    for said in ranks.run(4, refusal, save_and_spoil, str(tmp_path), compute):
        assert "Adam's v of blocks.1.mlp.w_in" in said and "on rank 3" in said
    assert tracked(str(tmp_path)) == 0 and not list(tmp_path.glob("*.tmp"))


def save_and_spoil(group, root, compute) -> str:
    case = Case(2, ModelConfig(2, 8, 2, 11, 4), 1, 4, seed=1)
    with connected(group, Plan(2).parallel(group.size, case)) as topology:
        trainer = Trainer(ModelState(case.model, topology, 1, Precision(compute)), OptimizerConfig(1e-3, 5))
        checkpoint.save(trainer, root, {})
        if group.rank == 3:
            (piece,) = (piece for piece in trainer.state.pieces if piece.of.name == "blocks.1.mlp.w_in")
            trainer.state.optimizer_states["v"].load(piece)[5] = np.inf
        trainer.iteration = 1
        checkpoint.save(trainer, root, {})
