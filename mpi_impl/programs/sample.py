"""Text from the model that is being trained, on all ranks of one replica."""
from mpi_impl.generation.decoding import generate
from mpi_impl.generation.replica import trained
from mpi_impl.training.trainer import Trainer
from reference.generation.decoding import Sampling

TEMPERATURE = 0.8     # below 1, likely words become likelier: a small model rambles less


def sample(trainer: Trainer, first_token: int, count: int, seed: int) -> list[int]:
    """`count` tokens that follow first_token, alike on all ranks of a replica, which call this together."""
    return list(generate(trained(trainer), [first_token], count, Sampling(TEMPERATURE, seed=seed)))
