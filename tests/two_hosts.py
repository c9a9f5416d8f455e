"""Two hosts in one machine, for ranks that shall not notice: each has a network, a name, processes, shared memory and
an ssh server of its own, and a link leads from one to the other. Files are the machine's, as on a shared file system.

A host is a set of Linux namespaces, held by its ssh server. It ends with that server, and so does all that runs in it.
"""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpi_impl.launch.guard import PR_SET_PDEATHSIG
from tests.launching import environment, in_foreground

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}     # by name
NAMESPACES = ("net", "uts", "ipc", "pid", "mount")
PATIENCE = 10       # seconds for what takes a few milliseconds, on a busy machine

# The first process of a host, in its namespaces: $1 is its name, $2 the folder with its files.
FIRST_PROCESS = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount -t sysfs sysfs /sys
mount --bind "$2/hosts" /etc/hosts
ip link set lo up
exec "$(command -v sshd)" -D -e -f "$2/sshd_config"
"""

# What that takes, to find out whether it is allowed here.
TRIAL = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
ip link add link0 type veth
"""

SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication yes
"""

SSH_CONFIG = """
Host * !stranger
    IdentityFile {folder}/key
Host *
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    LogLevel ERROR
Host stranger
    HostName beta
    HostKeyAlias beta
    IdentityFile {folder}/host_key
"""


def why_not() -> str:
    """Return the reason why there can be no such hosts here; "" if there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts in one machine are namespaces of Linux, which root alone may make"
    for program in ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "hostname"):
        if shutil.which(program, path=search_path()) is None:
            return f"{program} is not installed"
    return refusal()


def refusal() -> str:
    """Return the reason why namespaces cannot be made here; "" if they can be."""
    options = [f"--{name}" for name in NAMESPACES]
    made = subprocess.run(["unshare", *options, "--fork", "--mount-proc", "sh", "-c", TRIAL], capture_output=True,
                          text=True, env=os.environ | {"PATH": search_path()})
    return f"namespaces are refused: {made.stderr.strip()}" if made.returncode else ""


def search_path() -> str:
    """Return a PATH with the folders of ip and sshd, which not every PATH has."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def end_with_parent() -> None:
    """Have this process killed when its parent is gone, even by SIGKILL. (To less, unshare is deaf.)"""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Host:
    """One of them."""

    def __init__(self, name: str, folder: Path):
        """Start a host, and return when its first process is there, with all its namespaces."""
        self.name = name
        with (folder / f"{name}.log").open("w") as log:
            self.holder = subprocess.Popen(
                ["unshare", *(f"--{name}" for name in NAMESPACES), "--fork", "--kill-child", "--mount-proc",
                 "sh", "-c", FIRST_PROCESS, "sh", name, folder], stdout=log, stderr=log,
                env=os.environ | {"PATH": search_path()}, preexec_fn=end_with_parent)
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        wait_for(lambda: children.read_text().strip() != "", f"{name}'s first process")
        self.first = int(children.read_text())
        wait_for(lambda: os.readlink(f"/proc/{self.first}/exe").endswith("sshd"), f"{name}'s ssh server")

    def inside(self, *command) -> list[str]:
        """Return the command line that runs this one on the host."""
        return ["nsenter", f"--target={self.first}", *(f"--{name}" for name in NAMESPACES), *map(str, command)]

    def ip(self, *arguments) -> None:
        """Run `ip` on the host's network, from outside, where the number of a process means the same to both hosts."""
        subprocess.run(["nsenter", f"--target={self.first}", "--net", "ip", *map(str, arguments)], check=True,
                       env=os.environ | {"PATH": search_path()})

    def processes(self) -> dict[int, str]:
        """Return the command lines of the processes beside the ssh server, by pid."""
        found = {}
        here = os.readlink(f"/proc/{self.first}/ns/pid")
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):     # it is gone
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")      # empty once it has died
                if os.readlink(f"/proc/{pid}/ns/pid") == here and line and not line.startswith("sshd"):
                    found[pid] = line
        return found

    def end(self) -> None:
        self.holder.kill()
        self.holder.wait()


class TwoHosts:
    """alpha and beta. Commands are given on alpha."""

    def __init__(self, folder: Path):
        """Make both hosts and connect them; end both if that fails."""
        self.folder = folder
        self.write_files()
        self.hosts: list[Host] = []
        try:
            for name in ADDRESSES:
                self.hosts.append(Host(name, folder))
            self.connect()
        except BaseException:
            self.end()
            raise

    def write_files(self) -> None:
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        public = (self.folder / "host_key.pub").read_text()
        lines = {"hosts": ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())],
                 "known_hosts": [f"{name} {public}" for name in ADDRESSES],
                 "sshd_config": [SSHD_CONFIG.format(folder=self.folder)],
                 "ssh_config": [SSH_CONFIG.format(folder=self.folder)],
                 "ssh": ["#!/bin/sh", f'exec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"']}
        for name, text in lines.items():
            (self.folder / name).write_text("\n".join(text) + "\n")
        (self.folder / "ssh").chmod(0o755)

    def connect(self) -> None:
        alpha, beta = self.hosts
        alpha.ip("link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", beta.first)
        for host in self.hosts:
            host.ip("address", "add", f"{ADDRESSES[host.name]}/24", "dev", "link0")
            host.ip("link", "set", "link0", "up")

    def cut(self) -> None:
        """Cut the link: nothing arrives any more, and no one is notified."""
        self.hosts[1].ip("link", "set", "link0", "down")

    def mend(self) -> None:
        """Join the link again, and wait until beta answers: alpha remembers for seconds that there was no way to it."""
        self.hosts[1].ip("link", "set", "link0", "up")
        wait_for(lambda: self.start("ssh", "beta", "true").wait() == 0, "an answer of beta")

    def start(self, *command, env: dict[str, str] | None = None, folder: str = ".") -> subprocess.Popen:
        """Start this on alpha, in this folder, where `ssh` is one that knows the way."""
        variables = environment({"PATH": f"{self.folder}:{search_path()}"} | (env or {}))
        return subprocess.Popen(self.hosts[0].inside("env", "-C", folder, *command), env=variables, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=in_foreground)

    def end(self) -> None:
        for host in self.hosts:
            host.end()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} seconds"
        time.sleep(0.02)
