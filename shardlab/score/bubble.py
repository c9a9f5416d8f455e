"""bubble: let a step of a pipeline end as early as possible.

A model of 8 stages is on 4 ranks, as you place it, and takes 8 microbatches. F, the forward, takes a time of 3 on each
stage, 4 on the last, which has the loss; I, the gradient of the input, 3, but 2 on the first, which embeds, and 4 on
the last; W, the gradients of the weights, 3, but 2 on the first. B is I and W together. What goes to another rank is
under way for a time of 1. A rank may hold 8 activations, each of a stage and a microbatch, from F until W or B.

The score is the time from the first start to the last end. The schedule must be valid (reference/schedules), and is
proved: played by the textbook's pipeline on exact numbers, it computes the loss and the gradients of the whole model.
"""
import numpy as np

from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.errors import UserError
from reference.models.stage import join_stages
from reference.parallel.pipeline import pipeline_gradients, split_into_stages
from reference.params import leaves
from reference.schedules.actions import Schedule, from_csv
from reference.schedules.simulate import Times, activations_in_flight, simulate
from reference.schedules.validate import validate
from reference.training.random_start import RandomSamples, random_parameters
from reference.training.trainer import loss_and_gradients
from shardlab.score.entry import Entry

UNIT, LEAST = "units of time", 156
RANKS, STAGES, MICROBATCHES, LIMIT = 4, 8, 8, 8
TIMES = Times([3] * 7 + [4], [2] + [3] * 6 + [4], [2] + [3] * 7, communication=1)
MODEL = ModelConfig(STAGES, 2, 1, 3, 2, make_vocab_size_divisible_by=1, hidden_dropout=0.0, attention_dropout=0.0)


def score(entry: Entry) -> int:
    """Return the time of a step. Raises UserError for what is not a schedule, or holds too many activations."""
    schedule = from_csv(entry.schedule)
    sizes = schedule.p, schedule.stages, schedule.microbatches
    if sizes != (RANKS, STAGES, MICROBATCHES) or not all(schedule.ranks):
        raise UserError("The schedule has {} ranks, {} stages and {} microbatches, but ".format(*sizes) +
                        f"must have {RANKS}, {STAGES} and {MICROBATCHES}: a line for each rank, none of them empty, "
                        "with commas between actions such as 0F0.")
    validate(schedule)
    if all(action.kind == "F" for rank in schedule.ranks for action in rank):
        raise UserError("The schedule has forwards only: a step needs the backwards, too, as B, or as I and W.")
    for rank, most in enumerate(activations_in_flight(schedule)):
        if most > LIMIT:
            raise UserError(f"Rank {rank} holds {most} activations, but may hold {LIMIT}: do some B or W earlier.")
    prove(schedule)
    return int(simulate(schedule, TIMES).makespan)


def prove(schedule: Schedule) -> None:
    """Raise UserError unless the schedule computes the whole model's loss and gradients, as formulas."""
    params, rows = random_parameters(MODEL, 1), RandomSamples(MODEL, 2, 1).batch("train", 0, MICROBATCHES)
    stages = split_into_stages(params, [[layer] for layer in range(STAGES)], MODEL)
    batches = [GPTBatch.unpack(row) for row in np.split(rows, MICROBATCHES)]
    expected, whole = loss_and_gradients(GPTBatch.unpack(rows), params, MODEL)
    loss, grads = pipeline_gradients(batches, stages, schedule, MODEL)
    pairs = [(loss, expected), *((x, y) for (_, x), (_, y) in zip(leaves(join_stages(grads)), leaves(whole)))]
    if any(np.any(x != y) for x, y in pairs):
        raise UserError("Not proved equal: the schedule computes another formula than the whole model.")
