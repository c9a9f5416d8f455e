"""Prove the textbook's splits: `python -m reference.prove --tensor-model-parallel-size 4`.

A small model and its splits over t tensor-parallel ranks, p pipeline ranks and d replicas, all in one process, compute
losses and gradients on exact numbers (reference/exact/): equal numbers are equal formulas.
"""
import sys
from collections.abc import Iterator
from math import log10

import numpy as np

from reference.comm.regions import TENSOR_PARALLEL, SequenceParallelRegion
from reference.config import ModelConfig, ParallelConfig, check_model_fits, require_not_negative, require_positive
from reference.errors import UserError
from reference.exact.degree import TALLY, power_of_ten
from reference.layer_context import LayerContext
from reference.models.bert import sharded_bert_backward, sharded_bert_forward
from reference.models.gpt import sharded_gpt_backward, sharded_gpt_forward
from reference.models.model import batch_type, model_tensors
from reference.models.stage import join_stages
from reference.options import OptionParser
from reference.parallel.data_parallel import data_parallel_gradients
from reference.parallel.pipeline import pipeline_gradients, split_into_stages
from reference.parallel.stages import layers_of_stage, schedule_of
from reference.params import join, leaves, split
from reference.printing import run
from reference.random.dropout import Dropout
from reference.schedules.generators import SCHEDULES
from reference.training.random_start import RandomSamples, random_parameters
from reference.training.trainer import loss_and_gradients

HEADS = {"gpt": ("lm",), "bert": ("lm", "sop")}
TRAINING = [name for name in SCHEDULES if name not in ("forward-only", "interleaved")]
DRAWS = 3       # of other numbers, if a divisor is 0


def main(argv: list[str] | None = None) -> None:
    """Prove that a model's splits compute the same formulas as the whole model."""
    parser = OptionParser(prog="reference.prove", description=main.__doc__)
    parser.add_argument("--model", choices=HEADS, default="gpt")
    for size in ("tensor", "pipeline"):
        parser.add_argument(f"--{size}-model-parallel-size", type=int, default=2, metavar=size[0].upper())
    parser.add_argument("--data-parallel-size", type=int, default=2, metavar="D")
    parser.add_argument("--pipeline-schedule", choices=TRAINING, default="1f1b")
    parser.add_argument("--proofs", type=int, default=1, metavar="N", help="with fresh random numbers each time")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(argv)
    sys.exit(prove(options))


def prove(options) -> int:
    """Prove each split, and say so; return 1 for the first that is another formula, else 0."""
    require_positive("proofs", options.proofs)
    require_not_negative("seed", options.seed)
    parallel, seed, exponent = parallelism(options), options.seed, 0.0
    model = small_model(options.model, parallel)
    for _ in range(options.proofs):
        found, seed = splits_with_fresh_numbers(model, parallel, seed)
        if not all(prove_split(*one) for one in found):
            return 1
        exponent += log10(TALLY.chance_of_error())
    print(f"proved: {len(found)} splits compute the same formulas as the whole model; chance of error below "
          f"{power_of_ten(exponent)}")
    return 0


def splits_with_fresh_numbers(model: ModelConfig, parallel: ParallelConfig, seed: int) -> tuple[list, int]:
    """Return the splits with the numbers of this seed, or of one that follows, and the seed for the next proof."""
    for draw in range(seed, seed + DRAWS):
        try:
            return list(splits(model, parallel, draw)), draw + 1
        except ZeroDivisionError:
            print("a divisor was 0 modulo the prime: the proof begins again, with other numbers")
    raise UserError(f"A divisor was 0 in {DRAWS} draws of random numbers, which chance does not explain: a formula of "
                    "the model divides by 0, whatever its inputs are.")


# ---- the model and its splits ---------------------------------------------------------------------------------------


def parallelism(options) -> ParallelConfig:
    """Return the splits to prove. Raise UserError for sizes that make no sense, and if nothing is split."""
    replicas = options.data_parallel_size if options.model == "gpt" else 1
    if max(options.tensor_model_parallel_size, options.pipeline_model_parallel_size, replicas) == 1:
        raise UserError("All sizes are 1, so nothing is split, and there is nothing to prove. Choose a larger "
                        "--tensor-model-parallel-size or --pipeline-model-parallel-size"
                        + (", or --data-parallel-size." if options.model == "gpt" else "; replicas are a GPT's."))
    return ParallelConfig(options.tensor_model_parallel_size, options.pipeline_model_parallel_size,
                          options.data_parallel_size, pipeline_schedule=options.pipeline_schedule)


def small_model(architecture: str, parallel: ParallelConfig) -> ModelConfig:
    """Return a model with a layer more than stages, two heads on each rank, and a vocabulary that needs padding."""
    t, stages, d = parallel.tensor_model_parallel_size, schedule_of(parallel, 1).stages, parallel.data_parallel_size
    if max(t, stages, d) > 32:
        raise UserError(f"A proof of {t} tensor-parallel ranks, {stages} stages and {d} replicas would take hours in "
                        "one process. Choose at most 32 of each.")
    model = ModelConfig(stages + 1, 4 * t, 2 * t, 3 * t - 1, 2 * t + 1, make_vocab_size_divisible_by=3,
                        architecture=architecture, heads=HEADS[architecture])
    check_model_fits(model, parallel)
    return model


def splits(model: ModelConfig, parallel: ParallelConfig, seed: int) -> Iterator[tuple]:
    """Yield the name of each split, with its loss and gradients and those of the whole model, for this seed."""
    t, p, d = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size)
    TALLY.begin()
    params, dropout = random_parameters(model, seed), Dropout(model, seed, step=1)
    schedule = schedule_of(parallel, p + 1)
    rows = RandomSamples(model, 2 * t, seed).batch("train", 0, d * schedule.microbatches)
    batch = batch_type(model).unpack(rows)
    whole = loss_and_gradients(batch, params, model, dropout)
    regions = {"tensor": TENSOR_PARALLEL, "sequence": SequenceParallelRegion()} if t > 1 else {}
    for name, region in regions.items():
        yield f"{name} parallelism on {t} ranks", sharded(batch, params, model, t, region, dropout), whole
    if p > 1:
        layers = [layers_of_stage(stage, schedule.stages, model.num_layers) for stage in range(schedule.stages)]
        microbatches = [batch_type(model).unpack(some) for some in np.split(rows, schedule.microbatches)]
        loss, grads = pipeline_gradients(microbatches, split_into_stages(params, layers, model), schedule, model,
                                         dropout)
        yield f"a pipeline of {p} ranks, {parallel.pipeline_schedule}", (loss, join_stages(grads)), whole
    if d > 1 and model.causal:
        loss, replicas = data_parallel_gradients(batch.tokens, batch.targets, params, model, d, 1, dropout)
        yield f"{d} replicas", (loss, replicas[-1]), whole


def sharded(batch, params, model: ModelConfig, t: int, region, dropout) -> tuple:
    """Return the loss and the gradients of t tensor-parallel ranks."""
    tensors = model_tensors(model)
    shards, context = split(params, tensors, t), LayerContext(dropout)
    shares = tuple(weights / max(weights.sum(), 1) for weights in batch.weights_of_heads(model.heads))
    if model.causal:
        losses, cache = sharded_gpt_forward(batch.tokens, shards, model, batch.targets, region, context)
        grads = sharded_gpt_backward(shares[0], shards, cache, model, region)
        return (losses * shares[0]).sum(), join(grads, tensors)
    losses, cache = sharded_bert_forward(batch, shards, model, region, context)
    grads = sharded_bert_backward(shares, shards, cache, model, region)
    return sum((loss * share).sum() for loss, share in zip(losses, shares)), join(grads, tensors)


def prove_split(name: str, found: tuple, whole: tuple) -> bool:
    """Compare loss and gradients, and say the first that is another formula, or that there is none."""
    tensors = [("the loss", found[0], whole[0])]
    tensors += [(f"the gradient of {tensor}", x, y) for (tensor, x), (_, y) in zip(leaves(found[1]), leaves(whole[1]))]
    for tensor, x, y in tensors:
        differ = np.atleast_1d(x != y)
        if differ.any():
            at = [int(i) for i in np.unravel_index(int(differ.argmax()), differ.shape)]
            print(f"not proved: with {name}, {tensor} is another formula, first at {at} of {list(differ.shape)}")
            return False
    print(f"{name}: the loss and {len(tensors) - 1} gradients are the same formulas")
    return True


if __name__ == "__main__":
    run(main)
