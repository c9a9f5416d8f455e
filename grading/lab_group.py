"""The group of ranks as an answer sees it: the few operations that the lab allows, counted."""
import sys
from collections.abc import Collection
from contextlib import contextmanager

import numpy as np

HEAD, DATA, RECEIVED = 0, 1, 2                               # tags: dtype and shape, the elements, a receipt
DTYPES = ("float64", "float32", "int64", "int32", "bool")
LONGEST_SHAPE = 6
OPERATIONS = ("send", "receive", "exchange", "all_reduce", "all_gather", "reduce_scatter", "barrier")


class LabGroup:
    """A group of ranks for an answer: `rank` is this rank's number, `size` the number of ranks.

    A send ends when the receiver has received the array: nothing waits in a buffer, however small it is.
    """

    __slots__ = ("rank", "size", "sent", "waiting", "_group", "_allowed", "_made")      # no dict to write into

    def __init__(self, group, allowed: Collection[str]):
        """Wrap `group`, a mpi_impl.comm.group.Group, which calls MPI."""
        self.rank, self.size = group.rank, group.size
        self.sent = 0                                        # elements that this rank has sent to others
        self.waiting: tuple[str, int | None] | None = None   # the operation that runs, and the rank it waits for
        self._group, self._allowed = group, allowed
        self._made = True

    def __setattr__(self, name: str, value) -> None:
        if hasattr(self, "_made") and sys._getframe(1).f_globals.get("__name__") != __name__:
            raise AttributeError(f"group.{name} cannot be set: an answer uses the group as it is.")
        super().__setattr__(name, value)

    # ---- one to one ----

    def send(self, x, to: int) -> None:
        """Send the array x to rank `to`. Return when that rank has received it."""
        with self._in("send", to):
            self._post_send(x, to)()

    def receive(self, source: int) -> np.ndarray:
        """Wait for an array from rank `source`, and return it."""
        with self._in("receive", source):
            return self._receive(source)

    def exchange(self, x, to: int, source: int) -> np.ndarray:
        """Send x to rank `to` and at the same time receive an array from rank `source`. Return it."""
        with self._in("exchange", source, to):
            wait = self._post_send(x, to)
            found = self._receive(source)
            wait()
            return found

    # ---- all together ----

    def all_reduce(self, x, op: str = "sum") -> np.ndarray:
        """Return the elementwise sum (or with op="max" the maximum) of all ranks' x, on every rank."""
        with self._in("all_reduce"):
            x = self._check_agreement(as_array(x))
            if op not in ("sum", "max"):
                raise ValueError(f"op is {op!r}, but must be 'sum' or 'max'.")
            self.sent += 2 * x.size * (self.size - 1) // self.size
            return self._group.all_reduce(x.copy(), "an answer", op)

    def all_gather(self, x, axis: int = 0) -> np.ndarray:
        """Return all ranks' x, joined in rank order along `axis`, on every rank. Their lengths along it may differ."""
        with self._in("all_gather"):
            parts = self._group.allgather_objects(as_array(x))
            self.sent += sum(part.size for part in parts) * (self.size - 1) // self.size
            return np.concatenate(parts, axis)

    def reduce_scatter(self, x, axis: int = 0) -> np.ndarray:
        """Return this rank's piece of the sum of all ranks' x along `axis`, split as np.array_split does."""
        with self._in("reduce_scatter"):
            x = self._check_agreement(as_array(x))
            self.sent += x.size * (self.size - 1) // self.size
            return np.array_split(self._group.all_reduce(x.copy(), "an answer"), self.size, axis)[self.rank]

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        with self._in("barrier"):
            self._group.allgather_objects(None)

    # ---- the implementation ----

    @contextmanager
    def _in(self, operation: str, *others: int):
        """Check that the operation is allowed, with these ranks; and record inside the block that it runs."""
        if operation not in self._allowed:
            can = ", ".join(self._allowed) or "nothing"
            raise PermissionError(f"group.{operation} may not be used here. This task allows: {can}.")
        for other in others:
            if not isinstance(other, int | np.integer) or not 0 <= other < self.size:
                raise ValueError(f"rank {self.rank} of {self.size}: there is no rank {other} to {operation} with. "
                                 f"Ranks are numbered from 0 to {self.size - 1}.")
            if other == self.rank and operation != "exchange":
                raise ValueError(f"rank {self.rank} would {operation} with itself, and wait for ever.")
        self.waiting = operation, int(others[0]) if others else None
        try:
            yield
        finally:
            self.waiting = None

    def _check_agreement(self, x: np.ndarray) -> np.ndarray:
        """Return x if all ranks have passed arrays of the same shape and dtype. Else raise ValueError on all ranks."""
        kinds = [f"{kind} {list(shape)}" for kind, shape in self._group.allgather_objects((x.dtype.name, x.shape))]
        other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise ValueError(f"only arrays of the same shape and dtype can be added up: rank 0 has passed "
                             f"{kinds[0]}, rank {other} has passed {kinds[other]}.")
        return x

    def _post_send(self, x, to: int):
        """Begin a send, and return a function that waits until it has ended."""
        x = as_array(x)
        head = np.full(LONGEST_SHAPE + 2, -1)
        head[:2 + x.ndim] = DTYPES.index(x.dtype.name), x.ndim, *x.shape
        self.sent += x.size if to != self.rank else 0
        sends = [self._group.post_send(head, to, HEAD, "head"), self._group.post_send(x, to, DATA, "data")]
        receipt = self._group.post_receive(np.empty(1), to, RECEIVED, "receipt")

        def wait():
            receipt.wait()
            for send in sends:
                send.wait()

        return wait

    def _receive(self, source: int) -> np.ndarray:
        head = self._group.post_receive(np.empty(LONGEST_SHAPE + 2, int), source, HEAD, "head").wait()
        x = np.empty(head[2:2 + head[1]], DTYPES[head[0]])
        self._group.post_receive(x, source, DATA, "data").wait()
        self._group.post_send(np.empty(1), source, RECEIVED, "receipt").wait()
        return x


def as_array(x) -> np.ndarray:
    """Convert to a contiguous array. Raises TypeError for values that cannot be sent."""
    if x is None:
        raise TypeError("None cannot be sent, only arrays: does the function that made it have a return?")
    x = np.asarray(x, order="C")
    if x.dtype.name not in DTYPES or x.ndim > LONGEST_SHAPE:
        raise TypeError(f"an array of {x.dtype} with {x.ndim} axes cannot be sent: the dtype must be one of "
                        f"{', '.join(DTYPES)}, with at most {LONGEST_SHAPE} axes")
    return np.ascontiguousarray(x) if x.ndim else x
