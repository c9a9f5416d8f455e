"""What an answer's process may do: compute, and little else.

Three things hold it. The system's own limits on memory, files and processes. Landlock, where Linux has it (5.13 and
newer): from then on the system opens no file but Python's own packages, for reading, whatever the process tries. And
an audit hook in the interpreter, everywhere: it refuses files, processes and sockets with a sentence. The hook alone
would stop the curious, but not someone who knows the interpreter well; on a system without Landlock, that is what
there is.
"""
import contextlib
import ctypes
import os
import resource
import site
import struct
import sys

MEMORY = 1 << 30                        # bytes, beyond what Python, NumPy and MPI have taken
FORBIDDEN = ("reference", "mpi_impl", "grading", "mpi4py")

# Audit events that begin so are refused; 'open' and what lists folders depend on the path.
REFUSED = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "socket.",
           "ctypes.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod",
           "os.chown", "os.truncate", "os.putenv", "os.unsetenv", "gc.get_", "sys.settrace", "sys.setprofile",
           "sys.addaudithook", "mmap.", "pty.", "resource.", "signal.", "fcntl.", "tempfile.",
           "ftplib.", "http.", "urllib.", "smtplib.", "sqlite3.", "winreg.", "webbrowser.")
WITH_A_PATH = ("open", "os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.glob", "os.fwalk")

# System calls of Landlock, alike on all of Linux's architectures, and its rights: files 0 to 12, refer, truncate, ioctl.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PR_SET_NO_NEW_PRIVS, VERSION, PATH_BENEATH = 38, 1, 1
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3


def lock_up() -> None:
    """From now on, and for good. Whatever the process itself still needs must be loaded and open."""
    sys.path[:] = [path for path in sys.path if path and is_inside(path, packages())]
    sys.meta_path.insert(0, Forbidden())
    for name in [name for name in sys.modules if name.split(".")[0] in FORBIDDEN]:
        del sys.modules[name]
    os.chdir("/")
    os.environ.clear()
    limit_resources()
    landlock(packages())
    folders = packages()
    sys.addaudithook(lambda event, args: refuse(event, args, folders))


def packages() -> list[str]:
    """The folders of Python and of what is installed into it."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()}
    return sorted({os.path.realpath(folder) for folder in found})


def is_inside(path: str, folders: list[str]) -> bool:
    path = os.path.realpath(path)
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


class Forbidden:
    """An import hook: an answer is to be written, not imported."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} may not be imported: an answer is checked without Shardlab's own packages, and "
                              "speaks to other ranks through `group` alone")
        return None


def refuse(event: str, args: tuple, folders: list[str]) -> None:
    """The audit hook. Raises PermissionError."""
    if event.startswith(REFUSED):
        raise PermissionError(f"an answer may compute, but not use files, processes or the network ({event})")
    if event in WITH_A_PATH:
        path = args[0] if args else "."
        writes = event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        if isinstance(path, int) or path is None or writes or not is_inside(os.fsdecode(path), folders):
            raise PermissionError(f"an answer may compute, but not use files ({event} {path})")


def limit_resources() -> None:
    """Memory, processes, and the size of files that it could write."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as statm:
            taken = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for what in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (0, 0))


def landlock(readable: list[str]) -> bool:
    """Let the system open nothing but these folders, for reading. -> whether it can."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION)
    except (OSError, AttributeError):
        return False
    if not sys.platform.startswith("linux") or version < 1:
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
