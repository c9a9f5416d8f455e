"""The models that benchmarks train: GPTs without dropout, in float32, on random tokens."""
import numpy as np

from mpi_impl.comm.topology import Topology
from mpi_impl.parallel.model_state import ModelState
from mpi_impl.training.trainer import Trainer
from reference.batches import GPTBatch
from reference.config import ModelConfig
from reference.optimizer import OptimizerConfig
from reference.precision import Precision


def gpt(L: int, h: int, a: int, V: int, s: int, **others) -> ModelConfig:
    return ModelConfig(L, h, a, V, s, hidden_dropout=0.0, attention_dropout=0.0, **others)


def trainer_of(model: ModelConfig, topology: Topology) -> Trainer:
    return Trainer(ModelState(model, topology, 1, Precision("float32")), OptimizerConfig(1e-4, 1))


def random_batch(model: ModelConfig, b: int, s: int = 0, seed: int = 0) -> GPTBatch:
    """Return b samples of s tokens, or of as many as the model takes."""
    shape = 2, b, s or model.max_position_embeddings
    return GPTBatch(*np.random.default_rng(seed).integers(model.vocab_size, size=shape))
