"""The places of a rank's shard of a flat buffer: loading, changing and storing give the same numbers in all of them."""
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpi_impl.parallel.buffers import OffloadedShard, Shard, Whole
from mpi_impl.runtime import pinned
from reference.config import ModelConfig
from reference.models.gpt import gpt_tensors
from reference.parallel.layout import Layout, Piece
from tests.fake_cuda import fake_cuda
from tests.spy import QUEUE, SpyArray
from tests.strategies import cases

KINDS: dict[str, Callable] = {
    "whole": lambda layout, folder: Whole(np.zeros(layout.size)),
    "on a GPU": lambda layout, folder: Shard(SpyArray(np.zeros(layout.shard_size))),
    "shard": lambda layout, folder: Shard(np.zeros(layout.shard_size)),
    "offloaded": lambda layout, folder: OffloadedShard(layout.shard_size, np.float64, np.empty(0)),
    "offloaded by a GPU": lambda layout, folder: OffloadedShard(layout.shard_size, np.float64, SpyArray(np.empty(0))),
    "in a file": lambda layout, folder: OffloadedShard(layout.shard_size, np.float64, np.empty(0), folder),
}
MAPS = Path("/proc/self/maps")
SMALL = ModelConfig(1, 4, 1, 5, 3)
OF_ANY = pytest.mark.parametrize("kind", KINDS)
LAYOUTS = st.builds(lambda case, size, parts: Layout(gpt_tensors(case.model), 1, size, parts),
                    cases(sizes=st.just(1)), st.sampled_from([1, 50, 1 << 30]), st.integers(1, 5))


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


@OF_ANY
@given(LAYOUTS, st.integers(0, 4))
def test_what_is_stored_is_loaded(tmp_path, kind, layout, rank):
    """Tensor by tensor, or bucket by bucket; no piece touches another's elements."""
    buffer, rank = KINDS[kind](layout, tmp_path), rank % layout.parts
    pieces = layout.pieces(rank)
    values = [np.random.default_rng(i).normal(size=piece.size) for i, piece in enumerate(pieces)]
    for piece, value in zip(pieces, values):
        loaded = buffer.load(piece)
        assert (host(loaded) == 0).all() and loaded.size == len(value)
        loaded += np.asarray(value, like=loaded)
        buffer.store(piece, loaded)
    for piece, value in zip(pieces, values):
        assert (host(buffer.load(piece)) == value).all()
    for bucket in layout.buckets:
        owned = host(buffer.load(layout.owned_piece(bucket, rank)))
        inside = [value for piece, value in zip(pieces, values) if bucket.start <= piece.in_buffer.start < bucket.stop]
        assert (owned[:sum(map(len, inside))] == np.concatenate([[], *inside])).all()


@OF_ANY
@given(LAYOUTS, st.integers(0, 4))
def test_what_is_saved_is_what_is_stored(tmp_path, kind, layout, rank):
    """A host's elements are not copied; a device's come in parts, while the host works on those before."""
    buffer, pieces = KINDS[kind](layout, tmp_path), layout.pieces(rank % layout.parts)
    expected = np.arange(float(sum(piece.size for piece in pieces)))
    for piece, values in zip(pieces, np.split(expected, np.cumsum([piece.size for piece in pieces])[:-1])):
        buffer.store(piece, np.asarray(values, like=buffer.load(piece)))
    with fake_cuda(), mock.patch.object(pinned, "PIECE", 32):
        found, under_way = [], []
        for piece, values in buffer.on_host(pieces) if pieces else ():
            assert isinstance(values, np.ndarray) and (kind == "on a GPU" or values.size == piece.size)
            assert kind == "on a GPU" or np.shares_memory(values, buffer.flat)
            found.append(values.copy())
            under_way.append(QUEUE.launched > QUEUE.finished)
    assert np.concatenate([[], *found]).tolist() == expected.tolist()
    assert under_way == [kind == "on a GPU"] * (len(found) - 1) + [False] * (len(found) > 0)


@pytest.mark.parametrize("kind", ["offloaded", "offloaded by a GPU", "in a file"])
def test_an_offloaded_shard_is_loaded_as_a_copy(tmp_path, kind):
    """The copy is where the rank computes. It changes the shard only once it is stored."""
    layout = Layout(gpt_tensors(SMALL), 1, 1, 2)
    buffer, piece = KINDS[kind](layout, tmp_path), layout.pieces(1)[0]
    loaded = buffer.load(piece)
    assert type(loaded) is (SpyArray if kind == "offloaded by a GPU" else np.ndarray)
    loaded += 1
    assert (host(buffer.load(piece)) == 0).all()
    buffer.store(piece, loaded)
    assert (host(buffer.load(piece)) == 1).all()
    assert isinstance(buffer.flat, np.ndarray)      # on the host, or in the file, whatever computes
    assert (buffer.device_bytes, buffer.offloaded_bytes) == (0, 8 * layout.shard_size)


@pytest.mark.parametrize("kind", ["whole", "shard"])
def test_a_near_buffer_is_loaded_as_a_view(tmp_path, kind):
    layout = Layout(gpt_tensors(SMALL), 1, 1, 2)
    buffer, piece = KINDS[kind](layout, tmp_path), layout.pieces(1)[0]
    assert np.shares_memory(buffer.load(piece), buffer.flat)
    assert (buffer.device_bytes, buffer.offloaded_bytes) == (buffer.flat.nbytes, 0)


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say what is open and mapped")
def test_a_file_has_no_name_and_goes_with_its_shard(tmp_path):
    """Nothing is left behind, however the rank ends: the system frees what nobody has open."""
    shard = OffloadedShard(1000, np.float32, np.empty(0, np.float32), str(tmp_path))
    shard.store(Piece(None, slice(0, 1000), slice(0, 1000)), np.arange(1000, dtype=np.float32))
    assert os.listdir(tmp_path) == [] and os.fstat(shard.file.fileno()).st_size == 4000
    assert open_files(tmp_path) > 0
    del shard
    gc.collect()
    assert open_files(tmp_path) == 0
    assert str(tmp_path) not in MAPS.read_text()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot be asked for room on the disk")
def test_a_file_has_its_room_on_the_disk_from_the_start(tmp_path):
    """A disk that is full is found out now, and not when a number is stored."""
    shard = OffloadedShard(1 << 17, np.float64, np.empty(0), str(tmp_path))
    found = os.fstat(shard.file.fileno())
    assert found.st_size == 1 << 20 and 512 * found.st_blocks >= found.st_size


def open_files(folder) -> int:
    """Count this process's open files in this folder, with or without a name."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):     # the one that lists them
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}{os.sep}")
    return found


def test_a_shard_of_nothing(tmp_path):
    """A file of no bytes cannot be mapped."""
    shard = OffloadedShard(0, np.float64, np.empty(0), str(tmp_path))
    assert shard.offloaded_bytes == 0 and shard.load(Piece(None, slice(0, 0), slice(0, 0))).size == 0


@pytest.mark.parametrize("folder", ["nowhere", "a file"])
def test_a_folder_that_takes_no_file_is_an_error(tmp_path, folder):
    (tmp_path / "a file").write_text("")
    with pytest.raises(OSError):
        OffloadedShard(10, np.float64, np.empty(0), str(tmp_path / folder))


def test_what_is_stored_where_it_is_is_not_moved():
    """So that it costs nothing: nothing is written. Values from elsewhere are."""
    buffer, piece = Whole(np.arange(6.0)), Piece(None, slice(2, 5), slice(0, 3))
    view = buffer.load(piece)
    buffer.flat.flags.writeable = False
    buffer.store(piece, view)
    with pytest.raises(ValueError, match="read-only"):
        buffer.store(piece, view.copy())
