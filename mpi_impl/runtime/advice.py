"""Commands that a message advises, written so that they can be typed as they stand."""
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

from reference.errors import UserError


def typed(name: str) -> str:
    """Return how to call a command of this environment in this folder: by its name if a shell finds it, else by a path.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists() or shutil.which(name) == str(command):
        return name
    path = os.path.relpath(command)
    return shlex.quote(str(command) if path.startswith(os.pardir) else path)


def is_installed(module: str) -> bool:
    """Report whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_installed(package: str, what: str, otherwise: str = "") -> None:
    """Raise UserError unless a package that an option needs is installed."""
    if not is_installed(package):
        raise UserError(f"{what} needs the package {package}, which is not installed: `{typed('pip')} install "
                        f"{package}` installs it.{otherwise}")
