"""Checkpoints on disk: the content of their folder, atomic writing, and checked reading.

    DIR/latest_checkpointed_iteration.txt     the tracker, as Megatron has it: the number of the last good one
    DIR/iter_0000020/manifest.json            all tensors, the ranks that saved their boxes, checksums
                     manifest.json.sha256     the manifest's own, as sha256sum writes it
                     parameters-00003.safetensors, m-..., v-...      rank 3's shards of the optimizer's states
    DIR/iter_0000030.tmp                      one in progress, or left over from a run that was killed

A checkpoint is written aside, and every file is on the disk before the folder gets its name; then the tracker is
updated. So whenever a run is killed, the tracker names a complete one. Numbers come from JSON and safetensors: nothing
that is read can run as a program, as a pickle can.
"""
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from mpi_impl.checkpoints.manifest import FORMAT, TYPES, FileSeal, Manifest, file_of, key_of
from mpi_impl.runtime.files import is_there, opened_to_read, read_bytes, reading, writing
from mpi_impl.runtime.formats import open_tensors, sentence
from reference.errors import UserError
from reference.parallel.boxes import Box, inside, overlap, shape_of

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST, SEAL = "manifest.json", "manifest.json.sha256"
SYNC_EVERY = 1 << 25    # bytes of a file


def folder_of(root: str, iteration: int) -> str:
    return os.path.join(root, f"iter_{iteration:07}")


# ---- write ----------------------------------------------------------------------------------------------------------


def check_free(root: str, iteration: int) -> None:
    """Raise UserError if the folder has a good checkpoint of this iteration, or of a later one."""
    last = tracked(root)
    if last is not None and last >= iteration:
        raise UserError(f"--save {root} holds a checkpoint of iteration {last}, which this run, at iteration "
                        f"{iteration - 1} now, would write again. Add --load {root} to go on from there, or choose "
                        "another folder.")


def make_aside(root: str, iteration: int) -> str:
    """Make an empty folder for a new checkpoint. Remove those of killed runs."""
    check_free(root, iteration)
    with writing(root):
        os.makedirs(root, exist_ok=True)
        for name in os.listdir(root):
            if re.fullmatch(r"iter_\d+\.tmp", name):
                shutil.rmtree(os.path.join(root, name))
        aside = f"{folder_of(root, iteration)}.tmp"
        os.mkdir(aside)
    return aside


def write_tensors(path: str, dtype: str, shapes: dict[str, tuple[int, ...]], elements: Iterable,
                  metadata: dict[str, str] | None = None) -> FileSeal:
    """Write a safetensors file of these arrays. `elements` are their contents in order, in chunks of any size.

    So a rank needs no copy of its states: adjacent boxes are written directly from memory.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + prod(shape) * int(TYPES[dtype][1:]) // 8
        header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)         # the elements begin at a multiple of 8
    return write_synced(path, chain([len(text).to_bytes(8, "little"), text], elements))


def publish(root: str, aside: str, manifest: Manifest) -> None:
    """Write the manifest beside the shards, which are complete, rename the folder, and update the tracker.

    Each is on the disk before the next begins. Raises UserError if one fails: the tracker then names the last good one.
    """
    final, tracker = folder_of(root, manifest.iteration), os.path.join(root, TRACKER)
    text = manifest.text().encode()
    write_synced(os.path.join(aside, MANIFEST), [text])
    write_synced(os.path.join(aside, SEAL), [seal_of(text)])
    with writing(final):
        sync_folder(aside)
        if os.path.exists(final):           # left by a run that was killed before the tracker named it
            shutil.rmtree(final)
        os.rename(aside, final)
        sync_folder(root)
    write_synced(f"{tracker}.tmp", [str(manifest.iteration).encode()])
    with writing(tracker):
        os.replace(f"{tracker}.tmp", tracker)
        sync_folder(root)


def discard(aside: str) -> None:
    """Remove a checkpoint that could not be finished, as far as possible."""
    shutil.rmtree(aside, ignore_errors=True)


def write_synced(path: str, parts: Iterable) -> FileSeal:
    """Write a file of these bytes, or arrays; it is on the disk when this returns. Raise UserError if that fails.

    Now and then a thread forces to the disk what has been written, so that the disk works while we compute checksums.
    """
    digest, syncs = hashlib.sha256(), list[Future]()
    with writing(path), open(path, "wb") as file, ThreadPoolExecutor(1) as disk:
        for part in parts:
            file.write(part)
            digest.update(part)
            if file.tell() > (len(syncs) + 1) * SYNC_EVERY:
                syncs.append(disk.submit(os.fsync, file.fileno()))
        file.flush()
        for sync in [*syncs, disk.submit(os.fsync, file.fileno())]:
            sync.result()
        return FileSeal(file.tell(), digest.hexdigest())


def sync_folder(path: str) -> None:
    """Force the names in a folder to the disk, too."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def seal_of(manifest: bytes) -> bytes:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


# ---- read -----------------------------------------------------------------------------------------------------------


def tracked(root: str) -> int | None:
    """Return the iteration that the tracker names; None if there is no tracker. Raise UserError for a damaged one."""
    path = os.path.join(root, TRACKER)
    if not is_there(path):
        return None
    content = read_bytes(path, 1000)
    if not re.fullmatch(rb"\d{1,15}\n?", content):
        raise UserError(f"{path} holds {content[:30]!r}, but must hold the number of an iteration.{others(root)}")
    return int(content)


def others(root: str) -> str:
    """Name the checkpoints that could be loaded instead, for the end of an error sentence."""
    found = sorted(int(name[5:]) for name in os.listdir(root) if re.fullmatch(r"iter_\d+", name))
    if not found:
        return f" {root} holds no checkpoint."
    return (f" {root} holds the checkpoint{'s' * (len(found) > 1)} of iteration {', '.join(map(str, found))}: to load "
            f"one, write its number into {TRACKER} there.")


def read_manifest(root: str) -> Manifest:
    """Read the manifest of the checkpoint that the tracker names. Raise UserError if that fails."""
    iteration = tracked(root)
    if iteration is None:
        advice = f" Give the folder above it, {os.path.dirname(os.path.abspath(root))}."
        raise UserError(f"--load {root} holds no checkpoint: {os.path.join(root, TRACKER)} is not there."
                        f"{advice if os.path.exists(os.path.join(root, MANIFEST)) else ''}")
    folder = folder_of(root, iteration)
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        raise UserError(f"{os.path.join(root, TRACKER)} names iteration {iteration}, but {folder} is not there."
                        f"{others(root)}")
    text = read_bytes(path)
    if read_bytes(os.path.join(folder, SEAL), 1000) != seal_of(text):
        raise UserError(f"{path} is damaged, or {SEAL} beside it: that is not its checksum.{others(root)}")
    try:
        manifest = Manifest.from_text(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a manifest of format {FORMAT}, the only one that is known here: "
                        f"{sentence(error)}.") from error
    if manifest.iteration != iteration:
        raise UserError(f"{path} is of iteration {manifest.iteration}: the folder has been given another's name.")
    return manifest


def check_file(root: str, folder: str, name: str, seal: FileSeal) -> None:
    """Raise UserError if a file is not as it was written. It is read once, a chunk at a time."""
    path = os.path.join(folder, name)
    if not is_there(path):
        raise UserError(f"{path} is missing.{others(root)}")
    with opened_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        same = size == seal.bytes and hashlib.file_digest(file, "sha256").hexdigest() == seal.sha256
    if not same:
        fault = (f"it has {size:,} bytes, and {seal.bytes:,} were written" if size != seal.bytes else
                 f"its checksum is not the one in {MANIFEST}")
        raise UserError(f"{path} is damaged: {fault}.{others(root)}")


class StateReader:
    """A reader of boxes of the tensors of one state, from all the files that have a part of them."""

    def __init__(self, folder: str, state: str, manifest: Manifest):
        self.folder, self.state, self.tensors, self.dtype = folder, state, manifest.tensors, manifest.dtype
        self.files: dict[int, MappedTensors] = {}       # the files opened so far, by rank

    def read(self, tensor: str, box: Box, out) -> None:
        """Fill `out`, an array of the box's shape, with these elements of the tensor. Raise UserError if that fails."""
        for stored, rank in self.tensors[tensor].boxes:
            if common := overlap(box, stored):
                if rank not in self.files:
                    self.files[rank] = MappedTensors(os.path.join(self.folder, file_of(self.state, rank)))
                part = self.files[rank].array(key_of(tensor, stored), self.dtype, shape_of(stored))
                out[inside(common, box)] = part[inside(common, stored)]


class MappedTensors:
    """A safetensors file that is mapped into memory, so that its elements are copied once, to where they belong.

    Raises UserError if it is another file, or is cut off.
    """

    def __init__(self, path: str):
        open_tensors(path)      # which checks that the header describes all bytes after it
        self.path = path
        with reading(path):
            self.bytes = np.memmap(path, np.uint8, "r")
        self.begin = 8 + int.from_bytes(self.bytes[:8], "little")
        self.header = json.loads(bytes(self.bytes[8:self.begin]))

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array, which is not read yet. Raise UserError unless the file has it in this format and shape."""
        found, expected = self.header.get(name, {}), {"dtype": TYPES[dtype], "shape": list(shape)}
        if {key: found.get(key) for key in expected} != expected:
            raise UserError(f"{self.path} holds {name} as {found}, but {MANIFEST} says that it is {expected}.")
        start, stop = found["data_offsets"]
        return self.bytes[self.begin + start:self.begin + stop].view(dtype).reshape(shape)
