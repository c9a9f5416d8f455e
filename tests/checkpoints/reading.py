"""Helpers for tests on a checkpoint's files: they count the bytes that are read, and spoil files."""

import json
import shutil
from math import prod
from pathlib import Path

import numpy as np


def with_a_layer_too_few(folder, to) -> Path:
    """Copy a folder in Hugging Face's layout; the copy's config.json says that the model has a layer more."""
    to = shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (name,) = {"n_layer", "num_hidden_layers"} & config.keys()
    (to / "config.json").write_text(json.dumps(config | {name: config[name] + 1}))
    return to


def assert_read_once(weights, segments, ranks: int) -> None:
    """Assert that the ranks together read each element of a split tensor once, each rank all of a replicated one, and
    no padding.
    """
    of_tensor, read = weights.slice, []
    weights.slice = lambda name: Counted(of_tensor(name), read)
    for segment in segments:
        read.clear()
        shards = [weights.shard(segment, rank, np.float64) for rank in range(ranks)]
        assert sum(read) == prod(segment.tensor.shape) * (ranks if segment.tensor.split is None else 1)
        assert sum(map(np.count_nonzero, shards)) == sum(read), "what is read has its place, and padding is 0"


class Counted:
    """A tensor in a file, and how many elements have been read of such."""

    def __init__(self, slice, read):
        self.slice, self.read = slice, read

    def __getitem__(self, place):
        x = self.slice[place]
        self.read.append(x.size)
        return x
