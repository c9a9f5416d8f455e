"""The limits of an answer's process: it may compute, and write to its one connection.

Three mechanisms enforce this. The system limits memory and files. Seccomp, on Linux
(`course/grading/kernel_limits.py`), lets it make no system call but those that computing needs, and so open nothing. An
audit hook in the interpreter, on every system, refuses the same with a sentence. The hook alone would stop the curious,
but not somebody who knows the interpreter well; without seccomp there is no more than that.
"""
import contextlib
import resource
import sys
from collections.abc import Callable

from course.grading.kernel_limits import seccomp

MEMORY = 1 << 30                        # bytes, beyond what Python and NumPy have taken
OWN_PACKAGES = ("reference", "mpi_impl", "shardlab", "course", "mpi4py")

RAW_MEMORY = ("ctypes", "_ctypes", "mmap", "cffi", "_cffi_backend")      # modules that NumPy may have loaded

# Audit events that begin with these are refused.
REFUSED = ("open", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "gc.get_", "sys.settrace", "sys.setprofile",
           "sys.addaudithook", "mmap.", "pty.", "resource.", "signal.", "fcntl.", "tempfile.", "_thread.", "syslog.",
           "glob.", "pathlib.", "ftplib.", "http.", "urllib.", "smtplib.", "sqlite3.", "winreg.", "webbrowser.",
           "faulthandler.")


def forbid_imports() -> None:
    """Forbid the import of modules that are not loaded yet, of our own packages, and of those that reach all memory."""
    raw = [sys.modules[name] for name in RAW_MEMORY if name in sys.modules]
    for name in [name for name in sys.modules if name.split(".")[0] in (*OWN_PACKAGES, *RAW_MEMORY, "__main__")]:
        del sys.modules[name]
    for module in list(sys.modules.values()):
        for name in [name for name, value in vars(module).items() if any(value is one for one in raw)]:
            setattr(module, name, None)
    sys.path.clear()
    sys.meta_path[:] = [Forbidden()]


def lock_up() -> None:
    """Lock the process up, for good. Everything that it still needs must be loaded and open."""
    seccomp()
    sys.addaudithook(audit_hook())


class Forbidden:
    """An import hook that refuses all modules that are not loaded already."""

    def find_spec(self, name, path=None, target=None):
        own = name.split(".")[0] in OWN_PACKAGES
        raise ImportError(f"{name} may not be imported: " + (
            "an answer is checked without Shardlab's own packages, and communicates only through `group`" if own else
            "an answer has NumPy, and those of Python's own modules that compute"))


def audit_hook() -> Callable:
    """Return a hook that raises PermissionError for refused events.

    It looks up no name outside itself, not even a builtin, since an answer could have replaced it.
    """
    refused, error = REFUSED, PermissionError

    def refuse(event, args):
        if event.startswith(refused):
            raise error(f"an answer may compute, but not use files, processes or the network ({event})")

    return refuse


def limit_memory() -> None:
    """Limit memory and the size of files, and make this the first process that Linux ends when memory is short."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))
