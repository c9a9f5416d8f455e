"""The limits of an answer's process: it may compute, and little else.

Three things hold it. The system's limits on memory and files. Landlock and seccomp, where Linux has them
(`grading/kernel_limits.py`): the system opens no file but Python's own packages, and starts no process, whatever is
tried. And an audit hook in the interpreter, everywhere: it refuses files, processes and sockets with a sentence. The
hook alone would stop the curious, but not someone who knows the interpreter well; where there is no Landlock, that is
what there is.
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

# Audit events that begin so are refused; 'open' and what lists folders depend on the path.
REFUSED = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "socket.",
           "ctypes.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "os.putenv", "os.unsetenv", "gc.get_", "sys.settrace", "sys.setprofile",
           "sys.addaudithook", "mmap.", "pty.", "resource.", "signal.", "fcntl.", "tempfile.", "_thread.", "syslog.",
           "os.utime", "os.lockf", "os.setxattr", "os.getxattr", "os.listxattr", "os.removexattr", "os.chflags",
           "ftplib.", "http.", "urllib.", "smtplib.", "sqlite3.", "winreg.", "webbrowser.")
WITH_A_PATH = ("open", "os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.glob", "os.fwalk")


def close_inherited_files() -> None:
    """Close files inherited from the launcher, first of all. We need the connection PMI_FD, and no other."""
    keep = int(os.environ.get("PMI_FD", -1))
    for file in range(3, 256):
        if file != keep:
            with contextlib.suppress(OSError):
                os.close(file)


def lock_up() -> None:
    """Lock the process up, for good. Whatever it still needs must be loaded and open.

    One more thread may be started, which is held as this one is; then comes `lock_processes`.
    """
    sys.path[:] = [path for path in sys.path if path and is_inside(path, packages())]
    sys.meta_path.insert(0, Forbidden())
    for name in [name for name in sys.modules if name.split(".")[0] in FORBIDDEN]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")      # and not this program's names
    cut_lines()
    os.chdir("/")
    os.environ.clear()
    limit_memory()
    landlock(packages())


def lock_processes() -> None:
    """Lock the rest: no processes, no threads, and the audit hook."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    seccomp()
    sys.addaudithook(audit_hook(packages()))


def packages() -> list[str]:
    """Return the folders of Python and of the packages installed into it."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    return sorted({os.path.realpath(folder) for folder in found})


def is_inside(path: str, folders: list[str]) -> bool:
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
    """Return a hook that raises PermissionError.

    It looks up no name outside itself, not even a builtin: an answer could have given it another meaning.
    """
    inside = (*(folder.rstrip("/") + "/" for folder in {*folders, sys.prefix, sys.base_prefix, *sys.path}),)
    exactly, text, number, error = type, str, int, PermissionError
    refused, with_a_path, words = REFUSED, WITH_A_PATH, "an answer may compute, but not use files"
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def refuse(event, args):
        if event.startswith(refused):
            raise error(f"{words[:-6]} files, processes or the network ({event})")
        if event in with_a_path:
            path: Any = args[0] if args else None
            if exactly(path) is not text:
                raise error(f"{words} ({event})")
            writes = event == "open" and exactly(args[2]) is number and args[2] & writing
            if writes or "/../" in path + "/" or not (path + "/").startswith(inside):
                raise error(f"{words} ({event} {path})")

    return refuse


def cut_lines() -> None:
    """Redirect stdin, stdout, stderr and the connection to MPI's launcher, which would start any program, to nowhere.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2, int(os.environ.get("PMI_FD", 0))):
        os.dup2(nowhere, file)
    os.close(nowhere)


def limit_memory() -> None:
    """Limit memory and the size of files. If memory is short, Linux ends this process first."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))
