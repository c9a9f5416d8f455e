"""A cluster of Slurm in one machine: a controller, munge, and nodes that each have a name, processes and shared memory
of their own, for all that Slurm starts there. Files and the network are the machine's.

A node is a set of Linux namespaces, held by its slurmd. It ends with that process, and so does all that runs on it.
"""
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.launching import environment
from tests.two_hosts import end_with_parent, search_path, wait_for

NODES = ("node1", "node2")
CORES = 4           # of a node, whatever the machine has
PATIENCE = 180      # seconds for what takes a few, on a busy machine
NAMESPACES = ("uts", "ipc", "pid", "mount")

# The first process of a node, in its namespaces: $1 is its name, $2 the folder with the cluster's files.
FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
exec slurmd -D -N "$1"
"""

# A job that is queued again waits for cred_expire seconds (by default 120). Nodes have one address, and a port each.
CONFIGURATION = """
ClusterName=shardlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=30
KillWait=5
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={patience}
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def why_not() -> str:
    """Return the reason why there can be no such cluster here; "" if there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the nodes of a cluster in one machine are namespaces of Linux, which root alone may make"
    for program, package in {"munged": "munge", "slurmd": "slurmd", "slurmctld": "slurmctld", "srun": "slurm-client",
                             "unshare": "util-linux", "hostname": "hostname"}.items():
        if shutil.which(program, path=search_path()) is None:
            return f"{program} is not installed (on Debian: apt install {package})"
    made = subprocess.run(["unshare", *(f"--{name}" for name in NAMESPACES), "--fork", "--mount-proc", "mount", "-t",
                           "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    return f"namespaces are refused: {made.stderr.strip()}" if made.returncode else ""


def free_ports(n: int) -> list[int]:
    """Return n ports of this machine that nobody has."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Cluster:
    """A controller, munge and the nodes. Commands are given outside the nodes, as on a login host."""

    def __init__(self, folder: Path):
        """Start the cluster, and return when Slurm says that all nodes are idle; end it if that fails."""
        self.folder = folder
        self.variables = environment({"SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()})
        self.daemons: dict[str, subprocess.Popen] = {}
        self.write_files()
        try:
            self.start("munge", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *(
                f"--{file}-file={folder}/munge.{file}" for file in ("key", "log", "pid", "seed")))
            self.wait_for(lambda: (folder / "munge.socket").exists(), "munge's socket")
            self.start("controller", "slurmctld", "-D")
            for name in NODES:
                self.start_node(name)
            self.wait_for(lambda: self.nodes("idle") == set(NODES), "idle nodes")
        except BaseException:
            self.end()
            raise

    def write_files(self) -> None:
        port, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={CORES}"
                          for name, port in zip(NODES, ports, strict=True))
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            folder=self.folder, host=socket.gethostname(), port=port, nodes=nodes, patience=PATIENCE))
        (self.folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/dev/shm\n")     # /tmp is the machine's
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {name}\n" for name in NODES))
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()
        for name in NODES:
            (self.folder / f"spool.{name}").mkdir()

    def start(self, name: str, *command) -> None:
        """Start a process that lasts as long as the cluster."""
        with (self.folder / f"{name}.log").open("w") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.variables,
                                                  preexec_fn=end_with_parent)

    def start_node(self, name: str) -> None:
        self.start(name, "unshare", *(f"--{space}" for space in NAMESPACES), "--fork", "--kill-child", "--mount-proc",
                   "sh", "-c", FIRST_PROCESS, "sh", name, self.folder)

    def kill_node(self, name: str) -> None:
        """Kill every process of the node."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def nodes(self, state: str) -> set[str]:
        """Return the nodes that are in this state."""
        return set(self.run("sinfo", "--noheader", "--Node", f"--states={state}", "--format=%N").split())

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, PATIENCE)

    def run(self, *command, **settings) -> str:
        """Run a command of Slurm to its end, and return its output."""
        done = subprocess.run(list(map(str, command)), env=self.variables, text=True, capture_output=True,
                              timeout=PATIENCE, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()
