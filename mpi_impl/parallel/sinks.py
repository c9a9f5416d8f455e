"""Sinks: where a backward hands its weight gradients, to be added immediately or later.

A sink is called with the two factors of a gradient, sink(grad, x, dy), and means grad += x^T dy. By sink.done(...) the
backward says which units are complete for this microbatch. Gradients that cost little (of biases, norms and
embeddings) do not pass through here: the backward adds them itself.
"""
from collections import deque
from collections.abc import Callable
from functools import partial

from mpi_impl.kernels import accumulate


def ignore(*units) -> None:
    """Do nothing."""


class ImmediateSink:
    """Adds each gradient immediately: with it a backward is a schedule's B."""

    def __init__(self, contributed: Callable = ignore, recomputed: Callable = ignore, progress: Callable = ignore):
        """Call `contributed` with the units that are done, `recomputed` with the caches that a backward has computed
        again and still holds, and `progress` after each gradient: what is under way goes on while MPI is called.
        """
        self.done, self.recomputed, self.progress = contributed, recomputed, progress

    def __call__(self, grad, x, dy) -> None:
        accumulate(grad, x, dy)
        self.progress()


class DeferredSink:
    """Holds the calls, and with them the activations: a backward is then a schedule's I, and `drain` is its W."""

    def __init__(self, sink: ImmediateSink):
        self.sink, self.recomputed, self.calls = sink, sink.recomputed, deque[partial]()

    def __call__(self, grad, x, dy) -> None:
        self.calls.append(partial(self.sink, grad, x, dy))

    def done(self, *units) -> None:
        """Put off the same call of the sink."""
        self.calls.append(partial(self.sink.done, *units))

    def held(self) -> list:
        """Return the factors that wait."""
        return [call.args[1:] for call in self.calls if call.func is self.sink]

    def drain(self) -> None:
        """Make the calls, in order, and give up what each of them holds."""
        while self.calls:
            self.calls.popleft()()
