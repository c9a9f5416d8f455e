"""Sinks: where a backward hands its weight gradients, to be added immediately or later.

A sink is called with the two factors of a gradient, sink(grad, x, dy), and means grad += x^T dy. By sink.done(...) the
backward says which units have got all that the microbatch gives them. Gradients that cost little (of biases, norms and
embeddings) do not pass through here: the backward adds them itself.
"""
from collections.abc import Callable
from functools import partial

from mpi_impl.kernels import accumulate


def ignore(*units) -> None:
    """Do nothing."""


class ImmediateSink:
    """Adds each gradient immediately: with it a backward is a schedule's B."""

    def __init__(self, contributed: Callable = ignore, recomputed: Callable = ignore):
        """Call `contributed` with the units that are done, and `recomputed` with the caches that a backward has
        computed again and still holds.
        """
        self.done, self.recomputed = contributed, recomputed

    def __call__(self, grad, x, dy) -> None:
        accumulate(grad, x, dy)


class DeferredSink:
    """Holds the calls, and with them the activations: a backward is then a schedule's I, and `drain` is its W."""

    def __init__(self, sink: ImmediateSink):
        self.sink, self.recomputed, self.calls = sink, sink.recomputed, list[partial]()

    def __call__(self, grad, x, dy) -> None:
        self.calls.append(partial(self.sink, grad, x, dy))

    def done(self, *units) -> None:
        """Put off the same call of the sink."""
        self.calls.append(partial(self.sink.done, *units))

    def held(self) -> list:
        """Return the factors that wait."""
        return [call.args[1:] for call in self.calls if call.func is self.sink]

    def drain(self) -> None:
        """Make the calls, in order."""
        for call in self.calls:
            call()
