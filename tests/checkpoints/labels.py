"""Checkpoints of exact numbers, whose files hold labels: a float for each number.

A checkpoint moves elements, and computes nothing with them. So labels in the place of numbers go through all of it, the
files included, and the users' format need not know exact numbers. Beside it each rank writes what its labels mean.
"""
import pickle
from functools import reduce
from operator import or_
from pathlib import Path
from unittest import mock

import numpy as np

from mpi_impl.checkpoints import checkpoint
from mpi_impl.parallel import buffers
from reference.exact.array import new
from reference.exact.degree import CONSTANT

LABELS = 2**53      # whole numbers that are floats


def save(trainer, root: str, settings: dict, finite=checkpoint.finite) -> None:
    """Save labels, and what they mean."""
    numbers, degrees = {}, [CONSTANT]

    def labels(*elements):
        x = finite(*elements)
        found = (x.elements % LABELS).astype(float)
        numbers.update(zip(found.tolist(), x.elements))
        degrees.append(x.bound.degree)
        return found

    with mock.patch.object(checkpoint, "finite", labels), mock.patch.object(buffers, "on_device", lambda x: False):
        checkpoint.save(trainer, root, settings)
    meanings = pickle.dumps((numbers, reduce(or_, degrees)))
    Path(root, f"{trainer.topology.world.rank}.numbers").write_bytes(meanings)


def load(trainer, root: str, manifest) -> None:
    """Load labels, and put in their places what they mean."""
    numbers, degree = {}, CONSTANT
    for path in Path(root).glob("*.numbers"):
        its_numbers, its_degree = pickle.loads(path.read_bytes())
        numbers, degree = numbers | its_numbers, degree | its_degree

    def meanings(labels, like):
        elements = np.empty(labels.size, object)
        elements[:] = [numbers[label] for label in labels.tolist()]
        return new(elements, degree)

    with mock.patch.object(checkpoint, "moved_to", meanings):
        checkpoint.load(trainer, root, manifest)
