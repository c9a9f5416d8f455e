"""Files of torch.save, read without PyTorch: any view of any storage, and nothing else."""
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.compare.their_runs import compared
from mpi_impl.compare.their_runs.dims import parse
from mpi_impl.runtime.torch_files import STORAGES, opened_saved
from reference.errors import UserError
from tests.mpi_impl.test_their_runs import divided
from tests.torch_saves import Attributed, save


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


def test_other_archives_are_refused(tmp_path):
    (tmp_path / "text").write_text("x" * 100)
    with zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
    for name, said in (("text", "no zip archive"), ("packed", "or is compressed"), ("nowhere", "nowhere")):
        with pytest.raises(UserError, match=said), opened_saved(str(tmp_path / name)):
            pass


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
