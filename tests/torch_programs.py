"""Programs of PyTorch on ranks, started as torchrun starts them."""
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardlab.compare.their_runs import RECORDER

SECONDS = 300       # after which ranks are taken for hanging


class TorchPrograms:
    """The programs tests/torch_*.py in a folder, next to the recorder as `shardlab recorder` prints it."""

    def __init__(self, folder: Path):
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.15.0")
        self.folder = folder
        for path in (RECORDER, *Path(__file__).parent.glob("torch_*.py")):
            shutil.copy(path, folder)

    def run(self, program: str, ranks: int, *arguments: str) -> str:
        """Run `PROGRAM.py OUTPUT ARGUMENTS` on ranks, once for all that ask. Return the folder OUTPUT."""
        output = self.folder / "-".join((program, str(ranks), *arguments)).replace(" ", "-")
        if not output.exists():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
            command = [sys.executable, f"{program}.py", str(output), *arguments]
            started = [subprocess.Popen(command, cwd=self.folder, env={**os.environ, **job, "RANK": str(rank)})
                       for rank in range(ranks)]
            try:
                assert [process.wait(SECONDS) for process in started] == [0] * ranks
            finally:
                for process in started:
                    process.kill()
        return str(output)
