"""Files of torch.save, read without PyTorch, and without executing anything in them.

Such a file is a zip archive of uncompressed members: a pickle of the saved object, and the bytes of each storage, of
which a tensor is a view. The pickle may name what rebuilds tensors, dtypes and a few containers (torch/_utils.py,
torch/_weights_only_unpickler.py); here these names stand for functions that only note what they are given. A pickle
that names anything else is not read.
"""
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpi_impl.runtime.files import opened_to_read
from mpi_impl.runtime.pickles import DAMAGED, LARGEST_PICKLE, Refused, RestrictedUnpickler
from reference.errors import UserError

# By the names of torch's storages, and of its dtypes. (complex32 and quantized types have no counterpart.)
STORAGES: dict[str, Any] = {
    "Double": np.float64, "Float": np.float32, "Half": np.float16, "BFloat16": ml_dtypes.bfloat16, "Long": np.int64,
    "Int": np.int32, "Short": np.int16, "Char": np.int8, "Byte": np.uint8, "Bool": np.bool_,
    "ComplexFloat": np.complex64, "ComplexDouble": np.complex128}
DTYPES: dict[str, Any] = {
    **{name: getattr(np, name) for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8",
                                            "uint64", "uint32", "uint16", "uint8", "complex64", "complex128")},
    "bool": np.bool_, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2}
MOST_REPEATED = 1 << 20     # elements of a tensor that has more of them than its storage


class Dtype(NamedTuple):
    """A stand-in for torch.float32, torch.FloatStorage and the like. A pickle cannot change a tuple."""

    of: Any


class Storage(NamedTuple):
    """A member of the archive with the elements of tensors."""

    key: str
    dtype: Any | None       # None: bytes, of which each tensor says what they are
    size: int               # elements, or bytes


@dataclass(frozen=True)
class SavedTensor:
    """A view of a storage, whose bytes have not been read; strides and offset count elements."""

    storage: Storage
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)        # of a parameter, such as Megatron's partition_dim

    def __setstate__(self, state: Any) -> None:
        raise Refused("a tensor's own state")


class SavedFile:
    """An open file of torch.save: `content` has SavedTensors in the tensors' places."""

    def __init__(self, path: str, archive: zipfile.ZipFile):
        self.path, self.archive = path, archive
        names = archive.namelist()
        self.root = next((name[:-len("data.pkl")] for name in names if name.endswith("/data.pkl")), None)
        if self.root is None or any(one.compress_type != zipfile.ZIP_STORED for one in archive.infolist()):
            raise UserError(f"{path} is a zip archive, but not one of torch.save: it lacks data.pkl, or is compressed.")
        byteorder = f"{self.root}byteorder"
        if byteorder in names and archive.read(byteorder) != b"little":
            raise UserError(f"{path} was written by a machine of the other byte order, which is not read here.")
        if archive.getinfo(f"{self.root}data.pkl").file_size > LARGEST_PICKLE:
            raise UserError(f"{path} has a pickle of more than {LARGEST_PICKLE:,} bytes, which no list of tensors "
                            "needs.")
        self.content = self.unpickled()

    def unpickled(self) -> Any:
        unpickler = TorchUnpickler(BytesIO(self.archive.read(f"{self.root}data.pkl")), ALLOWED)
        try:
            return unpickler.load()
        except Refused as error:
            raise UserError(f"{self.path} names {error}, which tensors do not need: it is not read, since a pickle can "
                            "run any program. Save a dict of tensors, detached and local, and nothing else.") from error
        except DAMAGED as error:
            raise UserError(f"{self.path} has a pickle that is damaged: {type(error).__name__}.") from error

    def check(self, tensor: SavedTensor) -> tuple[str, int]:
        """Return the name of a tensor's storage in the archive, and its elements. Raises UserError if it is not there,
        or too small.
        """
        storage, dtype = tensor.storage, np.dtype(tensor.dtype)
        member = f"{self.root}data/{storage.key}"
        expected = storage.size * (1 if storage.dtype is None else dtype.itemsize)
        if member not in self.archive.namelist() or self.archive.getinfo(member).file_size != expected:
            raise UserError(f"{self.path} lacks the storage {storage.key} of {expected:,} bytes, or has another size "
                            "of it: the file is damaged.")
        last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides))
        count = expected // dtype.itemsize
        if prod(tensor.shape) and last >= count:
            raise UserError(f"{self.path} has a tensor {list(tensor.shape)} that reaches beyond its storage.")
        if prod(tensor.shape) > max(count, MOST_REPEATED):
            raise UserError(f"{self.path} has a tensor {list(tensor.shape)} that repeats the {count:,} elements of its "
                            "storage. Save tensor.contiguous() instead.")
        return member, count

    def load(self, tensor: SavedTensor) -> np.ndarray:
        """Read a tensor's elements. Raises UserError as `check` does."""
        (member, count), dtype = self.check(tensor), np.dtype(tensor.dtype)
        elements = np.frombuffer(self.archive.read(member)[:count * dtype.itemsize], dtype)
        if not prod(tensor.shape):
            return np.empty(tensor.shape, dtype)
        return as_strided(elements[tensor.offset:], tensor.shape, [n * dtype.itemsize for n in tensor.strides]).copy()


@contextmanager
def opened_saved(path: str, span: tuple[int, int] | None = None) -> Iterator[SavedFile]:
    """Open a file of torch.save, or the one in a span of a file, its offset and length. Raises UserError for any other.
    """
    with opened_to_read(path) as file:
        content: BinaryIO = file
        if span is not None:
            file.seek(span[0])
            content = BytesIO(file.read(span[1]))
        if not zipfile.is_zipfile(content):
            raise UserError(f"{path} is no file of torch.save: it is no zip archive. (Before PyTorch 1.6 it was none "
                            "either: load it there, and save it again.)")
        try:
            with zipfile.ZipFile(content) as archive:
                yield SavedFile(path, archive)
        except UserError:
            raise
        except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, struct.error) as error:
            raise UserError(f"{path} is a damaged zip archive: {error}.") from error


# ---- what a pickle may name -----------------------------------------------------------------------------------------


class TorchUnpickler(RestrictedUnpickler):
    """An unpickler that notes storages and tensors."""

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(key, str) or "/" in key:
            raise Refused(f"the persistent object {kind!r}")
        return Storage(key, dtype.of, require_count(size))


def rebuild_tensor(storage: Storage, offset: Any, size: Any, stride: Any, *_: Any) -> SavedTensor:
    return saved(storage, storage.dtype, offset, size, stride)


def rebuild_tensor_with_dtype(storage: Storage, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any,
                              *_: Any) -> SavedTensor:
    return saved(storage, dtype.of, offset, size, stride)


def rebuild_parameter(data: SavedTensor, *_: Any) -> SavedTensor:
    return data


def rebuild_parameter_with_state(data: SavedTensor, grad: Any, hooks: Any, state: Any) -> SavedTensor:
    attributes = state if isinstance(state, dict) else {}
    return SavedTensor(data.storage, data.dtype, data.offset, data.shape, data.strides, attributes)


def saved(storage: Storage, dtype: Any, offset: Any, size: Sequence, stride: Sequence) -> SavedTensor:
    shape, strides = tuple(map(require_count, size)), tuple(map(require_count, stride))
    if dtype is None:
        raise Refused("a storage without a dtype")
    if len(shape) != len(strides) or not isinstance(storage, Storage):
        raise ValueError("a tensor is a view of a storage, and has as many strides as dimensions")
    np.broadcast_to(0.0, shape)     # raises ValueError for a shape that no array can have
    return SavedTensor(storage, dtype, require_count(offset), shape, strides)


def require_count(x: Any) -> int:
    if type(x) is not int or not 0 <= x < 1 << 53:
        raise ValueError(f"{x!r} counts nothing")
    return x


def latin(text: Any, encoding: Any) -> bytes:
    """Return what _codecs.encode does with the bytes of old protocols."""
    if encoding != "latin1":
        raise Refused(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


class Ignored:
    """An object that is no tensor, such as a run's options: nothing of it is kept, and nothing called."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class Names(dict[tuple[str, str], Any]):
    """What a file may name: tensors and containers, and of others' modules objects that are ignored."""

    def __contains__(self, key: Any) -> bool:
        root = key[0].partition(".")[0]
        return super().__contains__(key) or root in OPTIONS or root not in {*sys.stdlib_module_names, *REFUSED}

    def __missing__(self, key: tuple[str, str]) -> Any:
        return Ignored


OPTIONS = ("argparse", "enum", "pathlib", "datetime", "_io")
REFUSED = ("torch", "__builtin__")      # tensors of other kinds must not be lost silently

ALLOWED = Names({
    ("collections", "OrderedDict"): OrderedDict, ("_codecs", "encode"): latin,
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    ("torch", "Size"): tuple, ("torch", "device"): lambda *words: ":".join(map(str, words)),
    **{("torch", f"{name}Storage"): Dtype(dtype) for name, dtype in STORAGES.items()},
    **{(module, "UntypedStorage"): Dtype(None) for module in ("torch", "torch.storage")},
    **{("torch", name): Dtype(dtype) for name, dtype in DTYPES.items()},
    ("torch._utils", "_rebuild_tensor"): rebuild_tensor, ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): rebuild_tensor_with_dtype,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter_with_state,
    ("torch.nn.parameter", "Parameter"): rebuild_parameter})
