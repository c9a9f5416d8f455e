"""`shardlab hang`: dumps of jobs that were played here until nothing moved, and dumps that make no sense."""
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from reference.errors import UserError
from shardlab.hang import logs
from shardlab.hang.dumps import read_all
from shardlab.hang.waits import Job, report

# ---- jobs that are played until nothing moves -----------------------------------------------------------------------

Operation = tuple[str, tuple[int, ...]]     # what is called, and by which ranks


class Played:
    """Ranks that post their operations in order, up to some ahead of the first that has not ended, until none can."""

    def __init__(self, programs: list[list[Operation]], ahead: int = 1):
        self.programs, self.ahead = programs, ahead
        self.posted = [0] * len(programs)       # of each rank,
        self.ended = [0] * len(programs)        # and how many of them have ended, in order
        while any([self.post(rank) for rank in range(len(programs))]) or self.end():
            pass

    def post(self, rank: int) -> bool:
        can = self.posted[rank] < min(len(self.programs[rank]), self.ended[rank] + self.ahead)
        self.posted[rank] += can
        return can

    def end(self) -> bool:
        """End an operation that is the first open one of all its ranks, and the same in number."""
        for rank, program in enumerate(self.programs):
            if self.ended[rank] < self.posted[rank]:
                name, members = program[self.ended[rank]]
                if all(self.is_at(other, members, self.number(rank)) for other in members):
                    for other in members:
                        self.ended[other] += 1
                    return True
        return False

    def number(self, rank: int, i: int | None = None) -> int:
        """Return which of its group an operation of a rank is: its first open one, unless told."""
        i = self.ended[rank] if i is None else i
        return sum(members == self.programs[rank][i][1] for _, members in self.programs[rank][:i + 1])

    def is_at(self, rank: int, members: tuple[int, ...], number: int) -> bool:
        i = self.ended[rank]
        return i < self.posted[rank] and self.programs[rank][i][1] == members and self.number(rank) == number

    def dump(self, rank: int, gloo: bool = False) -> dict[str, Any]:
        """Return the rank's dump, as PyTorch pickles it. gloo only retires what has ended, and its counter of what
        ended last also counts messages, here more than there are collectives.
        """
        groups = sorted({members for program in self.programs for _, members in program if rank in members})
        entries = [{
            "record_id": i, "pg_id": groups.index(members), "process_group": (name_of(members), ""),
            "collective_seq_id": self.number(rank, i),
            "p2p_seq_id": 0, "op_id": i, "profiling_name": f"{'gloo' if gloo else 'nccl'}:{name}", "time_created_ns": i,
            "input_sizes": [[4, 5]], "input_dtypes": ["Float"], "output_sizes": [[4, 5]], "output_dtypes": ["Float"],
            "state": "completed" if i < self.ended[rank] and not gloo else "scheduled", "retired": i < self.ended[rank],
            "is_p2p": False, "frames": [{"name": "f", "filename": "/lib/site-packages/torch/x.py", "line": 1},
                                        {"name": "step", "filename": "/home/me/train.py", "line": 10 + i}],
        } for i, (name, members) in enumerate(self.programs[rank][:self.posted[rank]])]
        status = {str(i): {"last_completed_collective": 1000} for i in range(len(groups))}
        config = {name: {"name": name, "desc": "", "ranks": str(list(members))}
                  for name, members in ((name_of(members), members) for members in groups)}
        return {"version": "2.10", "entries": entries, "pg_status": status, "pg_config": config}


def name_of(members: tuple[int, ...]) -> str:
    return "-".join(map(str, members))


def write(folder: Path, dumps: list[dict], form: str = "pickle") -> None:
    for rank, dump in enumerate(dumps):
        Path(folder, f"comm_lib_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump) if form == "pickle" else json.dumps(dump).encode())


def job_of(played: Played, tmp: Path, form: str = "pickle", gloo: bool = False) -> Job:
    write(tmp, [played.dump(rank, gloo) for rank in range(len(played.programs))], form)
    return Job(read_all([str(tmp)]))


@st.composite
def jobs(draw) -> tuple[list[list[Operation]], int]:
    """Draw the programs of ranks that would end, but for one, which stops after some of its operations."""
    n = draw(st.integers(2, 6))
    groups = draw(st.lists(st.sets(st.integers(0, n - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks))),
                           min_size=1, max_size=4, unique=True))
    order = draw(st.lists(st.tuples(st.sampled_from(["all_reduce", "all_gather"]), st.sampled_from(groups)),
                          min_size=1, max_size=12))
    programs = [[one for one in order if rank in one[1]] for rank in range(n)]
    culprit = draw(st.sampled_from([rank for rank in range(n) if programs[rank]]))
    programs[culprit] = programs[culprit][:draw(st.integers(0, len(programs[culprit]) - 1))]
    return programs, culprit


@given(jobs(), st.sampled_from(["pickle", "json"]), st.booleans())
def test_all_waiting_ends_at_the_rank_that_stopped(tmp_path_factory, job, form, gloo):
    """Whatever the groups, directly or through ranks that wait for it in turn."""
    programs, culprit = job
    found = job_of(Played(programs), tmp_path_factory.mktemp("dumps"), form, gloo)
    assert found.ends == (culprit,) and not found.disagreements and not found.circle
    assert f"All waiting ends at rank {culprit}." in report(found)


@given(jobs(), st.integers(2, 4))
def test_it_does_if_ranks_post_ahead_of_what_has_ended(tmp_path_factory, job, ahead):
    """Or the rank that stopped has itself posted what waits for others: then it is in a circle."""
    programs, culprit = job
    found = job_of(Played(programs, ahead), tmp_path_factory.mktemp("dumps"))
    assert culprit in (*found.ends, *found.circle)


@given(jobs())
def test_a_job_that_ends_waits_for_nothing(tmp_path_factory, job):
    programs, culprit = job
    order: list[list[Operation]] = [[one for one in program if culprit not in one[1]] for program in programs]
    found = job_of(Played(order), tmp_path_factory.mktemp("dumps"), "json")
    assert not found.waits and not found.disagreements
    assert report(found).endswith("Nobody waits: all that was posted has ended.")


def test_two_groups_in_other_orders_are_a_circle(tmp_path):
    a, b = ("all_reduce", (0, 1)), ("all_gather", (0, 1, 2))
    found = job_of(Played([[a, b], [b, a], [b]]), tmp_path)
    assert found.circle == [0, 1]
    assert "That is a circle: rank 0 in group 0-1 (ranks 0, 1) for rank 1, rank 1 in group 0-1-2" in report(found)


@pytest.mark.parametrize("more, said", [(True, "rank 2 has called this one more than the others"),
                                        (False, "rank 2 has left one out that the others have called")])
def test_a_collective_more_or_less_is_named_with_its_rank(tmp_path, more, said):
    """The first that differs: not the one where the job stands, and not the first rank's."""
    everyone = (0, 1, 2)
    program = [("all_reduce", everyone), ("all_gather", everyone), ("broadcast", everyone), ("all_reduce", everyone)]
    other = [program[0], ("broadcast", everyone), *program[1:]] if more else [program[0], *program[2:]]
    played = Played([program, program, other])
    played.posted = [4, 4, len(other)]
    text = report(job_of(played, tmp_path))
    assert ("collective 2 is not the same on all ranks: ranks 0 and 1 called all_gather of [4, 5] at train.py:11; "
            "rank 2 called broadcast of [4, 5] at train.py:11.") in text
    assert said in text and "Look first at collective 2 of group 0-1-2 (ranks 0, 1, 2)" in text


def test_of_two_ranks_that_differ_neither_is_blamed(tmp_path):
    """As in PyTorch's own tutorial, where rank 0 has called one more."""
    program = [("all_reduce", (0, 1)), ("all_gather", (0, 1)), ("all_reduce", (0, 1))]
    played = Played([[program[0], *program], program])
    played.posted = [4, 3]
    found = job_of(played, tmp_path)
    assert found.disagreements[0].odd == ()
    text = report(found)
    assert "collective 2 is not the same on all ranks: rank 0 called all_reduce of [4, 5] at train.py:11;" in text
    assert "From there on, all agree if rank 0 has called this one more than the others." in text
    assert "and at what the ranks that differ did before it" in text


def played_entries(text: str, is_p2p: bool = True) -> list[dict[str, Any]]:
    """Return the entries of calls, as ProcessGroupNCCL records them, from "operation/state/inputs/outputs; ...".

    What a batch coalesces stands between " + ". Not all versions call the last entry of one with messages a message.
    """
    return [{"record_id": 9 * (i - 1) + k, "process_group": ["default_pg", ""], "profiling_name": f"nccl:{name}",
             "state": state, "is_p2p": "-" in name or "-" in call and is_p2p, "p2p_seq_id": i * ("-" in call),
             "collective_seq_id": i * ("-" not in call),
             "input_sizes": [[*map(int, size.split("x"))] for size in inputs.split()],
             "output_sizes": [[*map(int, size.split("x"))] for size in outputs.split()]}
            for i, call in enumerate(text.split("; "), 1) for k, part in enumerate(call.split(" + "))
            for name, state, inputs, outputs in [f"{part}//".split("/")[:4]]]


def job_of_calls(folder: Path, *of_ranks: str, is_p2p: bool = True) -> Job:
    """Return the job of ranks 4, 5, ... that have made these calls."""
    config = {"default_pg": {"name": "default_pg", "ranks": str([*range(4, 4 + len(of_ranks))])}}
    for rank, text in enumerate(of_ranks, 4):
        Path(folder, f"rank_{rank}.json").write_text(json.dumps(
            {"pg_config": config, "entries": played_entries(text, is_p2p) if text else []}))
    return Job(read_all([str(folder)]))


@pytest.mark.parametrize("first, second, said", [
    ("send 0->1/completed; recv 0<-1/scheduled", "recv 1<-0/completed",
     "Rank 4 waits in a receive from rank 5 of group default_pg (ranks 4, 5) for rank 5, which has not come to it."),
    ("recv 0<-1/scheduled; send 0->1/scheduled", "recv 1<-0/scheduled; send 1->0/scheduled",
     "That is a circle: rank 4 in group default_pg (ranks 4, 5) for rank 5"),
    ("send 0->1/scheduled", "recv 1<-0/started", "to which all its ranks have come"),
    ("_broadcast_oop/scheduled/1 + _broadcast_oop/scheduled/2 + ALLGATHER_coalesced/completed",
     "_broadcast_oop/scheduled/1 + _broadcast_oop/scheduled/2 + ALLGATHER_coalesced/completed", "Nobody waits"),
    ("all_reduce/completed/4x5", "all_reduce/completed/20", "Nobody waits"),
    ("scatter/completed/4 4/4", "scatter/completed//4", "Nobody waits"),
    ("all_to_all/scheduled/2 3/2 1", "all_to_all/scheduled/1 2/4 2", "4 sends 3 elements to rank 5, which expects 4."),
    ("all_to_all/scheduled/4x2/8", "all_to_all/scheduled/8/5x2", "send 16 elements in all, and expect 18.")])
def test_calls_match_by_their_order_numbers_and_elements(tmp_path, first, second, said):
    """Messages have ranks of the group, and it is said what ranks of the world those are."""
    assert said in report(job_of_calls(tmp_path, first, second))


@given(st.integers(3, 6), st.integers(1, 4), st.integers(0, 5), st.booleans(), st.booleans())
def test_a_pipeline_by_batches_waits_for_the_stage_that_stopped(tmp_path_factory, n, done, culprit, is_p2p, ahead):
    """Also where neighbors of its neighbors are done with their part."""
    def calls(rank: int, stopped: bool) -> str:
        parts = [f"{part}{other}/scheduled" for other in {max(rank - 1, 0), rank, min(rank + 1, n - 1)} - {rank}
                 for part in (f"send {rank}->", f"recv {rank}<-")]
        last = "completed" if ahead and abs(rank - culprit % n) > 1 else "scheduled"
        states = ["completed"] * done + [last] * (not stopped)
        return "; ".join(" + ".join([*parts, f"coalesced/{state}"]) for state in states)

    found, right = (job_of_calls(tmp_path_factory.mktemp("dumps"), *(
        calls(rank, rank in at_work) for rank in range(n)), is_p2p=is_p2p) for at_work in ([culprit % n], range(n)))
    assert found.ends == (4 + culprit % n,) and not found.disagreements and not right.waits


def test_a_ring_buffer_that_has_lost_its_beginning_is_read_by_its_numbers(tmp_path):
    """Records are counted by each rank for itself, and a rank of more groups has more."""
    everyone = (0, 1)
    played = Played([[("all_reduce", everyone)] * 5, [("all_reduce", everyone)] * 4])
    dumps = [played.dump(0), played.dump(1)]
    dumps[0]["entries"] = dumps[0]["entries"][3:]
    write(tmp_path, dumps)
    found = Job(read_all([str(tmp_path)]))
    assert not found.disagreements and found.ends == (1,)


def test_a_rank_whose_buffer_has_lost_a_collective_has_come_to_it(tmp_path):
    """It has posted others since, of which the first has not ended either."""
    everyone = ("all_reduce", (0, 1, 2))
    played = Played([[everyone] * 3, [everyone] * 5, [everyone] * 2], ahead=4)
    dumps = [played.dump(rank) for rank in range(3)]
    dumps[1]["entries"] = dumps[1]["entries"][3:]
    write(tmp_path, dumps)
    found = Job(read_all([str(tmp_path)]))
    assert found.waits[0].absent == (2,) and found.ends == (2,)


def test_a_rank_without_a_dump_is_said(tmp_path):
    played = Played([[("all_reduce", (0, 1, 2))]] * 2 + [[]])
    write(tmp_path, [played.dump(0), played.dump(1)])
    text = report(Job(read_all([str(tmp_path)])))
    assert "There is no dump of rank 2:" in text
    assert text.endswith("All waiting ends at rank 2. Rank 2 has left no dump.")


PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
rank = int(sys.argv[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=str(rank), WORLD_SIZE="3")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
if rank < 2:
    waiting = dist.all_reduce(torch.ones(4), async_op=True)
time.sleep(1)
Path(f"rank_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
os._exit(0)
"""


@pytest.mark.deep
def test_dumps_of_pytorch_itself(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, "program.py", str(rank), port], cwd=tmp_path,
                              env={**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}) for rank in range(3)]
    assert [rank.wait(100) for rank in ranks] == [0, 0, 0]
    text = report(Job(read_all([str(tmp_path)])))
    for rank in (0, 1):
        assert f"Rank {rank} waits in all_reduce 2 of group 0 (ranks 0, 1, 2) at program.py:11 for rank 2," in text
    assert "All waiting ends at rank 2. Rank 2 waits for nobody: the last that it posted, all_reduce of [2]" in text


# ---- what is no dump ------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("name, content, said", [
    ("rank_0", pickle.dumps({"entries": [Harmful()]}), "wants to use posix.system"),
    ("rank_0", pickle.dumps({"entries": []})[:-4], "no pickle that can be read"),
    ("rank_0", pickle.dumps([1, 2]), "not a dump of PyTorch's flight recorder: expected `object`"),
    ("rank_0", pickle.dumps({"entries": [{"record_id": "x"}]}), "not a dump of PyTorch's flight recorder"),
    ("rank_0", pickle.dumps({"entries": [{"record_id": 1 << 20_000}]}), "expected `int` <= "),
    ("rank_0", b"", "no pickle that can be read"),
    ("rank_0", b"\x80\x04" + b"(" * 200_000 + b"l" * 200_000 + b".", "rank_0 is"),
    ("rank_0", b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.", "no pickle that can be read"),      # a tuple as a key
    ("rank_0.json", b'{"entries": 1}', "expected `array`"), ("rank_0.json", b'{"entries', "not JSON"),
    ("trace", b"", "must end in the rank"), (None, b"", "is not there")])
def test_what_is_no_dump_is_refused_and_nothing_of_it_executed(tmp_path, monkeypatch, name, content, said):
    monkeypatch.chdir(tmp_path)
    path = Path(tmp_path, name or "nowhere")
    if name:
        path.write_bytes(content)
    with pytest.raises(UserError, match="(?s)" + said.replace("[", r"\[")):
        read_all([str(path)])
    assert not Path("harmed").exists()


def test_two_dumps_of_a_rank_are_refused(tmp_path):
    for name in ("a_rank_1", "b_rank_1"):
        Path(tmp_path, name).write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(UserError, match="are both of rank 1"):
        read_all([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no dump"):
        read_all([str(tmp_path / "empty")])


NONSENSE = st.one_of(st.none(), st.booleans(), st.integers(), st.just(1 << 20_000), st.floats(), st.text(), st.binary(),
                     st.lists(st.integers()), st.dictionaries(st.text(), st.text()), st.just({(1,): {2}}))


@given(st.data())
def test_a_damaged_dump_is_a_sentence_or_a_report(tmp_path_factory, data):
    """Whatever a field is replaced with, or a byte."""
    dump = Played([[("all_reduce", (0, 1))] * 2, [("all_reduce", (0, 1))]]).dump(0)
    entries, groups = dump["entries"], dump["pg_config"].values()
    place = data.draw(st.sampled_from([dump, *entries, *entries[0]["frames"], *groups]))
    place[data.draw(st.sampled_from(list(place)))] = data.draw(NONSENSE)
    content = bytearray(pickle.dumps(dump, data.draw(st.integers(2, 5))))
    if data.draw(st.booleans()):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "rank_0").write_bytes(content)
    try:
        assert report(Job(read_all([str(folder)])))
    except UserError as error:
        assert "rank_0" in str(error)


# ---- the lines of a watchdog ----------------------------------------------------------------------------------------


def watchdog(rank: int, number: int, call: str, group: str | None = "0(default_pg)", version: str = "2.5") -> str:
    """Return the lines of a rank, as versions of PyTorch write them. A group of None is not the first of 2.4's."""
    old, place = version == "2.0", f"PG {1 if group is None else 0}" if version == "2.4" else f"PG ID 7 PG GUID {group}"
    begin = "[E ProcessGroupNCCL.cpp:828]" if old else f"[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:616]"
    timeout = (f"{begin} [Rank {rank if old else 0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
               f"{number}, OpType={call}, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.")
    return timeout if old else (f"{timeout}\n{begin} [{place} Rank 0] Exception (either an error or timeout) detected "
                                f"by watchdog at work: {number}, last enqueued NCCL work: 999, last completed NCCL "
                                "work: 1.")


SUM, GATHER = "ALLREDUCE, NumelIn=8, NumelOut=8", "ALLGATHER, NumelIn={}, NumelOut=16"


@pytest.mark.parametrize("lines, said", [
    ([watchdog(rank, 14, SUM) for rank in (0, 2, 3)], "ranks 0, 2 and 3 waited too long in call 14, ALLREDUCE"),
    ([watchdog(0, 14, SUM), watchdog(1, 14, GATHER.format(8))], "They have made different calls as number 14"),
    ([watchdog(0, 14, SUM), watchdog(1, 14, SUM.replace("8", "9"))], "They have made different calls as number 14"),
    ([watchdog(0, 15, SUM), watchdog(1, 14, SUM)], "beyond call 14, in which rank 1 waited"),
    ([watchdog(0, 15, SUM), watchdog(0, 14, SUM), watchdog(1, 14, SUM)], "ranks 0 and 1 waited too long in call 14"),
    ([watchdog(0, 14, GATHER.format(8)), watchdog(1, 14, GATHER.format(9))], None),
    ([watchdog(0, 14, "SEND"), watchdog(1, 14, "RECV")], None),
    ([watchdog(0, 14, SUM, "3(tp)"), watchdog(1, 15, SUM, "4(tp)")], None),
    ([watchdog(0, 14, SUM, None, "2.4"), watchdog(1, 15, SUM, None, "2.4")], None),
    ([watchdog(0, 14, SUM, version="2.4"), watchdog(1, 15, SUM, version="2.4")], "beyond call 14, in which rank 0"),
    ([watchdog(5, 14, SUM, version="2.0")], "In a group that the lines do not name rank 5 waited too long in call 14")])
def test_the_lines_of_a_watchdog_are_put_together(tmp_path, lines, said):
    """Among the lines of a program, in one file or several. Nobody is accused of sizes that may differ, of messages, or
    of calls in other groups.
    """
    paths = [tmp_path / f"rank{i % 2}.out" for i in range(len(lines))]
    for path, text in zip(paths, lines):
        path.write_text((path.read_text() if path.exists() else "loss 2.5\n") + text + "\n")
    text = logs.report(logs.timeouts_in(list(map(str, dict.fromkeys(paths)))))
    assert said in text if said else "different" not in text and "beyond" not in text, text
