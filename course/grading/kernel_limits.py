"""The limit of an answer's process that Linux itself enforces, and that cannot be undone: seccomp.

It refuses every system call but a few. A list of forbidden calls would not do: ranks could tell one another numbers by
their priority, by a lock, or by the processor's time that they have used, which any process may ask for.
"""
import ctypes
import platform
import struct
import sys

PR_SET_NO_NEW_PRIVS = 38

# What seccomp allows, by number, on two architectures: to compute, to wait, to use memory, and files that are open.
ALLOWED = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
        "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "readv": 19, "writev": 20,
        "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "sendto": 44,
        "recvfrom": 45, "exit": 60, "gettimeofday": 96, "getrusage": 98, "times": 100, "sigaltstack": 131,
        "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229,
        "clock_nanosleep": 230, "exit_group": 231, "pselect6": 270, "ppoll": 271, "getrandom": 318},
    "aarch64": {
        "close": 57, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66, "pselect6": 72, "ppoll": 73,
        "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98, "nanosleep": 101, "clock_gettime": 113,
        "clock_getres": 114, "clock_nanosleep": 115, "sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132,
        "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "getrusage": 165,
        "gettimeofday": 169, "getpid": 172, "gettid": 178, "sendto": 206, "recvfrom": 207, "brk": 214, "munmap": 215,
        "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "getrandom": 278},
}
OF_CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep")     # their first argument is a clock
FOREIGN_CLOCKS = 16                             # from here on, clocks are other processes'
# The argument of this number, and its allowed values. All processes that have mapped the same library would see a futex
# that is not private, and a page of a file that is thrown out.
ONE_OF = {
    "futex": (1, (128, 129, 137, 393)),         # wait, wake, wait with a deadline of either clock; all private
    "madvise": (2, (4, 8, 14, 15)),             # give memory back, and huge pages
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SECCOMP = {"x86_64": 317, "aarch64": 277}       # the system call itself
SET_FILTER, ALL_THREADS = 1, 1
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06      # instructions of a filter
NUMBER, ARCHITECTURE_OF_CALL, FIRST_ARGUMENT, BETWEEN = 0, 4, 16, 8     # what they can load
ALLOW, PERMISSION_DENIED, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def seccomp() -> bool:
    """Refuse all system calls but the allowed ones to this process. Return whether seccomp is available."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in ALLOWED:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    allow, refuse = (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, PERMISSION_DENIED)
    steps = [(LOAD, 0, 0, ARCHITECTURE_OF_CALL), (EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL),
             (LOAD, 0, 0, NUMBER)]
    for name, number in ALLOWED[machine].items():
        if name in OF_CLOCKS:
            then = [(LOAD, 0, 0, FIRST_ARGUMENT), (AT_LEAST, 1, 0, FOREIGN_CLOCKS), allow, refuse]
        elif name in ONE_OF:
            place, values = ONE_OF[name]
            then = [(LOAD, 0, 0, FIRST_ARGUMENT + BETWEEN * place),
                    *((EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)), refuse, allow]
        else:
            then = [allow]
        steps += [(EQUAL, 0, len(then), number), *then]
    steps.append(refuse)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.syscall(SECCOMP[machine], SET_FILTER, ALL_THREADS, header) == 0
