"""A trace file holds every slice, in the place where a viewer looks for it."""
import json
from collections import defaultdict

import pytest
from hypothesis import given, strategies as st

from mpi_impl.comm.trace import Slice
from mpi_impl.reports.timelines.chrome_trace import complete_events, write_chrome_trace
from reference.errors import UserError

NAMES = st.sampled_from([("2F0", "F"), ("11B7", "B"), ("0I3", "I"), ("1W12", "W"), ("optimizer", "other"),
                         ("wait for 1F0", "communication")])
STREAMS = st.sampled_from(["compute", "communication"])


@st.composite
def rank_slices(draw):
    """Draw one rank's slices. Slices of a stream may touch but never overlap; times are whole microseconds."""
    now, slices = {"compute": 0, "communication": 0}, []
    for stream, (name, kind), pause, length in draw(st.lists(st.tuples(
            STREAMS, NAMES, st.integers(0, 5), st.integers(0, 10**6)), max_size=8)):
        start = now[stream] + pause
        now[stream] = start + length
        slices.append(Slice(stream, name, kind, start / 1e6, now[stream] / 1e6))
    return slices


def read(path):
    """Return the events for a viewer, (process, thread, name, category, start, duration), and their arguments."""
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    labels, events = defaultdict(dict), []
    for event in trace["traceEvents"]:
        where = event["pid"], event.get("tid")
        if event["ph"] == "M":
            labels[where][event["name"]] = event["args"]
        else:
            assert event["ph"] == "X"
            events.append(event)
    return labels, events


@given(st.lists(rank_slices(), min_size=1, max_size=4))
def test_every_slice_comes_back(tmp_path, ranks):
    """The file has each rank's slices, by stream, with their times; an action with its stage and microbatch."""
    path = tmp_path / "trace.json"
    write_chrome_trace(str(path), ranks)
    labels, events = read(path)
    back = defaultdict(list)
    for event in events:
        rank = labels[event["pid"], None]["process_sort_index"]["sort_index"]
        stream = labels[event["pid"], event["tid"]]["thread_name"]["name"]
        if event["cat"] in "FBIW":
            assert event["name"] == f"{event['args']['stage']}{event['cat']}{event['args']['microbatch']}"
        else:
            assert event["args"] == {}
        back[rank].append((stream, event["name"], event["cat"], event["ts"], event["ts"] + event["dur"]))
    for rank, slices in enumerate(ranks):
        assert sorted(back[rank]) == sorted((*s[:3], round(s.start * 1e6), round(s.end * 1e6)) for s in slices)


@given(st.lists(rank_slices(), min_size=1, max_size=4))
def test_ranks_are_processes_and_streams_are_threads(tmp_path, ranks):
    """Named, in order, computing above communication; no number is 0, and no thread has another rank's number."""
    path = tmp_path / "trace.json"
    write_chrome_trace(str(path), ranks)
    labels, _ = read(path)
    processes = [pid for pid, tid in labels if tid is None]
    assert [labels[pid, None]["process_name"]["name"] for pid in processes] == [f"rank {r}" for r in range(len(ranks))]
    threads = [tid for _, tid in labels if tid is not None]
    assert 0 not in processes + threads and len(set(threads)) == len(threads)
    there = {s.stream for slices in ranks for s in slices}
    streams = [stream for stream in ("compute", "communication") if stream in there]
    for (_, tid), label in labels.items():
        if tid is not None:
            assert label["thread_name"]["name"] == streams[label["thread_sort_index"]["sort_index"]]


def test_the_file_depends_on_the_slices_alone(tmp_path):
    """The same bytes, in whatever order a rank wrote its slices down; one event stands on one line."""
    slices = [Slice("communication", "gradients", "communication", 3.0, 4.0), Slice("compute", "0F0", "F", 0.1, 0.2),
              Slice("compute", "0F1", "F", 0.2, 0.3)]
    for name, ranks in (("one", [slices, slices]), ("other", [slices[::-1], slices])):
        write_chrome_trace(str(tmp_path / name), ranks)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert sum('"ph": "X"' in line for line in (tmp_path / "one").read_text().splitlines()) == 6


def test_slices_of_a_stream_must_not_overlap(tmp_path):
    """A viewer would draw one of them wrong. The sentence says which rank, and which two; nothing is written."""
    ranks = [[], [Slice("compute", "1F0", "F", 0.0, 1.0), Slice("compute", "1B0", "B", 0.999, 2.0)]]
    with pytest.raises(ValueError, match="Rank 1: 1F0 and 1B0 overlap on the stream compute"):
        write_chrome_trace(str(tmp_path / "trace.json"), ranks)
    with pytest.raises(ValueError, match="Rank 0: 1F0 ends before it starts"):
        write_chrome_trace(str(tmp_path / "trace.json"), [[Slice("compute", "1F0", "F", 1.0, 0.0)]])
    assert not (tmp_path / "trace.json").exists()
    write_chrome_trace(str(tmp_path / "trace.json"), [[s._replace(stream=s.name) for s in ranks[1]]])


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=50), st.floats(0, 1e5))
def test_rounding_is_no_overlap_and_makes_none(lengths, start):
    """Slices that touch, but for rounding, touch or stand apart in the file, to the nanosecond."""
    slices = []
    for i, length in enumerate(lengths):
        slices.append(Slice("compute", f"0F{i}", "F", start * (1 - 2**-53), start + length))
        start += length
    events = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in complete_events(slices, 0)]
    first, second = complete_events([Slice("compute", "0F0", "F", 0, 1e-6 + 6e-10), Slice("compute", "0B0", "B",
                                     1e-6 + 4e-10, 2e-6)], 0)
    assert (first["dur"], second["ts"], second["dur"]) == (1.001, 1.001, 0.999)
    assert len(events) == len(slices)
    assert all(ts + dur <= following for (ts, dur), (following, _) in zip(events, events[1:]))


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="trace.json cannot be written: No such file or directory"):
        write_chrome_trace(str(tmp_path / "no folder" / "trace.json"), [[]])
