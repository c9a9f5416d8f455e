"""Files of torch.save, read without PyTorch: any view of any storage, and nothing else."""
import json
import os
import pickle
import subprocess
import sys
import zipfile
from argparse import Namespace
from types import ModuleType, SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from safetensors.numpy import save_file

from mpi_impl.runtime.torch_files import STORAGES, opened_saved
from reference.errors import UserError
from shardlab.compare.their_runs import compared
from shardlab.compare.their_runs.dims import parse
from shardlab.compare.their_runs.sglang import INFO
from tests.mpi_impl.test_their_runs import divided
from tests.torch_saves import Attributed, Raw, save


@st.composite
def views(draw):
    """Draw an array that is some view of another one."""
    dtype = draw(st.sampled_from(sorted(STORAGES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    base = np.arange(np.prod(shape, dtype=int)).astype(STORAGES[dtype]).reshape(shape)
    base = np.array(base)       # its own memory
    x = base.transpose(draw(st.permutations(range(base.ndim))))
    cut = tuple(slice(draw(st.integers(0, n)), None, draw(st.integers(1, 3))) for n in x.shape)
    return draw(st.sampled_from([base, x[cut], x[cut][..., None]]))


@given(st.lists(views(), min_size=1, max_size=4))
def test_every_view_of_every_storage_is_read(tmp_path_factory, arrays):
    content = {"list": arrays, "again": arrays[0], "words": ("a", 1, None)}
    path = save(tmp_path_factory.mktemp("saves") / "x.pt", content)
    with opened_saved(path) as file:
        found = [file.load(one) for one in [*file.content["list"], file.content["again"]]]
        assert file.content["words"] == ("a", 1, None)
    for one, expected in zip(found, [*arrays, arrays[0]], strict=True):
        assert one.dtype == expected.dtype and one.shape == expected.shape
        assert (one.view(np.uint8) == np.ascontiguousarray(expected).view(np.uint8)).all() if one.size else True


def test_a_parameter_keeps_what_megatron_says_of_it(tmp_path):
    path = save(tmp_path / "x.pt", {"w": Attributed(np.ones((2, 3), ml_dtypes.bfloat16), partition_dim=1)})
    with opened_saved(path) as file:
        assert file.content["w"].attributes == {"partition_dim": 1} and file.load(file.content["w"]).sum() == 6


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def replaced(**members):
    return lambda found: found.update(members)


def strided(rows):
    """Return the change of a tensor's first stride, 6, to what this pickles."""
    def change(found):
        assert found["data.pkl"].count(b"K\x06K\x01\x86") == 1
        found["data.pkl"] = found["data.pkl"].replace(b"K\x06K\x01\x86", rows + b"K\x01\x86")
    return change


@pytest.mark.parametrize("change, said", [
    (replaced(**{"data.pkl": pickle.dumps(Harmful(), 2)}), "names posix.system"),
    (replaced(**{"data.pkl": pickle.dumps({"a": eval}, 2)}), "names __builtin__.eval"),
    (replaced(**{"data.pkl": b"\x80\x02}q\x00("}), "has a pickle that is damaged"),
    (replaced(**{"data/0": b"123"}), "lacks the storage 0 of 48 bytes, or has another size"),
    (lambda found: found.pop("data/0"), "lacks the storage 0 of 48 bytes"),
    (replaced(byteorder=b"big"), "other byte order"),
    (lambda found: found.pop("data.pkl"), "but not one of torch.save"),
    (strided(b"K\x07"), "reaches beyond its storage"), (strided(b"J\xff\xff\xff\xff"), "has a pickle that is damaged")])
def test_what_is_no_such_file_is_refused_and_nothing_of_it_executed(tmp_path, monkeypatch, change, said):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "x.pt", {"x": np.arange(12, dtype=np.float32).reshape(2, 6)}, change)
    with pytest.raises(UserError, match=said), opened_saved(path) as file:
        file.load(file.content["x"])
    assert not os.path.exists("harmed")


class Options:
    pass


Options.__module__ = "megatron.training"


def test_weights_are_read_beside_objects_of_other_programs(tmp_path):
    """Megatron's torch.save has argparse.Namespace and states of random numbers, DeepSpeed's numbers of NumPy."""
    modules = {"megatron": ModuleType("megatron"), "megatron.training": SimpleNamespace(Options=Options)}
    with mock.patch.dict(sys.modules, modules):
        path = save(tmp_path / "x.pt", {"args": Namespace(a=Options()), "lr": np.float64(1), "model": {"w": np.eye(2)}})
    assert compared(path, path)[0].startswith("A and B agree: 1 tensors")


def test_other_archives_are_refused(tmp_path):
    (tmp_path / "text").write_text("x" * 100)
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
    for name, said in (("text", "no zip archive"), ("packed", "or is compressed"), ("nowhere", "nowhere")):
        with pytest.raises(UserError, match=said), opened_saved(str(tmp_path / name)):
            pass


# ---- files that were made to do harm ---------------------------------------------------------------------------------

COMPARED = """
import psutil, resource, sys
from shardlab.compare.their_runs import compared
from reference.errors import UserError
size = psutil.Process().memory_info().vms + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
for path in sys.argv[1:]:
    try:
        compared(path, path)
    except UserError as error:
        assert "Exception" not in str(error) and len(str(error).encode()) < 1000, error
"""
FILES = ["../x.safetensors", "/etc/passwd", "..", "a\0b", "x.pt", "link.safetensors", "there.safetensors"]
TAGS = ["rank=0", "rank=x", "dump_index=0", "dump_index=x", "step=0", "curr_step=1", "name=y", "_name=y", "layer_id=x"]
SIZES = st.sampled_from([-1, 0, 1, 2, 1000, 1 << 20, 1 << 40, 1 << 62, 1 << 70, None, "x"])


def hostile(folder, draw):
    """Write a tensor with drawn sizes, a dump of SGLang's with drawn tags, or a recording with drawn numbers."""
    kind, sizes = draw(st.integers(0, 2)), draw(st.lists(SIZES, min_size=4, max_size=4))
    if kind == 0:
        shape = Raw("_rebuild_tensor_v2", np.ones(2, np.float32), 0, tuple(sizes[:2]), tuple(sizes[2:]))
        return save(folder.with_suffix(".pt"), draw(st.sampled_from([shape, {sizes[0]: {"a": shape}}])))
    folder.mkdir()
    if kind == 1:
        info = {"tp_rank": sizes[0], "tp_size": sizes[1], "cp_rank": 0, "cp_size": 1, sizes[2]: 1}
        meta = draw(st.sampled_from([{"dims": "i[tp,cp:zigzag]", INFO[0]: info}, {"dims": sizes}, sizes]))
        for tags in (["rank=0", "dump_index=0", "step=0", "name=y"], draw(st.lists(st.sampled_from(TAGS), max_size=6))):
            save(folder / f"{'___'.join(tags)}.pt", {"value": np.ones(4), "meta": meta})
        return str(folder)
    save_file({"0": np.ones(4)}, folder / "there.safetensors")
    (folder / "link.safetensors").symlink_to("/dev/zero")
    about = {"shardlab_recorder": 1, "rank": 0, "ranks": sizes[0], "axes": {"tp": sizes[1:3]}}
    line = {"step": 1, "phase": "forward", "name": "x", "call": 0, "key": "0", "dims": "i[tp:zigzag]",
            "file": draw(st.sampled_from(FILES))}
    (folder / "rank_00000.jsonl").write_text(f"{json.dumps(about)}\n{json.dumps(line)}\n")
    return str(folder)


@settings(max_examples=8, phases=[Phase.generate])
@given(st.data())
def test_a_hostile_file_is_compared_or_refused_within_bounded_memory(tmp_path_factory, data):
    """Whatever sizes, numbers of ranks and names of files it has, what is said is a sentence."""
    tmp = tmp_path_factory.mktemp("hostile")
    paths = [hostile(tmp / str(i), data.draw) for i in range(40)]
    subprocess.run([sys.executable, "-c", COMPARED, *paths], check=True)


# ---- SGLang's dumps -------------------------------------------------------------------------------------------------

LAYER = "layers.{layer}.mlp_output"


def dump(folder, c, t, values=None, dims="b s[cp:zigzag] h[tp]"):
    """Write the forward and the backward of two layers as SGLang's dumper does, on c x t ranks, and another replica."""
    folder.mkdir()
    for dp in range(2):
        for rank in range(c * t):
            place = {"cp": rank // t, "tp": rank % t}
            info = {f"{axis}_rank": n for axis, n in place.items()} | {"cp_size": c, "tp_size": t, "dp_rank": dp,
                                                                       "dp_size": 2, "tp_src_rank": 0}
            for i, (name, layer) in enumerate([("mlp_output", 0), ("mlp_output", 1), ("grad__mlp_output", 1),
                                               ("grad__mlp_output", 0)]):
                whole = np.random.default_rng([i, dp]).normal(size=(2, 4 * c * t, 3 * t))
                if c * t == 1:
                    whole = np.random.default_rng([i, dp]).normal(size=(2, 16, 6))
                part = np.ascontiguousarray(divided(whole, parse(dims), place, {"cp": c, "tp": t}, 0))
                part = part if values is None else values(rank, name, layer, part)
                tags = (f"step=0___rank={dp * c * t + rank}___dump_index={i}___name={name}___"
                        f"recompute_status=disabled___layer_id={layer}")
                save(folder / f"{tags}.pt", {"value": part, "meta": {"dims": dims, "megatron_parallel_info": info}})
    return str(folder)


def test_dumps_of_sglang_are_compared_across_layouts(tmp_path):
    """Of the first replica: the others have other samples."""
    text, differ = compared(dump(tmp_path / "a", 1, 1), dump(tmp_path / "b", 2, 2))
    assert not differ and text.startswith("A and B agree: 4 tensors of step 0 were compared, in float64"), text


@pytest.mark.parametrize("name, layer, said", [
    ("mlp_output", 1, "step 0, forward: layers.1.mlp_output"), ("grad__mlp_output", 0,
                                                                "step 0, backward: gradient of layers.0.mlp_output")])
def test_the_first_wrong_tensor_of_a_dump_is_named(tmp_path, name, layer, said):
    def values(rank, this, its_layer, part):
        return part + (rank == 3 and (this, its_layer) == (name, layer))

    text, differ = compared(dump(tmp_path / "a", 1, 1), dump(tmp_path / "b", 2, 2, values))
    assert differ and said in text and "rank 3 of B, layer" in text, text
