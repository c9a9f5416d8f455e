"""Text from the model that is being trained, on all ranks of one replica."""
from mpi_impl.inference.decoding import generate
from mpi_impl.inference.replica import trained_replica
from mpi_impl.training.trainer import Trainer
from reference.generation.decoding import Sampling

TEMPERATURE = 0.8     # below 1, probable tokens become more probable: a small model rambles less,
TOP_P = 0.9           # and still less without the improbable ones


def sample(trainer: Trainer, prompt: list[int], count: int, seed: int) -> list[int]:
    """Sample `count` tokens after the prompt's. All ranks of a replica call this, and get the same tokens."""
    sampling = Sampling(TEMPERATURE, top_p=TOP_P, seed=seed)
    found = generate(trained_replica(trainer), [prompt], count, sampling)
    return [token for token, in found if token is not None]
