"""A cluster of Slurm in one machine: a controller, munge, and nodes that each have a name, processes and shared memory
of their own, for all that Slurm starts there. Files and the network are the machine's.

A node is a set of Linux namespaces, held by its slurmd. It ends with that process, and so does all that runs on it.
"""
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.launching import environment
from tests.two_hosts import end_with_parent, refusal, search_path, wait_for

NODES = ("node1", "node2")
PATIENCE = 300      # seconds for what takes a few, on a busy machine
NAMESPACES = ("--uts", "--ipc", "--pid", "--mount")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")

# The first process of a node, in its namespaces: $1 is its name, $2 the folder with the cluster's files.
FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts" /etc/hosts
exec slurmd -D -N "$1"
"""

# A job that is queued again waits for cred_expire seconds (by default 120). Each node has four cores, as far as Slurm
# knows. They have one address, and a port each.
CONFIGURATION = """
ClusterName=shardlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
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
SlurmdTimeout=60
KillWait=10
ReturnToService=2
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=node2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={patience}
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def why_not() -> str:
    """Return the reason why there can be no such cluster here; "" if there can be."""
    for program in PROGRAMS:
        if shutil.which(program, path=search_path()) is None:
            return f"{program} is not installed (on Debian: apt install slurm-wlm)"
    return refusal()


def free_ports(n: int) -> list[int]:
    """Return n ports of this machine that nobody has."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


class Cluster:
    """Munge, a controller and two nodes. Commands are given outside the nodes, as on a login host."""

    def __init__(self, folder: Path):
        """Start the cluster, and return when Slurm says that all nodes are idle; end it if that fails."""
        self.folder = folder
        self.variables = environment({"SLURM_CONF": f"{folder}/slurm.conf", "PATH": search_path()})
        self.daemons: dict[str, subprocess.Popen] = {}
        self.write_files()
        try:
            self.start("munge", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
                       *(f"--{file}-file={folder}/munge.{file}" for file in ("key", "log", "pid", "seed")))
            self.wait_for((folder / "munge.socket").exists, "munge's socket")
            self.start("controller", "slurmctld", "-D")
            for name in NODES:
                self.start(name, "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c",
                           FIRST_PROCESS, "sh", name, folder)
            self.wait_for(self.is_idle, "idle nodes")
        except BaseException:
            self.end()
            raise

    def write_files(self) -> None:
        self.folder.mkdir()
        for name in ("state", *(f"spool.{name}" for name in NODES)):
            (self.folder / name).mkdir()
        files = {"slurm.conf": CONFIGURATION.format(folder=self.folder, host=socket.gethostname(), patience=PATIENCE,
                                                    ports=free_ports(1 + len(NODES))),
                 "mpi.conf": "PMIxCliTmpDirBase=/dev/shm\n",        # /tmp is the machine's
                 "hosts": f"127.0.0.1 localhost {' '.join(NODES)}\n", "munge.key": secrets.token_hex(64)}
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "munge.key").chmod(0o600)

    def start(self, name: str, *command) -> None:
        """Start a process that lasts as long as the cluster."""
        with (self.folder / f"{name}.log").open("w") as log:
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=self.variables,
                                                  preexec_fn=end_with_parent)

    def kill(self, name: str) -> None:
        """Kill a daemon; if it holds a node, with every process of the node."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def is_idle(self) -> bool:
        return self.run("sinfo", "--noheader", "--partition=main", "--format=%D %T").stdout == "2 idle\n"

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, what, PATIENCE)

    def run(self, *command, folder: Path | None = None) -> subprocess.CompletedProcess:
        """Run a command of Slurm to its end."""
        return subprocess.run(list(map(str, command)), env=self.variables, text=True, capture_output=True,
                              timeout=PATIENCE, cwd=folder)

    def end(self) -> None:
        for name in reversed(self.daemons):
            self.kill(name)
