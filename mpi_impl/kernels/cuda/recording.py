"""A recording: what a function launches on a GPU, to be launched again in one call. It is a CUDA graph.

Python takes some 50 microseconds to launch a kernel. Small kernels are over sooner, so that the GPU waits. A recording
of a thousand of them is launched in one call.
"""
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any


class Recording:
    """The kernels of one call of a function. They work on the same arrays again, with the same numbers."""

    under_way = False       # whether what is launched is to be repeated

    def __init__(self, function: Callable[[], Any]):
        """Run the function, and then let it launch the same again without running it; `result` is what it returns, and
        has no values yet.

        The function must not wait for the GPU, nor move anything to or from the host. What it reads lies outside, where
        it may be overwritten between two replays; what it allocates has memory of the recording's own for as long as
        that lives. In the first call kernels are compiled, and libraries choose theirs.
        """
        import cupy
        cupy.get_default_memory_pool().free_all_blocks()       # what the function has had until now
        before, stream = cupy.cuda.get_current_stream(), stream_for_recordings(cupy.cuda.Device().id)
        self.memory = cupy.cuda.MemoryPool()
        before.synchronize()
        with stream, cupy.cuda.using_allocator(self.memory.malloc), recording():
            function()
            stream.synchronize()
            stream.begin_capture()
            try:
                self.result = function()
            except BaseException:
                with suppress(cupy.cuda.runtime.CUDARuntimeError):      # which says that nothing was recorded
                    stream.end_capture()
                raise
            self.graph = stream.end_capture()

    def replay(self) -> Any:
        """Run the kernels on the current stream, and return the result."""
        self.graph.launch()
        return self.result


@contextmanager
def recording() -> Iterator[None]:
    """Say so, as long as a recording is made."""
    Recording.under_way = True
    try:
        yield
    finally:
        Recording.under_way = False


@cache
def stream_for_recordings(device: int):
    """Return the stream for all recordings on a GPU, the current one. (The default stream records nothing.)"""
    import cupy
    return cupy.cuda.Stream(non_blocking=True)
