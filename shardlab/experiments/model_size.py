"""The reason to want larger models: `mpirun -np 2 python -m shardlab.experiments.model_size`.

Shoeybi et al. 2019 trained GPTs of 355 million to 8.3 billion parameters and BERTs of 336 million to 3.9 billion, each
family on the same text, and found that each larger model reaches a lower validation loss (figure 6, section 5.3). This
experiment is a small one: GPTs and BERTs that differ in their hidden size only, and, as there, in the number of heads,
since a head keeps its size. They learn the bytes of Python's own standard library, and are evaluated on files of it
that they have not seen.

Each rank trains one model at a time. The result does not depend on the number of ranks.
"""
from typing import Any

import numpy as np

from mpi_impl.comm.group import world
from mpi_impl.comm.topology import Topology
from mpi_impl.launch.entry import run
from mpi_impl.launch.option_fields import option_field, option_group, same_option
from mpi_impl.runtime.tables import count
from reference.config import ModelConfig, require_positive
from reference.costs.parameters import parameters
from reference.errors import UserError
from shardlab.experiments.experiment import Experiment, Kind, TrainingOptions, each, narrow_model, trainer_of
from shardlab.experiments.panels import Panel
from shardlab.experiments.training_data import BYTES, bert_batch, gpt_batch, read_text

LAYERS, HEAD_SIZE, POSITIONS, SAMPLES = 2, 16, 32, 16       # s and B last
EVALUATIONS, EVALUATED = 20, 256                            # in each run, and the samples of each, always the same
BATCHES = {"GPT": gpt_batch, "BERT": bert_batch}


def require_whole_heads(name: str, size: int) -> None:
    require_positive(name, size)
    if size % HEAD_SIZE:
        raise UserError(f"--hidden-size is {size}, but must be a multiple of {HEAD_SIZE}, the size of a head.")


@option_group
class ModelSizeOptions(TrainingOptions):
    """The models."""

    hidden_size: tuple[int, ...] = option_field((16, 32, 64), "(default: 16 32 64)", "H",
                                                check=each(require_whole_heads))
    lr: float = same_option(TrainingOptions, "lr", 2e-3)


class ModelSize(Experiment):
    """Train narrow and wide GPTs and BERTs on the same text."""

    name, options = "model_size", ModelSizeOptions
    title, ylabel = "Validation losses of models of several sizes", "nats a byte; for BERT of the masked ones"
    xlabel = "thousand bytes of text seen"

    def __init__(self, args: Any):
        super().__init__(args)
        self.text, n = read_text(), args.train_iters
        self.evaluated = sorted({*range(n // EVALUATIONS or 1, n + 1, n // EVALUATIONS or 1), n})   # iterations

    def kinds(self) -> dict[Kind, ModelConfig]:
        return {Kind(family, f"h = {size}"): narrow_model(
            LAYERS, size, size // HEAD_SIZE, BYTES + (family == "BERT"), POSITIONS, init_method_std=0.05,
            architecture=family.lower()) for family in BATCHES for size in sorted(self.args.hidden_size)}

    def train(self, kind: ModelConfig, seed: int, topology: Topology) -> np.ndarray:
        """Train a model, and evaluate it from time to time. Models with the same seed see the same batches."""
        batch_of, text = BATCHES[kind.architecture.upper()], self.text
        trainer = trainer_of(kind, topology, seed, self.args.lr, self.args.train_iters)
        rng = np.random.default_rng(seed)
        unseen = batch_of(text.validation, np.random.default_rng(0), EVALUATED, POSITIONS)
        losses = []
        for i in range(1, self.args.train_iters + 1):
            trainer.step([batch_of(text.training, rng, SAMPLES, POSITIONS)], SAMPLES)
            if i in self.evaluated:
                losses.append(trainer.evaluate([unseen], EVALUATED)[0])     # of BERT's first head: the masked bytes
        return np.array(losses)

    def final(self, losses: np.ndarray) -> Any:
        return losses[..., -1]

    def columns(self, kind: Kind, losses: np.ndarray) -> dict[str, str]:
        return {"parameters": f"{parameters(self.kinds()[kind]):,}"}

    def note(self, results: dict) -> str:
        iterations = self.args.train_iters
        return (f"All models have {LAYERS} layers and heads of size {HEAD_SIZE}, and have seen "
                f"{iterations * SAMPLES * POSITIONS:,} bytes in {count(iterations, 'iteration')}.\n"
                "The loss is that of the validation text in nats a byte; for BERT it is that of masked bytes.")

    def at(self, kind: Kind, points: int) -> np.ndarray:
        return np.array(self.evaluated) * SAMPLES * POSITIONS / 1000

    def panels(self, results: dict) -> list[Panel]:
        """Add a panel of the final losses by size."""
        models = self.kinds()
        families = [[kind for kind in results if kind.panel == family] for family in BATCHES]
        bands = {kinds[0].panel: (np.array([parameters(models[kind]) for kind in kinds]),
                                  np.array([self.final(results[kind]) for kind in kinds]).T) for kinds in families}
        finals = [y for _, y in bands.values()]
        self.ylim = (0.95 * np.min(finals), 1.2 * np.max(finals))       # what comes first is far above
        return [*super().panels(results), Panel("after all of it", "parameters", bands, "x")]


if __name__ == "__main__":
    run(lambda: ModelSize.show(world()))
