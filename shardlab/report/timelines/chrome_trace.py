"""Timelines as a file for a trace viewer: open it at https://ui.perfetto.dev or chrome://tracing.

The file is in Chrome's trace event format: JSON, a process for each rank and in it a thread for each stream. Viewers
colour events by their names without digits, so `2F0` and `3F1` look the same. Streams are threads of different numbers
in different ranks, and no number is 0: Perfetto takes process 0 for the operating system's.
"""
import json
from collections.abc import Iterator, Sequence

from mpi_impl.comm.trace import Slice
from mpi_impl.runtime.files import write_whole


def write_chrome_trace(path: str, ranks: Sequence[Sequence[Slice]], numbers: Sequence[int] = ()) -> None:
    """Write each rank's slices, on one clock. `numbers` are the ranks', if they are not all ranks of the world. Raise
    ValueError for overlaps in a stream, UserError if it cannot.
    """
    streams = sorted({s.stream for slices in ranks for s in slices}, key=lambda stream: (stream != "compute", stream))
    events: list[dict] = []
    for rank, slices in enumerate(ranks):
        process, number = rank + 1, numbers[rank] if numbers else rank
        events += [metadata("process_name", f"rank {number}", process), metadata("process_sort_index", rank, process)]
        for i, stream in enumerate(streams):
            thread = i * len(ranks) + process
            events += [metadata("thread_name", stream, process, thread),
                       metadata("thread_sort_index", i, process, thread)]
            own = [s for s in slices if s.stream == stream]
            events += [{"ph": "X", "pid": process, "tid": thread, **event} for event in complete_events(own, rank)]
    lines = ",\n".join(map(json.dumps, events))
    write_whole(path, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def metadata(what: str, value: str | int, process: int, thread: int | None = None) -> dict:
    """Return an event with the name of a process or a thread, or its place (its sort_index)."""
    place = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"ph": "M", "name": what, **place, "args": {what.split("_", 1)[1]: value}}


def complete_events(slices: Sequence[Slice], rank: int) -> Iterator[dict]:
    """Yield an event for each slice of a stream, by start. Times are whole nanoseconds, written as microseconds."""
    before, free = "", 0                                   # the slice before, and when it ended
    for s in sorted(slices, key=lambda s: (s.start, s.end)):
        start, end = nanoseconds(s.start), nanoseconds(s.end)
        if end < start:
            raise ValueError(f"Rank {rank}: {s.name} ends before it starts: {s}.")
        if before and start < free - 1:                    # 1 ns is rounding
            raise ValueError(f"Rank {rank}: {before} and {s.name} overlap on the stream {s.stream}: {before} ends at "
                             f"{free / 1e9:.9f} s, {s.name} starts at {s.start:.9f} s.")
        if before:
            start = max(start, free)
        before, free = s.name, max(start, end)
        yield {"name": s.name, "cat": s.kind, "ts": start / 1000, "dur": (free - start) / 1000, "args": arguments(s)}


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def arguments(s: Slice) -> dict:
    """Return the details that a viewer shows next to the name."""
    return {"stage": s.action.stage, "microbatch": s.action.microbatch} if s.action else {}
