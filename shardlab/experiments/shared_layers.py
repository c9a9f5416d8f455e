"""The price of sharing parameters: `mpirun -np 2 python -m shardlab.experiments.shared_layers`.

ALBERT (Lan et al. 2019, section 3.1) computes all its layers with the parameters of one. That makes a model smaller,
not faster: every layer still computes as much, and keeps as many activations. This experiment is a small one: narrow
GPTs, from several seeds, that must learn a table by heart. It says which number follows any two, so that a model needs
parameters to keep it in. Each model is trained with a block for every layer; with one block for all layers; and with
one layer, which has as many parameters as the shared ones, and computes less.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, same_option
from reference.batches import GPTBatch
from reference.config import ModelConfig, ParallelConfig, require_positive
from reference.costs.flops import iteration_flops
from reference.costs.parameters import parameters
from reference.precision import Precision
from shardlab.experiments.experiment import Experiment, Kind, TrainingOptions, narrow_model
from shardlab.predict.predict import predict_alone
from shardlab.predict.rank import ImaginedWorld

NUMBERS, POSITIONS, SAMPLES = 64, 16, 32        # V, s, B
HIDDEN, HEADS = 32, 2
CHANCE = float(np.log(NUMBERS))                 # the loss of a guess
FIRST = CHANCE / POSITIONS                      # of one that knows the table: the first number has no two before


@option_group
class SharedLayersOptions(TrainingOptions):
    """The models."""

    num_layers: int = option_field(4, metavar="L", check=require_positive)
    train_iters: int = same_option(TrainingOptions, "train_iters", 800)


class SharedLayers(Experiment):
    """Train narrow GPTs whose layers have blocks of their own, or share one."""

    name, options, samples = "shared_layers", SharedLayersOptions, SAMPLES
    title = "Layers with parameters of their own, and with shared ones"
    levels, ylim = {"guesses": CHANCE, "knows the table": FIRST}, (0, 1.15 * CHANCE)

    def kinds(self) -> dict[Kind, ModelConfig]:
        model = narrow_model(self.args.num_layers, HIDDEN, HEADS, NUMBERS, POSITIONS, init_method_std=0.1)
        return {Kind("", "a block for each layer"): model,
                Kind("", "one block for all layers"): replace(model, share_layers=True),
                Kind("", "one layer"): replace(model, num_layers=1)}

    def batches(self, seed: int) -> Iterator[GPTBatch]:
        """Make sequences of numbers that begin with any two; each other one follows from the two before, by a table."""
        rng = np.random.default_rng(seed)
        following = rng.integers(NUMBERS, size=(NUMBERS, NUMBERS))
        while True:
            numbers = rng.integers(NUMBERS, size=(SAMPLES, POSITIONS + 1))
            for i in range(2, POSITIONS + 1):
                numbers[:, i] = following[numbers[:, i - 2], numbers[:, i - 1]]
            yield GPTBatch.unpack(numbers)

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        model = self.kinds()[kind]
        predicted, = predict_alone(ImaginedWorld(model, ParallelConfig(), Precision("float32"), SAMPLES, POSITIONS,
                                                 microbatches=1))
        return {"parameters": f"{parameters(model):,}", "states, bytes": f"{predicted.held.states:,}",
                "activations, bytes": f"{predicted.held.activations:,}",
                "FLOPs of a step": f"{iteration_flops(model, SAMPLES, POSITIONS):,.0f}"}

    def note(self, results: dict) -> str:
        return (f"States are parameters, gradients and Adam's two moments; activations are what a step of {SAMPLES} "
                "samples saves for its backward.\nThe final loss is the mean of the last tenth of "
                f"{self.args.train_iters} iterations, in nats; a guess has ln {NUMBERS} = {CHANCE:.3f}, and a model "
                f"that knows the table has {FIRST:.3f}.")


if __name__ == "__main__":
    run(lambda: SharedLayers.show(world()))
