"""One rank of Shardlab's side of generation.py: greedy texts from a tensor-parallel GPT-2.

Its arguments are the folder of the model, which transformers has saved, the sizes of the texts, a file for them, and
the format to compute in.
"""
import os
import sys
from functools import partial
from types import SimpleNamespace

from texts import serve_texts

from mpi_impl.comm.device import device_of
from mpi_impl.comm.group import Group, world
from mpi_impl.comm.topology import connect
from mpi_impl.inference.decoding import generate
from mpi_impl.inference.replica import Replica
from mpi_impl.launch.entry import run
from reference.config import ParallelConfig
from reference.generation.decoding import Sampling
from shardlab.generate.sources import find, load_model


def replica_in(folder: str, ranks: Group, form: str) -> Replica:
    """Load the model in a folder, tensor-parallel over all ranks."""
    source = find(SimpleNamespace(load=None, load_hf=folder))
    return load_model(source, connect(ranks, ParallelConfig(ranks.size)), form, device_of("cpu", ranks).like)


def extend(replica: Replica, prompts, count: int) -> list[list[int]]:
    """Return the `count` most probable tokens after each prompt."""
    return [list(text) for text in zip(*generate(replica, prompts, count, Sampling(temperature=0.0)))]


def main() -> None:
    (folder, texts, path, form), ranks = sys.argv[1:], world()
    serve_texts(partial(extend, replica_in(folder, ranks, form)), texts, path if ranks.rank == 0 else os.devnull)


if __name__ == "__main__":
    run(main)
