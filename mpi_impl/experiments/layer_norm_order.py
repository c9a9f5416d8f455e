"""The reason why BERT's layer norms were moved: `mpirun -np 2 python -m mpi_impl.experiments.layer_norm_order`.

BERTs larger than BERT-Large got worse (Lan et al. 2019), until Shoeybi et al. 2019 (section 5.3, figure 7) let the
residual connection bypass the layer norm instead of beginning behind it. Then they train stably, and a deeper one is
better. This experiment is a small one: narrow BERTs, shallow and deep, in both orders, otherwise identical, each from
several seeds. They read a table that gives each number another one, another table in every sample, and a number to
begin with, and fill in what comes after one, two, ... steps through the table. To look a number up, and what was found
again, takes one layer after another.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.experiments.experiment import Experiment, Kind, each, narrow_model
from mpi_impl.experiments.training_data import walks
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group
from mpi_impl.runtime.tables import count
from reference.batches import BERTBatch
from reference.config import ModelConfig, require_not_negative, require_positive

NUMBERS, STEPS, SAMPLES = 8, 4, 32              # V without the mask; through the table; B
HIDDEN, HEADS = 32, 2
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess
STUCK = CHANCE - 0.05                           # a model above it is no better than chance
ORDERS = {"original": True, "rearranged": False}


@option_group
class LayerNormOrderOptions:
    """The models, their training and its picture."""

    layers: tuple[int, ...] = option_field((1, 16), "(default: 1 16)", "L", check=each(require_positive))
    seeds: int = option_field(5, "how many models of each kind", check=require_positive)
    train_iters: int = option_field(2400, metavar="N", check=require_positive)
    lr: float = option_field(3e-3, "the same for all", check=require_not_negative)
    plot: str = option_field("layer_norm_order.png", metavar="F")


class LayerNormOrder(Experiment):
    """Train narrow BERTs, shallow and deep, in both orders of layer norm and residual."""

    name, options, samples = "layer_norm_order", LayerNormOrderOptions, SAMPLES
    title = "Layer norm and residual connection: BERT's original order, and the rearranged one"
    ylabel, levels, ylim = "loss of masked numbers, nats", {"knows nothing": CHANCE}, (0, 1.15 * CHANCE)

    def kinds(self) -> dict[Kind, ModelConfig]:
        def model(layers: int, after: bool) -> ModelConfig:
            return narrow_model(layers, HIDDEN, HEADS, NUMBERS + 1, NUMBERS + 1 + STEPS, init_method_std=0.1,
                                architecture="bert", apply_residual_connection_post_layernorm=after)

        return {Kind(count(layers, "layer"), f"{order} order"): model(layers, after)
                for layers in sorted(self.args.layers) for order, after in ORDERS.items()}

    def batches(self, seed: int) -> Iterator[BERTBatch]:
        """Make walks through tables, of which the steps are masked."""
        rng = np.random.default_rng(seed)
        while True:
            yield walks(rng, NUMBERS, SAMPLES, STEPS)

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        return {"not below chance": f"{(self.final(losses) > STUCK).sum()} of {len(losses)}"}

    def note(self, results: dict) -> str:
        return (f"The final loss is the mean of the last tenth of {self.args.train_iters:,} iterations, in nats; a "
                f"guess has ln {NUMBERS} = {CHANCE:.3f}.")


if __name__ == "__main__":
    run(lambda: LayerNormOrder.show(world()))
