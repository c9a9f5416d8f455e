"""Compiled kernels in the cache: only what this user has compiled there is loaded, and only as it was compiled."""
import os
from pathlib import Path

import pytest

from mpi_impl.kernels.fused import core

WHOLE = b"the kernels of this machine"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that loads the kernels as a new process would, and returns their bytes; `load.compiled` lists
    the folders in which they were compiled.
    """
    def compile_kernels(_text, _form, own):
        load_again.compiled.append(own)
        made = Path(own, "kernels.so")
        made.write_bytes(WHOLE)
        made.chmod(0o700)
        return made

    def load_again():
        return core.library.__wrapped__("float32")

    load_again.compiled = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(core, "compile_kernels", compile_kernels)
    monkeypatch.setattr(core.ctypes, "CDLL", lambda path: os.path.isfile(path) and Path(path).read_bytes())
    return load_again


def test_kernels_are_compiled_once(load):
    assert load() == load() == WHOLE and len(load.compiled) == 1


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {"truncated": lambda path: os.truncate(path, 9),
           "another byte": lambda path: path.write_bytes(WHOLE.replace(b"k", b"K")), "missing": Path.unlink,
           "a pipe": replace_by_pipe, "others may write it": lambda path: path.chmod(0o777)}


@pytest.mark.parametrize("file", [".so", core.SEAL])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_compiled_again(load, damage, file, tmp_path):
    """The system would end the process by SIGBUS or SIGILL, or wait for who writes into the pipe."""
    load()
    (path,) = (tmp_path / "shardlab" / "kernels").glob(f"*{file}")
    DAMAGES[damage](path)
    assert load() == WHOLE
    assert len(load.compiled) == (1 if (damage, file) == ("others may write it", core.SEAL) else 2)
    assert load() == WHOLE and len(load.compiled) <= 2


@pytest.mark.parametrize("whose", ["another user's", "everybody's"])
def test_a_folder_of_others_is_not_trusted(load, whose, tmp_path, monkeypatch):
    """Whatever lies there, with whichever checksum: the kernels are compiled elsewhere, and nothing is left of them."""
    load()
    folder = tmp_path / "shardlab" / "kernels"
    (path,) = folder.glob("*.so")
    path.write_bytes(b"planted")
    path.with_suffix(core.SEAL).write_text(core.digest(path))
    if whose == "everybody's":
        folder.chmod(0o777)
    else:
        monkeypatch.setattr(core.os, "geteuid", lambda: os.getuid() + 1)
    assert load() == WHOLE and len(load.compiled) == 2
    assert not load.compiled[1].startswith(str(tmp_path)) and not os.path.exists(load.compiled[1])
