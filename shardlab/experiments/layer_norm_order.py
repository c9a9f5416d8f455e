"""The reason why BERT's layer norms were moved: `mpirun -np 2 python -m shardlab.experiments.layer_norm_order`.

BERTs larger than BERT-Large got worse (Lan et al. 2019), until Shoeybi et al. 2019 (section 5.3, figure 7) let the
residual connection bypass the layer norm instead of beginning behind it. Then they train stably, and a deeper one is
better. This experiment is a small one: narrow BERTs, shallow and deep, in both orders, otherwise identical, each from
several seeds. They learn one of two tasks:

    walks           A table gives each number another one; the model sees the table, another one in every sample, and a
                    number, and fills in what follows after 1, 2, 3 and 4 steps through the table. That takes depth.
    equal-steps     It fills in masked numbers of sequences with equal steps. Two numbers tell all others.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, same_option
from mpi_impl.runtime.tables import count
from reference.batches import BERTBatch
from reference.config import ModelConfig, require_positive
from shardlab.experiments.experiment import Experiment, Kind, TrainingOptions, each, narrow_model
from shardlab.experiments.training_data import equal_steps, masked_batch, walks

SAMPLES, HIDDEN, HEADS = 32, 32, 2              # B, h, a
NEAR = 0.05                                     # a loss that is not further below a guess's is no better than chance


class Task(NamedTuple):
    """Samples of this many numbers, and of this many positions."""

    numbers: int
    positions: int
    batch: Callable[[np.random.Generator], BERTBatch]


TASKS = {"walks": Task(8, 13, lambda rng: walks(rng, 8, SAMPLES, 4)),
         "equal-steps": Task(24, 16, lambda rng: masked_batch(equal_steps(rng, 24, SAMPLES, 16), rng, mask=24))}


@option_group
class LayerNormOrderOptions(TrainingOptions):
    """The models and their task."""

    task: str = option_field("walks", "what they learn", choices=tuple(TASKS))
    layers: tuple[int, ...] = option_field((1, 16), "(default: 1 16)", "L", check=each(require_positive))
    seeds: int = same_option(TrainingOptions, "seeds", 5)
    train_iters: int = same_option(TrainingOptions, "train_iters", 2400)


class LayerNormOrder(Experiment):
    """Train narrow BERTs, shallow and deep, in both orders of layer norm and residual."""

    name, options, samples = "layer_norm_order", LayerNormOrderOptions, SAMPLES
    title = "Layer norm and residual connection: BERT's original order, and the rearranged one"
    ylabel = "loss of masked numbers, nats"

    def __init__(self, args: Any):
        super().__init__(args)
        self.task = TASKS[args.task]
        self.chance = float(np.log(self.task.numbers))      # the loss of a guess
        self.levels, self.ylim = {"knows nothing": self.chance}, (0, 1.15 * self.chance)

    def kinds(self) -> dict[Kind, ModelConfig]:
        return {Kind(count(layers, "layer"), f"{order} order"): narrow_model(
            layers, HIDDEN, HEADS, self.task.numbers + 1, self.task.positions, init_method_std=0.1,
            architecture="bert", apply_residual_connection_post_layernorm=order == "original")
                for layers in sorted(self.args.layers) for order in ("original", "rearranged")}

    def batches(self, seed: int) -> Iterator[BERTBatch]:
        rng = np.random.default_rng(seed)
        while True:
            yield self.task.batch(rng)

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        stuck = self.final(losses) > self.chance - NEAR
        return {"not below chance": f"{stuck.sum()} of {len(losses)}"}

    def note(self, results: dict) -> str:
        return (f"The final loss is the mean of the last tenth of {self.args.train_iters:,} iterations, in nats; a "
                f"guess has ln {self.task.numbers} = {self.chance:.3f}.")


if __name__ == "__main__":
    run(lambda: LayerNormOrder.show(world()))
