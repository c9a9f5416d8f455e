"""Theorems on real ranks about exact numbers (reference/exact/): equality of formulas, with the chance of an error."""
from collections.abc import Callable
from itertools import count

from reference.exact.array import ExactArray, as_exact
from reference.exact.degree import TALLY, Tally
from reference.optimizers.adam import OptimizerConfig, clip_coefficient
from reference.precision import Precision
from reference.training import trainer as training
from tests.cases import ExactCase
from tests.training_theorems import Plan, start_textbook_from_random_numbers, training_equals_one_process

MOST = 1e-12        # the chance that different formulas agree, in any of these theorems


def proved(group, theorem: Callable, *args) -> float:
    """Check a theorem on exact numbers; return the chance that it is false nevertheless, at most MOST.

    The evaluations of all ranks count, although most are the same on several.
    """
    TALLY.begin()
    theorem(group, *args, wrap=as_exact)
    everyone = group.comm.allgather(TALLY)
    chance = Tally(sum(one.evaluations for one in everyone), max(one.degree for one in everyone)).chance_of_error()
    assert chance < MOST, f"different formulas would agree with a chance of {chance:.1e}"
    return chance


def training_that_clips(group, case: ExactCase, clips: bool, microbatches: int, plan: Plan, wrap=as_exact) -> None:
    """Check a run whose first step clips its gradients, or does not."""
    batch = microbatches * case.b * group.size // (case.t * plan.p)
    bound = group.broadcast_object(lambda: bound_of_the_norm(case, clips, batch))
    training_equals_one_process(group, case, 2, microbatches, bound, plan, wrap)


def bound_of_the_norm(case: ExactCase, clips: bool, batch: int) -> float:
    """Return a --clip-grad with which the first step clips, or does not: exact numbers are in a random order."""
    textbook = training.Trainer(case.model, OptimizerConfig(1e-2, 10), case.seed, Precision("float64"))
    start_textbook_from_random_numbers(case, textbook)
    _, norm, _ = textbook.step(case.batch("0", batch))
    return next(bound for bound in count(0.5, 0.25) if isinstance(clip_coefficient(norm, bound), ExactArray) == clips)
