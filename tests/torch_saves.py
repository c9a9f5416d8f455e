"""Files as torch.save writes them, of NumPy arrays in the tensors' places: for tests, without PyTorch."""
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import contextmanager
from io import BytesIO
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


def named(module, name):
    """Return a function that pickles as this name."""
    def stands_for_another():
        raise AssertionError("nothing of a file is called")

    stands_for_another.__module__, stands_for_another.__qualname__ = module, name
    return stands_for_another


NAMES = {(module, name): named(module, name) for module, names in {
    "torch._utils": ["_rebuild_tensor_v2", "_rebuild_parameter_with_state"],
    "torch": [f"{name}Storage" for name in STORAGES]}.items() for name in names}


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
    modules = {"torch": types.ModuleType("torch"), "torch._utils": types.ModuleType("torch._utils")}
    for (module, name), function in NAMES.items():
        setattr(modules[module], name, function)
    modules["torch"]._utils = modules["torch._utils"]
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
