"""The limits of an answer's process: it may compute, and little else.

Three mechanisms enforce this. The system limits memory and files. Landlock and seccomp, on Linux
(`grading/kernel_limits.py`), allow only Python's own packages to be opened, and no process to be started. An audit hook
in the interpreter, on every system, refuses files, processes and sockets with a sentence. The hook alone would stop the
curious, but not somebody who knows the interpreter well; without Landlock there is no more than that.
"""
import contextlib
import os
import resource
import site
import sys
import types
from collections.abc import Callable
from typing import Any

from grading.kernel_limits import landlock, seccomp

MEMORY = 1 << 30                        # bytes, beyond what Python, NumPy and MPI have taken
FORBIDDEN = ("reference", "mpi_impl", "grading", "mpi4py")

# Audit events that begin with these are refused. Those with a path depend on the path.
REFUSED = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "socket.",
           "ctypes.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "os.putenv", "os.unsetenv", "gc.get_", "sys.settrace", "sys.setprofile",
           "sys.addaudithook", "mmap.", "pty.", "resource.", "signal.", "fcntl.", "tempfile.", "_thread.", "syslog.",
           "os.utime", "os.lockf", "os.setxattr", "os.getxattr", "os.listxattr", "os.removexattr", "os.chflags",
           "ftplib.", "http.", "urllib.", "smtplib.", "sqlite3.", "winreg.", "webbrowser.")
WITH_A_PATH = ("open", "os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.glob", "os.fwalk")


def close_inherited_files() -> None:
    """Close files inherited from the launcher, except for the connection PMI_FD."""
    keep = int(os.environ.get("PMI_FD", -1))
    for file in range(3, 256):
        if file != keep:
            with contextlib.suppress(OSError):
                os.close(file)


def lock_up() -> None:
    """Lock the process up, for good. Everything that it still needs must be loaded and open.

    It may start one more thread, with the same limits, before `lock_processes`.
    """
    sys.path[:] = [path for path in sys.path if path and is_inside(path, packages())]
    sys.meta_path.insert(0, Forbidden())
    for name in [name for name in sys.modules if name.split(".")[0] in FORBIDDEN]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")      # without this program's variables
    disconnect()
    os.chdir("/")
    os.environ.clear()
    limit_memory()
    landlock(packages())


def lock_processes() -> None:
    """Forbid processes and threads, and install the audit hook."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    seccomp()
    sys.addaudithook(audit_hook(packages()))


def packages() -> list[str]:
    """Return the folders of Python and of the packages installed into it."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    return sorted({os.path.realpath(folder) for folder in found})


def is_inside(path: str, folders: list[str]) -> bool:
    """Report whether a path is one of these folders, or in one."""
    path = os.path.realpath(path)
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


class Forbidden:
    """An import hook that refuses modules: an answer has to be written, not imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} may not be imported: an answer is checked without Shardlab's own packages, and "
                              "communicates only through `group`")
        return None


def audit_hook(folders: list[str]) -> Callable:
    """Return a hook that raises PermissionError for refused events, and for paths outside these folders.

    It looks up no name outside itself, not even a builtin, since an answer could have replaced it.
    """
    inside = (*(folder.rstrip("/") + "/" for folder in {*folders, sys.prefix, sys.base_prefix, *sys.path}),)
    exactly, text, number, error = type, str, int, PermissionError
    refused, with_a_path, sentence = REFUSED, WITH_A_PATH, "an answer may compute, but not use files"
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event, args):
        if event.startswith(refused):
            raise error(f"{sentence[:-6]} files, processes or the network ({event})")
        if event in with_a_path:
            path: Any = args[0] if args else None
            if exactly(path) is not text:
                raise error(f"{sentence} ({event})")
            writes = event == "open" and exactly(args[2]) is number and args[2] & writing
            if writes or "/../" in path + "/" or not (path + "/").startswith(inside):
                raise error(f"{sentence} ({event} {path})")

    return refuse


def disconnect() -> None:
    """Close stdin, stdout, stderr and the connection to MPI's launcher, which would start any program on request."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2, int(os.environ.get("PMI_FD", 0))):
        os.dup2(nowhere, file)
    os.close(nowhere)


def limit_memory() -> None:
    """Limit memory and the size of files, and make this the first process that Linux ends when memory is short."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))
