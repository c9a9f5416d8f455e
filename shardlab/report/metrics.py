"""The metrics of a running run: a line from time to time for a person, JSON lines for a program."""
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from math import exp, frexp

from mpi_impl.runtime.files import open_for_writing, read_bytes, writing
from mpi_impl.training.trainer import StepResult
from shardlab.report.throughput import Throughput


class Metrics:
    """The curves of a run, on every rank; the one that `speaks` prints progress and writes `--metrics-file`."""

    def __init__(self, train_iters: int, tokens_per_step: int, log_interval: int, path: str | None, speaks: bool,
                 heads: Sequence[str] = ("lm",), scaled: bool = False, begins: int = 0,
                 throughput: Throughput | None = None, layers_with_experts: int = 0):
        """Take the model's `heads`, and whether the loss is `scaled`, so that its scale is printed.

        A run that `begins` after some iterations appends to the existing file. With `throughput`, FLOP rates are
        printed.
        """
        self.train_iters, self.tokens_per_step, self.log_interval = train_iters, tokens_per_step, log_interval
        self.speaks, self.heads, self.scaled, self.throughput = speaks, heads, scaled, throughput
        self.layers_with_experts = layers_with_experts
        self.file = open_for_writing(path, rows_until(begins, path)) if path and speaks else None
        self.losses: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.step_seconds: list[float] = []                # since the last printed line
        self.seconds = 0.0                                 # spent in steps,
        self.steps = 0                                     # of this run, which may have begun at a checkpoint
        self.skipped = self.skipped_printed = 0               # steps, in all and until the last printed line

    def step(self, iteration: int, result: StepResult, seconds: float, note: str = "") -> None:
        """Record a step, counted from 1, and its seconds."""
        self.losses.append((iteration, result.loss))
        self.step_seconds.append(seconds)
        self.seconds += seconds
        self.steps += 1
        self.skipped += result.skipped
        scale = {"loss_scale": result.loss_scale, "skipped": result.skipped} if self.scaled else {}
        losses = {f"{head}_loss": loss for head, loss in zip(self.heads, result.losses)}
        losses |= dict(zip(("load_balancing_loss", "z_loss"), self.of_a_layer(result)))
        self.write(iteration=iteration, **losses, grad_norm=None if result.skipped else result.grad_norm,
                   learning_rate=result.learning_rate, **scale, tokens_per_second=self.tokens_per_step / seconds,
                   **(self.throughput.row(seconds) if self.throughput else {}),
                   consumed_tokens=iteration * self.tokens_per_step)
        if self.speaks and (iteration % self.log_interval == 0 or self.steps == 1 or iteration == self.train_iters):
            self.print_line(iteration, result, note)

    def print_line(self, iteration: int, result: StepResult, note: str) -> None:
        each = sum(self.step_seconds) / len(self.step_seconds)
        seconds = self.seconds / self.steps * (self.train_iters - iteration)
        left = f" | {duration(seconds)} left" if self.steps > 1 else ""    # the first step is slower than all others
        rates = f" | {self.throughput.describe(each)}" if self.throughput else ""
        self.step_seconds.clear()
        print(f"iteration {iteration:>6}/{self.train_iters} | loss {self.format_losses(result.losses)} | grad norm "
              f"{plain(result.grad_norm, 3)} | lr {result.learning_rate:.2e} | {self.balance(result)}"
              f"{self.scale(result)}{each:.3g} s/iteration | {self.tokens_per_step / each:,.0f} tokens/s{rates}{left}"
              f"{' | ' if note else ''}{note}", flush=True)

    def of_a_layer(self, result: StepResult) -> list[float]:
        """Return the losses of experts, the means over the layers that have some."""
        return [loss / self.layers_with_experts for loss in result.auxiliary]

    def balance(self, result: StepResult) -> str:
        """Format the load-balancing loss, which is 1 where every expert is chosen as often and as probably."""
        return f"load balance {plain(self.of_a_layer(result)[0], 3)} | " if result.auxiliary else ""

    def scale(self, result: StepResult) -> str:
        """Format the loss scale, and the number of steps skipped since the last line."""
        if not self.scaled:
            return ""
        skipped, self.skipped_printed = self.skipped - self.skipped_printed, self.skipped
        fraction, exponent = frexp(result.loss_scale)
        scale = f"2^{exponent - 1}" if fraction == 0.5 else f"{result.loss_scale:g}"
        return f"loss scale {scale} | " + (f"{skipped} skipped | " if skipped else "")

    def format_losses(self, losses: Sequence[float]) -> str:
        """Format the loss, and if there are several heads, their losses."""
        parts = ", ".join(f"{head} {plain(loss, 4).strip()}" for head, loss in zip(self.heads, losses))
        return plain(sum(losses), 4) + (f" ({parts})" if len(self.heads) > 1 else "")

    def evaluation(self, iteration: int, losses: Sequence[float]) -> None:
        """Report the losses of the heads; the perplexity is that of tokens."""
        loss, perplexity = sum(losses), exp(min(losses[0], 700.0))                 # exp(710) is infinite
        self.validation.append((iteration, loss))
        others = {f"validation_{head}_loss": one for head, one in zip(self.heads, losses)} if self.heads[1:] else {}
        self.write(iteration=iteration, validation_loss=loss, **others, validation_perplexity=perplexity)
        if self.speaks:
            print(f"validation at {iteration:>6} | loss {self.format_losses(losses)} | perplexity "
                  f"{f'{perplexity:,.1f}' if perplexity < 1e9 else f'{perplexity:.1e}'}", flush=True)

    def write(self, **values) -> None:
        if self.file:
            with writing(self.file.name):
                print(json.dumps(values), file=self.file, flush=True)


def rows_until(iteration: int, path: str) -> str:
    """Read the lines that a run before this one has written about the iterations until this one."""
    if iteration == 0 or not os.path.exists(path):
        return ""
    lines = read_bytes(path).decode(errors="replace").splitlines(keepends=True)
    return "".join(line for line in lines if is_row_until(iteration, line))


def is_row_until(iteration: int, line: str) -> bool:
    """Report whether this is a whole line, unlike the last one of a killed run, of this iteration or before."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        of = row.get("iteration", 0) if isinstance(row, dict) else None
        return isinstance(of, int) and of <= iteration and line.endswith("\n")
    return False


def plain(x: float, digits: int) -> str:
    """Format a number in eight characters or nine, even in a diverging run."""
    return f"{x:8.{digits}f}" if abs(x) < 1e4 else f"{x:8.1e}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}h {minutes % 60:02}m" if minutes >= 60 else f"{minutes}m {seconds:02}s"
