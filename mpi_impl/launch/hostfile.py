"""The hosts of a job: the file that lists them, and whether ranks can be started there.

    # A line for each host, with the number of ranks that it takes, in either of the usual formats.
    node1 slots=4
    node2:4

Ranks fill the hosts in this order, so that neighbours, which share a layer, are on one host.
"""
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mpi_impl.runtime.files import read_text
from mpi_impl.runtime.mpis import KNOWN, implementation
from reference.errors import UserError

LINE = re.compile(r"(?P<name>[\w.][\w.-]*)(?:\s*:\s*(?P<colon>\S+)|\s+slots\s*=\s*(?P<slots>\S+))?")
LARGEST = 1 << 24           # bytes of a file of hosts
SECONDS_TO_ANSWER = 10      # for a host, before it counts as one that cannot be reached
ASKED_TOGETHER = 128        # hosts: each takes a process of ssh and an open file here

# For ssh: ask no question, since nobody would answer; and end within 20 seconds when the connection breaks.
SSH_OPTIONS = ("-o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
               f"-o ConnectTimeout={SECONDS_TO_ANSWER}")

# Variables of the user or the batch system by which hosts are reached by other means than ssh, or another ssh.
OTHER_MEANS = *(name for mpi in KNOWN for name in mpi.ssh_agents), "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"


class Host(NamedTuple):
    """A host, and the number of ranks that it takes."""

    name: str
    slots: int


def read_hosts(path: str) -> list[Host]:
    """Read the hosts of a file, in its order. Raises UserError for a missing file or a wrong line."""
    try:
        text = read_text(path, LARGEST)
    except UserError as error:
        raise UserError(f"--hostfile {error} Name a file with a host a line, as in `node1 slots=4`.") from error
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    hosts = [parse_line(line, f"--hostfile {path}, line {number}") for number, line in enumerate(lines, 1) if line]
    if not hosts:
        raise UserError(f"--hostfile {path} lists no hosts. Write one per line, as in `node1 slots=4`.")
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        raise UserError(f"--hostfile {path} names the host {name} {times} times. Give it one line, with all of its "
                        "slots.")
    return hosts


def parse_line(line: str, where: str) -> Host:
    """Parse 'node1 slots=4' or 'node1:4'."""
    found = LINE.fullmatch(line)
    if not found:
        raise UserError(f"{where} is {line!r}, but a line has only a host and its slots, as in `node1 slots=4` "
                        "or `node1:4`.")
    slots = found["colon"] or found["slots"]
    if slots is None:
        raise UserError(f"{where} does not say how many ranks {line} takes. Write, say, `{line} slots=4`.")
    if not re.fullmatch("[0-9]{1,6}", slots) or int(slots) < 1:
        raise UserError(f"{where} gives {found['name']} {slots} slots, but a host takes a whole number of ranks, 1 or "
                        "more.")
    return Host(found["name"], int(slots))


def fill_hosts(hosts: Sequence[Host], ranks: int, path: str | None) -> list[Host]:
    """Fill one host after the other with ranks, and return the hosts that are needed, each with its ranks.

    Without hosts it returns none: the job is on this machine. Raises UserError if there are more ranks than slots.
    """
    if hosts and ranks > (slots := sum(host.slots for host in hosts)):
        raise UserError(f"-n is {ranks}, but the hosts of --hostfile {path} have {slots} slots in all. Start fewer "
                        "ranks, or give the hosts more slots.")
    found = []
    for host in hosts:
        if taken := min(host.slots, ranks):
            found.append(Host(host.name, taken))
            ranks -= taken
    return found


def format_for(vendor: str, hosts: Sequence[Host]) -> str:
    """Return the file's text as the launcher of this MPI library reads it."""
    between = implementation(vendor).slots
    return "".join(f"{name}{between}{slots}\n" for name, slots in hosts)


def check_reachable(hosts: Sequence[Host]) -> None:
    """Raise UserError for a host on which ranks cannot be started."""
    for problem in unreachable(hosts).values():
        raise UserError(problem)


def unreachable(hosts: Sequence[Host]) -> dict[str, str]:
    """Map each host that ssh does not reach, or on which this Python, or this folder, is missing, to a sentence.

    It asks many hosts at the same time. Launchers would report such a host in words of their own, or wait. It does not
    check this machine, nor hosts that are reached by other means than ssh. Raises UserError if there is no ssh.
    """
    if any(name in os.environ for name in OTHER_MEANS):
        return {}
    if not (others := [host.name for host in hosts if not is_here(host.name)]):
        return {}
    if shutil.which("ssh") is None:
        raise UserError(f"--hostfile names {others[0]}, which is reached by ssh, but ssh is not installed, or not on "
                        "PATH. Install it (on Debian and Ubuntu: apt install openssh-client).")
    test = f"cd {shlex.quote(os.getcwd())} && test -x {shlex.quote(sys.executable)}"
    problems = dict[str, str]()
    for start in range(0, len(others), ASKED_TOGETHER):
        problems |= ask(others[start:start + ASKED_TOGETHER], test)
    return problems


def ask(hosts: Sequence[str], test: str) -> dict[str, str]:
    """Map each of these hosts that ssh does not reach, or on which a test fails, to a sentence."""
    asked = {name: subprocess.Popen(["ssh", *SSH_OPTIONS.split(), name, test], stdin=subprocess.DEVNULL,
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for name in hosts}
    try:
        answers = {name: problem_of(name, ssh) for name, ssh in asked.items()}
    finally:
        for ssh in asked.values():
            ssh.kill()
    return {name: problem for name, problem in answers.items() if problem}


def problem_of(name: str, ssh: subprocess.Popen) -> str:
    """Return a sentence unless ssh has reached this host and found Python and the folder there; "" if it has."""
    try:
        _, words = ssh.communicate(timeout=2 * SECONDS_TO_ANSWER)
        status = ssh.returncode
    except subprocess.TimeoutExpired:
        words, status = f"it has not answered within {2 * SECONDS_TO_ANSWER} seconds", 255
    reason = (words.strip() or f"its status is {status}").splitlines()[-1].removeprefix("ssh: ").rstrip(".")
    if status == 255:       # ssh's own
        return (f"The host {name} of --hostfile cannot be reached: {reason}. `ssh {name} true` must work from here "
                "without a question: check the name, and that the host knows your key.")
    if status:
        return (f"The host {name} of --hostfile has no {sys.executable}, or no folder {os.getcwd()}, from which ranks "
                "are started. All hosts need the same files under the same names, as on a shared file system.")
    return ""


def is_here(name: str) -> bool:
    """Report whether this is a name of this machine: whether a socket can have its address."""
    try:
        with socket.socket() as one:
            one.bind((name, 0))
    except OSError:     # unknown names, too
        return False
    return True
