"""The random numbers of checks: public in a notebook, drawn from a secret seed in grading.

An answer that can draw the numbers of all ranks needs no messages. So while a submission is graded, the numbers depend
on a seed that is never sent to an answer's process; on the answers, so that a table of results from an earlier
submission is useless; and on the check and its previous draws, so that no numbers occur twice, and nothing that an
answer keeps from one run helps it in another.
"""
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpi_impl.runtime.files import read_bytes
from reference.errors import UserError

SEED_FILE = "check_seed.txt"        # in the folder of a course
LARGEST_SEED = 1 << 20              # bytes
PUBLIC = "public"


class Draws:
    """The random draws of one submission during grading."""

    def __init__(self, seed: str, answers: Mapping[str, str]):
        self.submission = digest(seed, sorted(answers.items()))
        self.check, self.count = "", 0

    def begin(self, check: str) -> None:
        """Begin a check. Its numbers do not depend on the draws of other checks."""
        self.check, self.count = check, 0

    def generator(self, name: str) -> np.random.Generator:
        """Return a generator that no other call gets."""
        self.count += 1
        return generator(self.submission, self.check, self.count, name)


GRADED: list[Draws] = []        # of the submission that is being graded; empty in a notebook


def check_data(name: str) -> np.random.Generator:
    """Return a check's random generator. In a notebook the same name gives the same numbers each time."""
    return GRADED[-1].generator(name) if GRADED else generator(PUBLIC, name)


def secret_draws(seed: str, answers: Mapping[str, str]) -> AbstractContextManager[Draws]:
    """Let all checks draw from this secret seed, for these answers."""
    return pushed(GRADED, Draws(seed, answers))


@contextmanager
def pushed(stack: list, value: Any) -> Iterator[Any]:
    """Put a value on a stack for a while."""
    stack.append(value)
    try:
        yield value
    finally:
        stack.pop()


def generator(*key) -> np.random.Generator:
    """Return the generator of a key of strings and numbers."""
    return np.random.default_rng(int(digest(*key), 16))


def digest(*key) -> str:
    """Return a key's digest, from which the key cannot be found."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def new_seed() -> str:
    """Draw a seed that nobody can guess."""
    return secrets.token_hex(16)


def read_seed(path: Path) -> str:
    """Return the seed that a file holds. Raises UserError."""
    seed = read_bytes(str(path), LARGEST_SEED).decode(errors="replace").strip()
    if not seed:
        raise UserError(f"{path} is empty. It should hold the secret seed of the checks' random numbers: restore it, "
                        "or remove it and give ./run.sh labs, which makes a new one.")
    return seed
