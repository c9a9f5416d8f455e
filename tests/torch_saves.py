"""Files as torch.save and torch.distributed.checkpoint write them, of NumPy arrays in the tensors' places: for tests,
without PyTorch.
"""
import copyreg
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PosixPath
from types import SimpleNamespace
from unittest import mock

import numpy as np

from mpi_impl.runtime.torch_files import STORAGES


class Storage:
    """What an array's elements are a view of."""

    def __init__(self, array):
        self.array = array


class Attributed:
    """A parameter with attributes, as Megatron-LM's are."""

    def __init__(self, array, **attributes):
        self.array, self.attributes = array, attributes


class Raw:
    """A call of one of torch's functions with these arguments, of which arrays stand for their storages."""

    def __init__(self, name, *arguments):
        self.call = name, arguments


def named(module, name):
    """Return a function that pickles as this name."""
    def stands_for_another():
        raise AssertionError("nothing of a file is called")

    stands_for_another.__module__, stands_for_another.__qualname__ = module, name
    return stands_for_another


NAMES = {(module, name): named(module, name) for module, names in {
    "torch._utils": ["_rebuild_tensor_v2", "_rebuild_parameter_with_state"],
    "torch": [f"{name}Storage" for name in STORAGES]}.items() for name in names}


class Size(tuple):
    __module__ = "torch"

    def __reduce__(self):
        return Size, (tuple(self),)


class TensorProperties(SimpleNamespace):
    __module__ = "torch.distributed.checkpoint.metadata"

    def __reduce__(self):
        return copyreg.__newobj__, (TensorProperties,), self.state


class Dtype:
    """A dtype, which is pickled by its name."""

    __module__ = "torch"

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


DTYPES = {name: Dtype(name) for name in ("float64", "float32", "bfloat16", "int64")}
CHECKPOINT = {name: type(name, (), {"__module__": f"torch.distributed.checkpoint.{module}"}) for module, names in {
    "metadata": ["Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata",
                 "StorageMeta"], "filesystem": ["_StorageInfo"]}.items() for name in names}
OBJECTS = {(one.__module__, one.__name__): one for one in (Size, TensorProperties, *CHECKPOINT.values())}
OBJECTS |= {("torch", name): dtype for name, dtype in DTYPES.items()}


def instance(name, **state):
    """Return what pickles as an object of torch's with these attributes."""
    found = CHECKPOINT[name]()
    vars(found).update(state)
    return found


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol=2):
        super().__init__(file, protocol)
        self.storages = []

    def persistent_id(self, x):
        if not isinstance(x, Storage):
            return None
        i = next((i for i, known in enumerate(self.storages) if known is x.array), len(self.storages))
        self.storages[i:i + 1] = [x.array]
        kind = next(name for name, dtype in STORAGES.items() if np.dtype(dtype) == x.array.dtype)
        return "storage", NAMES["torch", f"{kind}Storage"], str(i), "cuda:1", x.array.size

    def reducer_override(self, x):
        if isinstance(x, Attributed):
            return NAMES["torch._utils", "_rebuild_parameter_with_state"], (x.array, True, OrderedDict(), x.attributes)
        if isinstance(x, Raw):
            return NAMES["torch._utils", x.call[0]], tuple(Storage(one) if isinstance(one, np.ndarray) else one
                                                           for one in x.call[1])
        if not isinstance(x, np.ndarray):
            return NotImplemented
        base = x if x.base is None else x.base
        offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
        strides = tuple(step // x.itemsize for step in x.strides)
        rebuild = NAMES["torch._utils", "_rebuild_tensor_v2"]
        return rebuild, (Storage(base), offset, x.shape, strides, False, OrderedDict())


@contextmanager
def torch_for_pickles():
    """Let these names be found where the pickler looks for them."""
    modules: dict = {}
    for (module, name), function in {**NAMES, **OBJECTS}.items():
        words = module.split(".")
        for i in range(1, len(words) + 1):
            modules.setdefault(".".join(words[:i]), types.ModuleType(".".join(words[:i])))
        setattr(modules[module], name, function)
    for module in filter(lambda module: "." in module, modules):
        setattr(modules[module.rpartition(".")[0]], module.rpartition(".")[2], modules[module])
    with mock.patch.dict(sys.modules, modules):
        yield


def save(path, content, change=lambda members: None):
    """Write a file; `change` may damage its members before, bytes by name."""
    file = BytesIO()
    with torch_for_pickles():
        pickler = Pickler(file)
        pickler.dump(content)
    members = {"data.pkl": file.getvalue(), "byteorder": b"little", "version": b"3\n"}
    members |= {f"data/{i}": array.tobytes("A") for i, array in enumerate(pickler.storages)}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return str(path)


def save_distributed(folder, tensors, change=lambda metadata: None):
    """Write a folder as torch.distributed.checkpoint does, of arrays by name with their chunks: (rank, box).

    `change` may damage what the metadata says.
    """
    folder.mkdir()
    files, about, places = {}, {"step": instance("BytesStorageMetadata")}, {}
    places[instance("MetadataIndex", fqn="step", index=None)] = info = instance("_StorageInfo")
    vars(info).update(relative_path="__0_0.distcp", offset=0, length=0)
    for name, (whole, held) in tensors.items():
        chunks = []
        for i, (rank, box) in enumerate(held):
            file, start = BytesIO(), Size(along.start for along in box)
            save(file, np.array(whole[box]))
            content = files.setdefault(f"__{rank}_0.distcp", bytearray())
            places[instance("MetadataIndex", fqn=name, offset=start, index=i)] = instance(
                "_StorageInfo", relative_path=f"__{rank}_0.distcp", offset=len(content), length=len(file.getvalue()))
            content += file.getvalue()
            chunks.append(instance("ChunkStorageMetadata", offsets=start,
                                   sizes=Size(along.stop - along.start for along in box)))
        about[name] = instance("TensorStorageMetadata", size=Size(whole.shape), chunks=chunks, properties=(
            TensorProperties(state=(DTYPES[whole.dtype.name], None, False, None, False))))
    metadata = instance("Metadata", state_dict_metadata=about, planner_data={"step": ("step",)}, storage_data=places,
                        storage_meta=instance("StorageMeta", checkpoint_id=PosixPath("x")), version="1.0.0")
    change(metadata)
    with torch_for_pickles(), open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)
    for name, content in files.items():
        Path(folder, name).write_bytes(content)
    return str(folder)
