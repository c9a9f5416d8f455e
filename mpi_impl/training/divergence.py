"""When a run is over because its numbers are: where they first went wrong, in a sentence."""
from collections.abc import Sequence
from math import isfinite

from mpi_impl.recording.not_finite import first_not_finite
from mpi_impl.training.trainer import StepResult, Trainer
from reference.errors import UserError

ENOUGH = 20     # skipped steps in a row, where the loss scale cannot become smaller


class DivergenceCheck:
    """Looks at every result. A step whose gradients are not finite has moved no weight, so it can be looked into."""

    def __init__(self, trainer: Trainer, lr: float):
        self.trainer, self.lr = trainer, lr
        self.skipped_in_a_row = 0
        self.last_checkpoint = ""      # its folder, for the sentence

    def step(self, iteration: int, result: StepResult, microbatches: Sequence, global_batch_size: int) -> None:
        """Raises UserError, on all ranks alike, if the run has diverged. `microbatches` are those of the step.

        Only a gradient that overflows float16 is no reason to end, for a smaller loss scale may help.
        """
        lowest = self.trainer.precision.scaling.lowest(result.loss_scale)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped and lowest else 0
        fatal = {"loss": result.loss}
        if not self.trainer.precision.scaled:
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
        """Raises UserError if the loss of an evaluation after this iteration is not finite."""
        if not isfinite(loss):
            raise self.diverged(f"The validation loss of iteration {iteration} is {loss}")

    def diverged(self, what: str, where: str = "") -> UserError:
        """`where` tells where it began, in sentences."""
        sentences = [f"{what}: the run has diverged.", where,
                     f"Try a smaller --lr, now {self.lr}, or a longer warm-up (--lr-warmup-iters).",
                     f"The last checkpoint is {self.last_checkpoint}. (If a run from there diverges at once, it was "
                     "too late already: load an earlier one.)" if self.last_checkpoint else ""]
        return UserError(" ".join(filter(None, sentences)))
