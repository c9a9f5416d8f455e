"""The time of a step on a GPU by kind of work, from events on its stream before and after each piece of work.

A piece of work inside another one counts for the outer one: products of attention are attention. The rest is CuPy's own
element-wise work, and waiting for the next kernel to be launched. Recording some thousands of events takes the host
time, too: a step that is measured in this way is slower.
"""
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from statistics import median
from unittest import mock

from mpi_impl import kernels
from mpi_impl.comm.group import Group
from mpi_impl.kernels import cuda, fused
from mpi_impl.layers import core_attention

# kind -> where the functions are that do such work
KINDS = {"attention": [(core_attention, "attention_core"), (core_attention, "attention_core_backward")],
         "matrix products": [(cuda, "multiply")],
         "optimizer": [(kernels, "adam_update"), (kernels, "sum_of_squares")],
         "element-wise, our kernels": [(fused, "launch")],
         "communication": [(Group, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")]}
REST = "element-wise by CuPy, and waiting"


def time_of_steps(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step by kind of work: medians, after the same number of steps that do not count."""
    import cupy
    found = []
    with ExitStack() as patches:
        clock = Clock(cupy)
        for kind, places in KINDS.items():
            for place, name in places:
                patches.enter_context(mock.patch.object(place, name, clock.time_calls(kind, getattr(place, name))))
        for _ in range(2 * steps):
            found.append(clock.of_step(step))
    return {kind: median(one[kind] for one in found[steps:]) for kind in (*KINDS, REST, "step")}


class Clock:
    """The pieces of work of one step, each between two events."""

    def __init__(self, cupy):
        self.cupy, self.pieces, self.inside = cupy, list[tuple](), False

    def event(self):
        event = self.cupy.cuda.Event()
        event.record()
        return event

    def time_calls(self, kind: str, function: Callable) -> Callable:
        @wraps(function)
        def work(*arguments, **keywords):
            if self.inside:
                return function(*arguments, **keywords)
            self.inside, start = True, self.event()
            try:
                return function(*arguments, **keywords)
            finally:
                self.inside = False
                self.pieces.append((kind, start, self.event()))

        return work

    def of_step(self, step: Callable[[], object]) -> Counter:
        """Return the milliseconds by kind."""
        self.pieces, start = [], self.event()
        step()
        end, between = self.event(), self.cupy.cuda.get_elapsed_time
        end.synchronize()
        times = Counter[str]()
        for kind, one, other in self.pieces:
            times[kind] += between(one, other)
        whole = between(start, end)
        return times + Counter({REST: whole - times.total(), "step": whole})
