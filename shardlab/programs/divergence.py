"""Divergence: when a run must end because its numbers are not finite, and where they first went wrong."""
from collections.abc import Sequence
from math import isfinite

from mpi_impl.training.trainer import StepResult, Trainer
from reference.errors import UserError
from shardlab.compare.not_finite import FiniteCheck

ENOUGH = 20     # skipped steps in a row, where the loss scale cannot become smaller


class DivergenceCheck:
    """A check of every result. A step whose gradients are not finite has moved no weight, so it can be repeated."""

    def __init__(self, trainer: Trainer, lr: float):
        self.trainer, self.lr = trainer, lr
        self.skipped_in_a_row = 0
        self.last_checkpoint = ""      # its folder, for the sentence

    def step(self, iteration: int, result: StepResult, microbatches: Sequence, global_batch_size: int) -> None:
        """Raise UserError, on all ranks, if the run has diverged. `microbatches` are those of the step.

        A gradient that overflows float16 is no reason to end: a smaller loss scale may help.
        """
        lowest = self.trainer.state.precision.scaling.lowest(result.loss_scale)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped and lowest else 0
        fatal = {"loss": result.loss}
        if not self.trainer.state.precision.scaled:
            fatal["gradient's norm"] = result.grad_norm
        for what, value in fatal.items():
            if not isfinite(value):
                where = first_not_finite(self.trainer, microbatches, global_batch_size) if result.skipped else ""
                raise self.diverged(f"The {what} of iteration {iteration} is {value}", where)
        if self.skipped_in_a_row == ENOUGH:
            raise self.diverged(f"Until iteration {iteration} the gradients of {self.skipped_in_a_row} iterations in a "
                                f"row overflow float16 with a loss scale of {result.loss_scale:g}, and it cannot become"
                                " smaller")

    def evaluation(self, iteration: int, loss: float) -> None:
        """Raise UserError if the loss of an evaluation after this iteration is not finite."""
        if not isfinite(loss):
            raise self.diverged(f"The validation loss of iteration {iteration} is {loss}")

    def diverged(self, what: str, where: str = "") -> UserError:
        """Return the error. `where` says where it began, in sentences."""
        sentences = [f"{what}: the run has diverged.", where,
                     f"Try a smaller --lr, now {self.lr}, or a longer warm-up (--lr-warmup-iters).",
                     f"The last checkpoint is {self.last_checkpoint}. (If a run from there diverges at once, it was "
                     "too late already: load an earlier one.)" if self.last_checkpoint else ""]
        return UserError(" ".join(filter(None, sentences)))


def first_not_finite(trainer: Trainer, microbatches: Sequence, global_batch_size: int) -> str:
    """Compute the trainer's last step again, which was skipped; say where its first infinity or NaN is.

    `microbatches` are those of that step. All ranks call this, and get the same answer.
    """
    check = FiniteCheck(trainer.state)
    trainer.compute_step(microbatches, global_batch_size, check)
    return check.describe()
