"""The group of ranks as an answer sees it: each operation is a request to the broker (`course/grading/broker.py`)."""
from collections.abc import Callable

import numpy as np

DTYPES = ("float64", "float32", "int64", "int32", "bool")
LONGEST_SHAPE = 6
LARGEST_MESSAGE = 16 << 20      # bytes
TO_ONE = ("send", "receive", "exchange")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
OPERATIONS = (*TO_ONE, *COLLECTIVES)


class LabGroup:
    """A group of ranks for an answer: `rank` is this rank's number, `size` the number of ranks.

    A send ends when the receiver has received the array: nothing waits in a buffer, however small it is.
    """

    def __init__(self, rank: int, size: int, ask: Callable):
        """Make the group of a rank; `ask(operation, x, first, second)` returns the broker's reply."""
        self.rank, self.size, self._ask = rank, size, ask

    # ---- one to one ----

    def send(self, x, to: int) -> None:
        """Send the array x to rank `to`. Return when that rank has received it."""
        self._ask("send", as_array(x), plain(to), None)

    def receive(self, source: int) -> np.ndarray:
        """Wait for an array from rank `source`, and return it."""
        return self._ask("receive", None, plain(source), None)

    def exchange(self, x, to: int, source: int) -> np.ndarray:
        """Send x to rank `to` and at the same time receive an array from rank `source`. Return it."""
        return self._ask("exchange", as_array(x), plain(to), plain(source))

    # ---- all together ----

    def all_reduce(self, x, op: str = "sum") -> np.ndarray:
        """Return the elementwise sum (or with op="max" the maximum) of all ranks' x, on every rank."""
        return self._ask("all_reduce", as_array(x), op, None)

    def all_gather(self, x, axis: int = 0) -> np.ndarray:
        """Return all ranks' x, joined in rank order along `axis`, on every rank. Their lengths along it may differ."""
        return self._ask("all_gather", as_array(x), plain(axis), None)

    def reduce_scatter(self, x, axis: int = 0) -> np.ndarray:
        """Return this rank's piece of the sum of all ranks' x along `axis`, split as np.array_split does."""
        return self._ask("reduce_scatter", as_array(x), plain(axis), None)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._ask("barrier", None, None, None)


def plain(number):
    """Return a number of NumPy's as one of Python's."""
    return int(number) if isinstance(number, np.integer) else number


def as_array(x) -> np.ndarray:
    """Convert to an array. Raises TypeError for values that cannot be sent."""
    if x is None:
        raise TypeError("None cannot be sent, only arrays: does the function that made it have a return?")
    x = np.asarray(x)
    if x.dtype.name not in DTYPES or x.ndim > LONGEST_SHAPE:
        raise TypeError(f"an array of {x.dtype} with {x.ndim} axes cannot be sent: the dtype must be one of "
                        f"{', '.join(DTYPES)}, with at most {LONGEST_SHAPE} axes")
    return x
