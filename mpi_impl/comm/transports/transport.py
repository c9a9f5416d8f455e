"""The interfaces of transports, one for each kind of call: a transport has those whose calls it can make."""
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence


class Request:
    """A call that goes on in the background, with the arrays that it works on: they must live until it is over."""

    def __init__(self, test: Callable[[], bool], wait: Callable[[], object], finish: Callable | None, *arrays):
        """Call `finish()`, which puts the result in its place, once `test()` reports the end or `wait()` returns."""
        self.test, self.block, self.finish, self.arrays = test, wait, finish, arrays

    def done(self) -> bool:
        """Report whether the call is over. MPI makes little progress unless it is asked."""
        done = self.test()
        if done:
            self.release()
        return done

    def wait(self) -> None:
        """Wait until the call is over."""
        self.block()
        self.release()

    def release(self) -> None:
        """Put the result in its place, once, and release the arrays: the caller may overwrite them from now on."""
        if self.finish:
            self.finish()
        self.finish, self.arrays = None, ()


class Transport:
    """A way to move arrays between the ranks of one group.

    All ranks call the group's collectives in the same order, with arrays of one shape and dtype. x may be a view with
    gaps; out, and whatever a posted collective works on, is contiguous.
    """

    def takes(self, x) -> bool:
        """Report whether this transport can move x. All ranks get the same answer, and ask together."""
        return True

    def free(self) -> None:
        """Give back what the transport holds. Called by all ranks, when nothing is under way."""


class Collectives(Transport, ABC):
    """A transport for collectives that return with the result."""

    def warm_up(self, like) -> None:
        """Do what belongs to the first call alone, for arrays of this kind. Called by all ranks."""

    @abstractmethod
    def all_reduce(self, x, op: str) -> None:
        """Overwrite x with the elementwise sum (or maximum) over all ranks."""

    @abstractmethod
    def all_gather(self, x, out, axis: int) -> None:
        """Join every rank's x in out, in rank order along the axis."""

    @abstractmethod
    def reduce_scatter(self, x, out, axis: int) -> None:
        """Write this rank's piece, along the axis, of the sum over all ranks to out."""

    @abstractmethod
    def broadcast(self, x, root: int) -> None:
        """Overwrite x with that of rank `root`."""


class AllToAll(Transport, ABC):
    """A transport for messages of any sizes from every rank to every other.

    (Shared memory is none of them: whether it takes an array depends on its size, and here each rank has another.)
    """

    @abstractmethod
    def all_to_all_rows(self, x, sent, out, received) -> None:
        """Send sent[i] rows of x to rank i, one rank's after the other's, and write received[i] from rank i to out."""


class PostedCollectives(Transport, ABC):
    """A transport for collectives that go on in the background."""

    @abstractmethod
    def post(self, operation: str, x, out, sizes: Sequence[int] | None = None) -> Request:
        """Begin an all_reduce (a sum), all_gather or reduce_scatter from x to out along axis 0.

        In an all_reduce out is x. Otherwise the smaller array may be this rank's own piece of the larger one. All
        pieces have one size, or rank i's has sizes[i] elements.
        """


class PointToPoint(Transport, ABC):
    """A transport from one rank to another."""

    @abstractmethod
    def post_send(self, x, to: int, tag: int) -> Request:
        """Begin to send x, which must not change until the call is over."""

    @abstractmethod
    def post_receive(self, x, source: int, tag: int) -> Request:
        """Begin to receive into x."""


class LoneRank(Collectives, AllToAll, PostedCollectives):
    """The transport of a group of one rank: it moves nothing. The result of a blocking collective is its input."""

    def all_reduce(self, x, op):
        pass

    def all_gather(self, x, out, axis):
        assert out is x

    def reduce_scatter(self, x, out, axis):
        assert out is x

    def broadcast(self, x, root):
        pass

    def all_to_all_rows(self, x, sent, out, received):
        out[...] = x

    def post(self, operation, x, out, sizes=None):
        if out is not x:
            out[...] = x
        return Request(lambda: True, lambda: None, None)
