"""Limits of an answer's process that Linux itself enforces: Landlock and seccomp. Neither can be undone.

Landlock (5.13 and newer) allows the process to open only files in some folders, and only for reading. Seccomp forbids
new processes, threads and sockets, and signals.
"""
import contextlib
import ctypes
import os
import platform
import struct
import sys
from collections.abc import Collection

# System calls of Landlock, the same on all architectures, and its rights: files 0 to 12, refer, truncate, ioctl.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PR_SET_NO_NEW_PRIVS, VERSION, PATH_BENEATH = 38, 1, 1
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3

# What seccomp refuses, by number, on two architectures.
REFUSED = {
    "x86_64": {
        "clone": 56, "fork": 57, "vfork": 58, "clone3": 435, "execve": 59, "execveat": 322, "unshare": 272,
        "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "setrlimit": 160, "prlimit64": 302,
        "socket": 41, "socketpair": 53, "connect": 42, "bind": 49, "setns": 308, "open_by_handle_at": 304,
        "bpf": 321, "io_uring_setup": 425},
    "aarch64": {
        "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "unshare": 97,
        "kill": 129, "tkill": 130, "tgkill": 131, "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "setrlimit": 164, "prlimit64": 261,
        "socket": 198, "socketpair": 199, "connect": 203, "bind": 200, "setns": 268, "open_by_handle_at": 265,
        "bpf": 280, "io_uring_setup": 425},
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP = {"x86_64": 317, "aarch64": 277}       # the system call itself
SET_FILTER, ALL_THREADS = 1, 1
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06     # instructions of a filter
ALLOW, PERMISSION_DENIED, KILL = 0x7FFF0000, 0x00050001, 0x80000000
X32 = 0x40000000                                # numbers from here on are the same calls in another convention


def system() -> ctypes.CDLL | None:
    """Return the C library, or None if this is not Linux."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
    return None


def landlock_version() -> int:
    """Return this kernel's version of Landlock; 0 if it has none."""
    libc = system()
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)) if libc else 0


def landlock(readable: Collection[str]) -> bool:
    """Allow this thread, and threads that it starts later, to open only these folders, for reading.

    Return whether Landlock is available.
    """
    libc, version = system(), landlock_version()
    if libc is None or version < 1:
        return False
    rights = (1 << RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("Q", rights)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    for folder in readable:
        with contextlib.suppress(OSError):
            below = os.open(folder, os.O_PATH)
            rule = struct.pack("=Qi", EXECUTE | READ_FILE | READ_DIR, below)
            libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
            os.close(below)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return done


def seccomp() -> bool:
    """Forbid the refused system calls to all threads of this process. Return whether seccomp is available."""
    libc, machine = system(), platform.machine()
    if libc is None or machine not in REFUSED:
        return False
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for test, number in [(AT_LEAST, X32), *((EQUAL, number) for number in REFUSED[machine].values())]:
        steps += [(test, 0, 1, number), (RETURN, 0, 0, PERMISSION_DENIED)]
    steps += [(RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.syscall(SECCOMP[machine], SET_FILTER, ALL_THREADS, header) == 0
