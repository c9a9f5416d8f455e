"""Where a backward hands its weight gradients: to be added now, or later.

A sink is called with the two factors of a gradient, sink(grad, x, dy), and means grad += x^T dy. It is told with
sink.done(...) which tensors have all that the microbatch gives them.
"""
from collections.abc import Callable

from mpi_impl.kernels import accumulate


class Now:
    """Adds at once. A schedule's B."""

    def __init__(self, contributed: Callable | None = None):
        """`contributed`, if given, is handed the trees that are done."""
        self.contributed = contributed

    def __call__(self, grad, x, dy) -> None:
        accumulate(grad, x, dy)

    def done(self, *grads) -> None:
        if self.contributed:
            self.contributed(*grads)


class Later:
    """Holds the factors, and so the activations: with it, a backward is a schedule's I, and `drain` is its W."""

    def __init__(self):
        self.held: list[tuple] = []     # (sink's method, its arguments), in the order of the calls

    def __call__(self, grad, x, dy) -> None:
        self.held.append((Now.__call__, grad, x, dy))

    def done(self, *grads) -> None:
        self.held.append((Now.done, *grads))

    def drain(self, sink: Now) -> None:
        """Hand over all that is held, in order."""
        for method, *arguments in self.held:
            method(sink, *arguments)
        self.held.clear()
