"""`--mps` starts a daemon of NVIDIA's MPS, and ends it with the job, however that ends. Here the daemon is a fake."""
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mpi_impl.launch import mps
from mpi_impl.launch.guard import children
from mpi_impl.launch.launcher import check_options, parse_options
from reference.errors import UserError
from tests.launching import SOON, command, environment, in_foreground, launch, write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is there on Linux only")

# The daemon and its server, which leaves its parent, each write a file into $FAKE_NOTES. Without options the program
# passes a command to the daemon, and waits for its answer. $FAKE_MPS may be fail, hang (no answer) or ignore (no quit).
FAKE = f"""#!{sys.executable} -ES
import os, signal, socket, sys
mode, control = os.environ.get("FAKE_MPS"), os.path.join(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")

def note(name):
    with open(os.path.join(os.environ["FAKE_NOTES"], f"{{name}}.{{os.getpid()}}"), "w") as file:
        file.write(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + " " + os.environ.get("CUDA_VISIBLE_DEVICES", "all"))

if len(sys.argv) == 1:
    client = socket.socket(socket.AF_UNIX)
    client.connect(control)
    client.send(sys.stdin.buffer.read())
    sys.exit(client.recv(10) != b"done")
if sys.argv[1] == "-d" and os.fork():
    os._exit(0)
note("daemon")
if mode == "fail":
    with open(os.path.join(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log"), "w") as file:
        file.write("[Control 1] Starting\\n[Control 1] No GPU is found\\n")
    sys.exit(7)
ready, begun = os.pipe()
if not os.fork():
    if not os.fork():
        os.setsid()
        note("server")
        os.write(begun, b".")
        signal.pause()
    os._exit(0)
os.wait(), os.read(ready, 1)
server = socket.socket(socket.AF_UNIX)
server.bind(control)
server.listen()
while True:
    client = server.accept()[0]
    words = client.recv(100).decode().strip()
    if mode == "hang":
        signal.pause()
    if words == "quit" and mode != "ignore":
        for name in os.listdir(os.environ["FAKE_NOTES"]):
            if name.startswith("server"):
                try:
                    os.kill(int(name.split(".")[1]), signal.SIGTERM)
                except ProcessLookupError:
                    pass
        client.send(b"done")
        sys.exit()
    client.send(b"done")
"""

RANK = """
import json, os, sys, time
from pathlib import Path
notes = Path(os.environ["FAKE_NOTES"])
Path(notes / f"rank.{os.getpid()}").write_text(json.dumps({n: v for n, v in os.environ.items() if "CUDA_" in n} | {
    "mode": oct(os.stat(os.path.dirname(os.environ["CUDA_MPS_PIPE_DIRECTORY"])).st_mode),
    "alive": [note.name for note in notes.iterdir() if Path("/proc", note.suffix[1:]).exists()]}))
"""


class Fake:
    """The notes of the fake program's processes and of ranks."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def written(self, name: str) -> dict[int, str]:
        """Return the notes of the processes of a name by pid."""
        return {int(note.suffix[1:]): note.read_text() for note in self.notes.glob(f"{name}.*")}

    def ranks(self) -> list[dict]:
        return [json.loads(text) for text in self.written("rank").values()]

    def left(self) -> list[str]:
        """Return the processes that are alive, and the folders that are there."""
        folders = {text.split()[0].removesuffix("/pipes") for text in self.written("daemon").values()}
        return [*filter(os.path.exists, folders), *(
            note.name for note in self.notes.iterdir() if Path("/proc", note.suffix[1:]).exists())]

    def check_gone(self, daemons: int = 1) -> None:
        """Check that daemons and servers were there, and that nothing of them is left."""
        assert (len(self.written("daemon")), len(self.written("server"))) == (daemons, daemons)
        assert wait_until(lambda: not self.left()), self.left()


def wait_until(condition) -> bool:
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Iterator[Fake]:
    program, notes = tmp_path / "bin" / mps.PROGRAM, tmp_path / "notes"
    write_script(program, "")
    program.write_text(FAKE)
    notes.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_NOTES", str(notes))
    for name in (mps.PIPES, mps.LOGS, mps.SHARE, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    fake = Fake(notes)
    yield fake
    for name in ("daemon", "server", "rank"):
        for pid in fake.written(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def write_rank(folder: Path, body: str = "") -> Path:
    program = folder / "rank.py"
    program.write_text(f"{RANK}\n{body}\n")
    return program


@contextmanager
def started(fake: Fake, tmp_path: Path, last: str = "rank") -> Iterator[subprocess.Popen]:
    """Yield a job of a rank that sleeps, once a process of this name is there, and end it."""
    line = [sys.executable, "-m", "mpi_impl.launch", "-n", "1", "--mps", write_rank(tmp_path, "time.sleep(60)")]
    with subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True, preexec_fn=in_foreground) as job:
        try:
            assert wait_until(lambda: bool(fake.written(last)))
            yield job
        finally:
            job.terminate()


def quickly(**limits: float) -> list[str]:
    """Return the arguments of a Python that is the launcher, with other time limits of mps.py."""
    return ["-c", f"import sys; from mpi_impl.launch import mps; vars(mps).update({limits}); "
            "from functools import partial; from mpi_impl.launch.__main__ import *; "
            "sys.exit(run_guarded(partial(run_alone, main)))"]


# ---- from the start to the end of a job -----------------------------------------------------------------------------


def test_a_daemon_serves_the_ranks_and_ends_with_them(fake, tmp_path):
    """Ranks know where it is. It sees all GPUs, since ranks apply the numbers of CUDA_VISIBLE_DEVICES themselves."""
    long = tmp_path / ("x" * 100)       # too long for a socket's path
    long.mkdir()
    job = launch(3, "--mps", write_rank(tmp_path), env={"CUDA_VISIBLE_DEVICES": "1", "TMPDIR": str(long)})
    assert job.returncode == 0 and len(fake.ranks()) == 3, job.stderr
    assert job.stderr.startswith("note: MPS lets the 3 ranks compute") and job.stderr.count("\n") == 1
    (daemon, text), = fake.written("daemon").items()
    pipes, gpus = text.split()
    assert gpus == "all" and len(pipes) < 60
    for rank in fake.ranks():
        assert rank[mps.PIPES] == pipes and rank[mps.LOGS] == pipes.replace("pipes", "logs")
        assert rank["mode"] == "0o40700" and rank[mps.SHARE] == "33" and rank["CUDA_VISIBLE_DEVICES"] == "1"
        assert f"daemon.{daemon}" in rank["alive"]
    fake.check_gone()


def test_settings_of_the_user_stay_as_they_are(fake, tmp_path, monkeypatch):
    """GPUs that are named by UUIDs are the same to the daemon, and to ranks."""
    monkeypatch.setenv(mps.SHARE, "70")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1234")
    assert launch(1, "--mps", write_rank(tmp_path)).returncode == 0
    assert [text.split()[1] for text in fake.written("daemon").values()] == ["GPU-1234"]
    assert [(rank[mps.SHARE], rank["CUDA_VISIBLE_DEVICES"]) for rank in fake.ranks()] == [("70", "GPU-1234")]
    fake.check_gone()


def test_more_than_a_hundred_ranks_have_a_share_each():
    assert [mps.share_of(ranks) for ranks in (1, 3, 8, 100, 500)] == [100, 33, 12, 1, 1]


def test_each_start_of_a_job_has_a_daemon_of_its_own(fake, tmp_path):
    """The first one ends with a rank that fails."""
    program = write_rank(tmp_path, "sys.exit(9 if len(list(notes.glob('rank.*'))) < 2 else 0)")
    job = launch(1, "--mps", "--max-restarts", 2, program)
    assert job.returncode == 0 and job.stderr.count("note: MPS lets the 1 rank compute") == 2, job.stderr
    assert len({rank["alive"][0] for rank in fake.ranks()}) == 2
    fake.check_gone(daemons=2)


@pytest.mark.parametrize("victim, number, status", [
    ("launch", signal.SIGINT, 130), ("launch", signal.SIGTERM, 143), ("launch", signal.SIGKILL, -9),
    ("guard", signal.SIGKILL, 137)])
def test_a_daemon_ends_with_a_job_that_is_ended_or_killed(fake, tmp_path, victim, number, status):
    with started(fake, tmp_path) as job:
        os.kill(job.pid if victim == "launch" else min(children(job.pid)), number)
        assert job.wait(SOON) == status
        fake.check_gone()


def test_a_daemon_that_still_starts_ends_with_a_job_that_is_killed(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "hang")
    with started(fake, tmp_path, "server") as job:
        job.kill()
        job.wait(SOON)
        fake.check_gone()


def test_a_daemon_that_does_not_quit_is_killed_before_its_folder_is_removed(fake, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "ignore")
    job = command("-c", """if True:
        import os
        from mpi_impl.launch import mps
        from mpi_impl.launch.guard import JOB_FOLDER, children, run_guarded
        def work():
            with mps.mps_daemon(1):
                print(len(children(os.getpid())), os.path.exists(os.environ[JOB_FOLDER]))
            print(len(children(os.getpid())), os.path.exists(os.environ[JOB_FOLDER]), flush=True)
        mps.SECONDS_TO_QUIT = 0.2
        run_guarded(work)
    """)
    assert job.stdout == "2 True\n0 False\n", job.stderr
    fake.check_gone()


def test_a_daemon_is_not_taken_for_a_process_that_the_launcher_has_lost(fake, tmp_path):
    """Nor is its server. Any other child of the guard is."""
    job = command("-c", f"""if True:
        import os, subprocess, time
        from pathlib import Path
        from mpi_impl.launch.guard import Losses, children, leaving_nothing
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "{tmp_path}"
        with leaving_nothing():
            launcher, _ = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["{mps.PROGRAM}", "-f"])
            while not list(Path("{fake.notes}").glob("server.*")):
                time.sleep(0.01)
            losses = Losses(launcher.pid)
            print(len(children(os.getpid())), losses.found(), losses.found())
            other = subprocess.Popen(["sleep", "60"])
            print(losses.found(), losses.found())
    """)
    assert (job.stdout, job.stderr) == ("3 False False\nFalse True\n", "")


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, limits, said", [
    ("fail", {}, "which ended with status 7. It logged: [Control 1] Starting | [Control 1] No GPU is found."),
    ("hang", {"SECONDS_TO_START": 1}, "which did not answer within 1 seconds. It logged: nothing.")])
def test_a_daemon_that_does_not_start_ends_the_job_before_its_ranks(fake, tmp_path, monkeypatch, mode, limits, said):
    monkeypatch.setenv("FAKE_MPS", mode)
    job = command(*quickly(**limits), "-n", 2, "--mps", write_rank(tmp_path))
    assert (job.returncode, job.stderr.count("\n")) == (2, 1)
    assert job.stderr.startswith("error: --mps") and said in job.stderr and "leave --mps out" in job.stderr
    assert not fake.ranks() and not fake.left()


def refusal() -> str:
    """Return why a job with --mps is refused."""
    with pytest.raises(UserError) as error:
        check_options(parse_options(["-n", "8", "--mps", "-m", "mpi_impl.pretrain_gpt"]))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_several_machines_are_refused(fake, tmp_path, monkeypatch):
    write_script(tmp_path / "bin" / "srun", "exit 0")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert "srun may start the ranks on others" in refusal()
    monkeypatch.setenv("SLURM_STEP_ID", "0")    # in a step on one node ranks start here
    check_options(parse_options(["-n", "8", "--mps", "-m", "mpi_impl.pretrain_gpt"]))


def test_a_daemon_of_the_user_is_used_instead(fake, monkeypatch):
    monkeypatch.setenv(mps.PIPES, "/tmp/nvidia-mps")
    assert f"{mps.PIPES} names that of /tmp/nvidia-mps" in refusal()


def test_a_machine_without_mps_is_refused_and_one_where_path_lacks_it_is_not(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "FOLDERS", (str(tmp_path),))
    assert f"--mps needs {mps.PROGRAM}, which is neither on PATH nor in {tmp_path}" in refusal()
    monkeypatch.setattr(mps, "FOLDERS", (str(tmp_path), str(tmp_path / "bin")))
    assert mps.find_program() == str(tmp_path / "bin" / mps.PROGRAM)
    assert mps.own_daemon(8)[1].endswith(f"=12; {tmp_path}/bin/{mps.PROGRAM} -d")


def test_the_lines_for_a_daemon_of_ones_own_start_and_end_one(fake, tmp_path):
    begin, start, end = mps.own_daemon(8)
    wait = f"until echo {mps.QUESTION} | {mps.PROGRAM} 2>/dev/null; do sleep 0.01; done"
    script = "\n".join([begin, start, wait, end, 'status=$?; rm -r "$folder"; exit $status'])
    done = subprocess.run(["sh", "-c", script], env=environment(), timeout=SOON)
    assert done.returncode == 0
    fake.check_gone()
