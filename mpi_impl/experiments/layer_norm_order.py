"""The reason why BERT's layer norms were moved: `mpirun -np 2 python -m mpi_impl.experiments.layer_norm_order`.

BERTs larger than BERT-Large got worse (Lan et al. 2019), until Shoeybi et al. 2019 (section 5.3, figure 7) let the
residual connection bypass the layer norm instead of beginning behind it. Then they train stably, and to a lower loss.
This experiment is a small one: narrow BERTs, shallow and deep, in both orders, otherwise identical, each from
several seeds. They fill in masked numbers of sequences with equal steps, for which they must look at other positions,
in both directions.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.experiments.experiment import Experiment, Kind, each, last_tenth, narrow_model
from mpi_impl.experiments.training_data import equal_steps, masked_batch
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group
from mpi_impl.runtime.tables import count
from reference.batches import BERTBatch
from reference.config import ModelConfig, require_not_negative, require_positive

NUMBERS, POSITIONS, SAMPLES = 24, 16, 32        # V without the mask, s, B
HIDDEN, HEADS = 32, 2
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess without looking at the other numbers
STUCK = CHANCE - 0.05                           # a model above it is no better than chance
ORDERS = {"original": True, "rearranged": False}


@option_group
class LayerNormOrderOptions:
    """The models, their training and its picture."""

    layers: tuple[int, ...] = option_field((4, 24), "(default: 4 24)", "L", check=each(require_positive))
    seeds: int = option_field(5, "how many models of each kind", check=require_positive)
    train_iters: int = option_field(600, metavar="N", check=require_positive)
    lr: float = option_field(3e-3, "the same for all", check=require_not_negative)
    plot: str = option_field("layer_norm_order.png", metavar="F")


class LayerNormOrder(Experiment):
    """Train narrow BERTs, shallow and deep, in both orders of layer norm and residual."""

    name, options, samples = "layer_norm_order", LayerNormOrderOptions, SAMPLES
    title = "Layer norm and residual connection: BERT's original order, and the rearranged one"
    ylabel, levels, ylim = "loss of masked numbers, nats", {"knows nothing": CHANCE}, (0, 1.15 * CHANCE)

    def kinds(self) -> dict[Kind, ModelConfig]:
        def model(layers: int, after: bool) -> ModelConfig:
            return narrow_model(layers, HIDDEN, HEADS, NUMBERS + 1, POSITIONS, init_method_std=0.1, architecture="bert",
                                apply_residual_connection_post_layernorm=after)

        return {kind_of(layers, order): model(layers, after) for layers in sorted(self.args.layers)
                for order, after in ORDERS.items()}

    def batches(self, seed: int) -> Iterator[BERTBatch]:
        """Make sequences of numbers with equal steps, of which some are masked."""
        rng = np.random.default_rng(seed)
        while True:
            yield masked_batch(equal_steps(rng, NUMBERS, SAMPLES, POSITIONS), rng, mask=NUMBERS)

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        return {"not below chance": f"{(self.final(losses) > STUCK).sum()} of {len(losses)}"}

    def note(self, results: dict) -> str:
        """Say what the losses are, and how long the deep models, rearranged, would take to the shallow ones' loss.

        They need as many times more iterations for it as for the loss that they did reach.
        """
        iterations, few, many = self.args.train_iters, min(self.args.layers), max(self.args.layers)
        said = (f"The final loss is the mean of the last tenth of {iterations} iterations, in nats; a guess without "
                f"looking at the other numbers has ln {NUMBERS} = {CHANCE:.3f}.")
        rearranged = [results[kind_of(layers, "rearranged")] for layers in (few, many)]
        aim, found = (np.median(self.final(losses)) for losses in rearranged)
        if few == many or found < aim:
            return said
        shallow, deep = (np.median(losses, 0) for losses in rearranged)
        reached = self.final(deep)
        if reached > STUCK:
            return f"{said}\n\nThe {many} layers have not begun to learn in {iterations:,} iterations; give them more."
        window = last_tenth(iterations)
        means = np.convolve(shallow, np.full(window, 1 / window), "valid")      # as `final`, after each iteration
        earlier = window + next(iter(np.flatnonzero(means <= reached)), iterations - window)
        return (f"{said}\n\nWhat {many} layers reached in the rearranged order after {iterations:,} iterations, {few} "
                f"had reached after {earlier:,}.\nAt that pace {many} layers need about "
                f"{iterations * iterations / earlier:,.0f} iterations to reach {aim:.3f}.")


def kind_of(layers: int, order: str) -> Kind:
    return Kind(count(layers, "layer"), f"{order} order")


if __name__ == "__main__":
    run(lambda: LayerNormOrder.show(world()))
