"""A manifest is believed only if it is whole: changed and sealed again, it is refused all the same."""
import json
import os
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file

from mpi_impl.checkpoints.manifest import box_of, check_tiling, text_of
from mpi_impl.checkpoints.on_disk import TRACKER, check_file, read_manifest, seal_of
from reference.errors import UserError
from tests.checkpoints.saved_runs import SMALL, load_says

NAME = "blocks.0.mlp.w_in"
FIRST = "parameters-00000.safetensors"


def seal_again(root: Path, change) -> None:
    """Change the manifest and give it the checksum that belongs to it now."""
    content = json.loads((root / "iter_0000001" / "manifest.json").read_text())
    change(content)
    write_sealed(root, json.dumps(content).encode())


def write_sealed(root: Path, text: bytes) -> None:
    (root / "iter_0000001" / "manifest.json").write_bytes(text)
    (root / "iter_0000001" / "manifest.json.sha256").write_bytes(seal_of(text))


def put(keys, value, content) -> None:
    """Set content[keys[0]][keys[1]]... to a value, or delete it if the value is None."""
    *path, last = keys
    for key in path:
        content = content[key]
    if value is None:
        del content[last]
    else:
        content[last] = value


def boxes(*texts):
    return dict(zip(texts, range(len(texts))))


@pytest.mark.parametrize("keys, value, words", [
    (["tensors"], {}, "a model of 2 layers has more than 0 tensors"),
    (["tensors", NAME], None, f"the tensor {NAME} is missing"),
    (["tensors", "another"], {"shape": [1], "ranks_of_boxes": {"0:1": 0}}, "not there in the model"),
    (["tensors", NAME, "shape"], [8, 16], r"is \(8, 16\), and \(8, 32\)"),
    (["files", FIRST], None, f"the file {FIRST}"),
    (["files", "../../secret.safetensors"], {"bytes": 1, "xxh128": 32 * "0"}, "the file ../../secret"),
    (["tensors", NAME, "ranks_of_boxes"], boxes("-8:0,0:32"), "is not a box"),
    (["tensors", NAME, "ranks_of_boxes"], boxes("0:8"), "another number of axes"),
    (["tensors", NAME, "ranks_of_boxes"], {"0:8,0:32": -1}, "expected `int` >= 0"),
    (["model", "num_layers"], 10**9, "a model of 1,000,000,000 layers|--num-layers is 1"),
    (["model", "num_leyers"], 2, "a model has no num_leyers"),
    (["loss_scale"], [0.0, 0, 2], "the loss scale is 0.0"),
    (["format"], 1, "invalid enum value 1"),
    (["files", FIRST, "xxh128"], "abc", "xxh128|regex"),
])
def test_a_manifest_that_was_changed_and_sealed_again_is_refused(copy, keys, value, words):
    """Nothing of it is believed: not which tensors there are, nor where they are, nor that a file needs no checksum."""
    seal_again(copy, partial(put, keys, value))
    with pytest.raises(UserError, match=words) as refused:
        read_manifest(str(copy))
    assert str(refused.value).startswith(f"{copy}/iter_0000001/manifest.json is not a manifest of format 2")


def test_a_manifest_that_is_nested_too_deeply_is_refused(copy):
    write_sealed(copy, b'{"settings": {"a": ' + b"[" * 100_000)
    with pytest.raises(UserError, match="manifest.json is not a manifest of format 2.*(recursion|stack overflow)"):
        read_manifest(str(copy))


@pytest.mark.parametrize("name", [TRACKER, "iter_0000001/manifest.json", "iter_0000001/manifest.json.sha256",
                                  f"iter_0000001/{FIRST}"])
def test_what_is_not_regular_or_may_not_be_looked_up_is_not_missing(saved_root, copy, name):
    """A pipe, a device or a name that leads in a circle is refused, and not waited for."""
    manifest, path = read_manifest(str(saved_root)), copy / name

    def read():
        check_file(str(copy), FIRST, manifest)
        return read_manifest(str(copy))

    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UserError, match="Too many levels of symbolic links"):
        read()
    for make in (partial(os.mkfifo, path), partial(path.symlink_to, "/dev/zero")):
        path.unlink()
        make()
        with pytest.raises(UserError, match=f"{name} cannot be read: it is a pipe or a device"):
            read()


def test_elements_of_another_format_are_not_read_as_weights(ranks, copy):
    """A file of int32 with the right names, shapes and checksum. (Sealed again without a change, it loads.)"""
    seal_again(copy, lambda content: None)
    assert load_says(ranks, SMALL, copy) == ""
    path = copy / "iter_0000001" / FIRST
    save_file({name: x.astype(np.int32) for name, x in load_file(path).items()}, path)
    content = path.read_bytes()
    seal_again(copy, partial(put, ["files", FIRST],
                             {"bytes": len(content), "xxh128": xxhash.xxh3_128(content).hexdigest()}))
    said = load_says(ranks, SMALL, copy)
    assert f"{path} holds" in said and "I32" in said and "F64" in said


@st.composite
def tilings(draw):
    """Draw an array's shape, and boxes that tile it: a grid of any widths, in any order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    grid = product(*([slice(*ends) for ends in pairwise(along)] for along in edges))
    return shape, draw(st.permutations(list(grid)))


@given(tilings(), st.data())
def test_boxes_tile_an_array_or_are_refused(tiling, data):
    """A tiling is accepted; one box less, twice, or with one edge moved, it is none."""
    shape, found = tiling
    check_tiling("x", shape, found)
    assert [box_of(text_of(box)) for box in found] == list(found)
    i, axis = data.draw(st.integers(0, len(found) - 1)), data.draw(st.integers(0, len(shape) - 1))
    box, by = found[i], data.draw(st.sampled_from([-1, 1]))
    moved = (*box[:axis], slice(box[axis].start, box[axis].stop + by), *box[axis + 1:])
    for wrong in (found[:i] + found[i + 1:], [*found, box], [*found[:i], moved, *found[i + 1:]]):
        with pytest.raises(ValueError, match="x"):
            check_tiling("x", shape, wrong)
