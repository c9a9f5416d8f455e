"""Commands that a message advises, written so that they can be typed as they stand."""
import os
import shlex
import shutil
import sys
from pathlib import Path


def typed(name: str) -> str:
    """Return how to call a command of this environment in this folder: by its name if a shell finds it, else by a path.
    """
    command = Path(sys.executable).with_name(name)
    if not command.exists() or shutil.which(name) == str(command):
        return name
    path = os.path.relpath(command)
    return shlex.quote(str(command) if path.startswith(os.pardir) else path)
