"""Where a backward hands its weight gradients: to be added at once, or later.

A sink is called with the two factors of a gradient, sink(grad, x, dy), and means grad += x^T dy. It is told with
sink.done(...) which units have all that the microbatch gives them. What costs little (the gradients of biases, norms
and embeddings) does not pass through here: the backward adds it itself.
"""
from collections.abc import Callable
from functools import partial

from mpi_impl.kernels import accumulate


def nobody(*told) -> None:
    """Who wants to know nothing."""


class ImmediateSink:
    """Adds at once: a backward is then a schedule's B."""

    def __init__(self, contributed: Callable = nobody, recomputed: Callable = nobody):
        """`contributed` is handed the units that are done, `recomputed` the caches that a backward has computed again
        and holds until it is through with them.
        """
        self.done, self.recomputed = contributed, recomputed

    def __call__(self, grad, x, dy) -> None:
        accumulate(grad, x, dy)

class DeferredSink:
    """Holds the calls, and so the activations: a backward is then a schedule's I, and `drain` is its W."""

    def __init__(self, sink: ImmediateSink):
        self.sink, self.recomputed, self.calls = sink, sink.recomputed, list[partial]()

    def __call__(self, grad, x, dy) -> None:
        self.calls.append(partial(self.sink, grad, x, dy))

    def done(self, *units) -> None:
        self.calls.append(partial(self.sink.done, *units))

    def held(self) -> list:
        """The factors that wait."""
        return [call.args[1:] for call in self.calls if call.func is self.sink]

    def drain(self) -> None:
        """Make the calls, in order."""
        for call in self.calls:
            call()
