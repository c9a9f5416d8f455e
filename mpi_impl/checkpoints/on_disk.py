"""Checkpoints on disk: the content of their folder, atomic writing, and checked reading.

    DIR/latest_checkpointed_iteration.txt     the tracker, as Megatron has it: the number of the last good one
                                     .txt.tmp  the next tracker, until its checkpoint has its name
    DIR/iter_0000020/manifest.json            all tensors, the ranks that saved their boxes, checksums of their files
                     manifest.json.sha256     the manifest's own, as sha256sum writes it
                     parameters-00003.safetensors, m-..., v-...      rank 3's shards of the optimizer's states
    DIR/iter_0000030.1f09ab7c.tmp             one in progress, or left over from a run that was killed
    DIR/run.lock                              the lock of the run that saves here (folder_lock.py)

A checkpoint is written aside, and every file, the next tracker too, is on the disk before the folder gets its name; the
tracker is replaced last. So whenever a run is killed, the tracker names a complete one, and the next run sees whether
another was about to be named. A checkpoint that has its name is never removed or written again, whoever has saved it.
Numbers come from JSON and safetensors: nothing that is read can run as a program, as a pickle can.
"""
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from math import prod
from typing import Any
from uuid import uuid4

import numpy as np
import xxhash

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
    """Raise UserError if the folder has a checkpoint of this iteration, of a later one, or any without a tracker."""
    named = tracked(root)
    last = max([*saved(root), named or -1])
    if last >= iteration or (named is None and last >= 0):
        advice = (f" Start again with --load {root} to resume from there." if named == last else
                  f"{others(root)} To continue without it, move its folder away.")
        raise UserError(f"--save {root} holds a checkpoint of iteration {last}, and this run is at iteration "
                        f"{iteration - 1} now.{advice} Or choose another folder.")


def make_aside(root: str, iteration: int) -> str:
    """Make an empty folder for a new checkpoint, which no other run shares."""
    check_free(root, iteration)
    aside = f"{folder_of(root, iteration)}.{uuid4().hex[:8]}.tmp"
    with writing(root):
        os.makedirs(root, exist_ok=True)
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
    """Write the manifest next to the shards, which are complete, rename the folder, and replace the tracker.

    Each is on the disk before the next begins. Raises UserError if one fails: the tracker then names the last good one.
    """
    final, tracker = folder_of(root, manifest.iteration), os.path.join(root, TRACKER)
    text = manifest.text().encode()
    write_synced(os.path.join(aside, MANIFEST), [text])
    write_synced(os.path.join(aside, SEAL), [seal_of(text)])
    check_free(root, manifest.iteration)    # another run may have saved since, where folders cannot be locked
    with writing(tracker), suppress(FileNotFoundError):
        os.remove(f"{tracker}.tmp")
    write_synced(f"{tracker}.tmp", [str(manifest.iteration).encode()])
    with writing(final):
        sync_folder(aside)
        sync_folder(root)
        os.rename(aside, final)
        sync_folder(root)
    with writing(tracker):
        os.replace(f"{tracker}.tmp", tracker)
        sync_folder(root)


def finish(root: str) -> None:
    """Replace the tracker for a run that was killed just after its checkpoint had got its name."""
    pending = os.path.join(root, f"{TRACKER}.tmp")
    if os.path.isfile(pending) and not os.path.islink(pending):
        number = read_bytes(pending, 1000)
        if number.isdigit() and int(number) in saved(root) and int(number) > (tracked(root) or 0):
            with writing(pending):
                os.replace(pending, os.path.join(root, TRACKER))


def discard(aside: str) -> None:
    """Remove a checkpoint that could not be finished, as far as possible."""
    shutil.rmtree(aside, ignore_errors=True)


def write_synced(path: str, parts: Iterable) -> FileSeal:
    """Write a file of these bytes, or arrays; it is on the disk when this returns. Raise UserError if that fails.

    Now and then a thread forces to the disk what has been written, so that the disk works while we compute checksums.
    The buffer is small, since nearly all bytes are in parts that are larger than any.
    """
    digest, syncs = xxhash.xxh3_128(), list[Future]()
    with writing(path), open(path, "wb", buffering=8192) as file, ThreadPoolExecutor(1) as disk:
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


def saved(root: str) -> list[int]:
    """Return the iterations of the checkpoints in the folder, in order, whatever the tracker says."""
    with reading(root):
        names = os.listdir(root) if is_there(root) else []
    return sorted(int(name[5:]) for name in names if re.fullmatch(r"iter_\d+", name))


def others(root: str) -> str:
    """Name the checkpoints that could be loaded instead, for the end of an error sentence."""
    if not (found := saved(root)):
        return f" {root} holds no checkpoint."
    return (f" {root} holds the checkpoint{'s' * (len(found) > 1)} of iteration {', '.join(map(str, found))}: to load "
            f"one, write its number into {TRACKER} there.")


def read_manifest(root: str) -> Manifest:
    """Read the manifest of the checkpoint that the tracker names. Raise UserError if that fails."""
    iteration = tracked(root)
    if iteration is None:
        tracker = os.path.join(root, TRACKER)
        if saved(root):
            raise UserError(f"--load {root} does not name a checkpoint to load: {tracker} is not there.{others(root)}")
        advice = (f"Give the folder above it, {os.path.dirname(os.path.abspath(root))}."
                  if os.path.exists(os.path.join(root, MANIFEST)) else f"A run with --save {root} makes one.")
        raise UserError(f"--load {root} holds no checkpoint: {tracker} is not there. {advice}")
    folder = folder_of(root, iteration)
    path = os.path.join(folder, MANIFEST)
    if not os.path.isdir(folder):
        raise UserError(f"{os.path.join(root, TRACKER)} names iteration {iteration}, but {folder} is not there."
                        f"{others(root)}")
    text = read_bytes(path)
    if read_bytes(os.path.join(folder, SEAL), 1000) != seal_of(text):
        raise UserError(f"{path} is damaged, or {SEAL} next to it: that is not its checksum.{others(root)}")
    try:
        manifest = Manifest.from_text(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a manifest of format {FORMAT}, the only one that is known here: "
                        f"{sentence(error)}.") from error
    if manifest.iteration != iteration:
        raise UserError(f"{path} is of iteration {manifest.iteration}: the folder has been given another's name.")
    return manifest


def check_file(root: str, name: str, manifest: Manifest) -> None:
    """Raise UserError if a file is not as it was written."""
    StoredTensors(root, name, manifest).check()


class StateReader:
    """A reader of boxes of the tensors of one state, from all the files that have a part of them.

    The files in `checked` are compared with their checksums, as their boxes are read, and the rest of them by `check`.
    """

    def __init__(self, root: str, state: str, manifest: Manifest, checked: Collection[str] = ()):
        self.root, self.state, self.manifest, self.checked = root, state, manifest, checked
        self.files: dict[str, StoredTensors] = {}       # the files opened so far

    def read(self, tensor: str, box: Box) -> np.ndarray:
        """Return these elements of the tensor, [box's shape]: a view of the file, if one stored box has them all.

        Raise UserError if that fails.
        """
        parts = list(self.parts_of(tensor, box))
        if len(parts) == 1:
            return parts[0][1]
        found = np.empty(shape_of(box), self.manifest.dtype)
        for place, part in parts:
            found[place] = part
        return found

    def parts_of(self, tensor: str, box: Box) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the parts of a box that the files have, as views of them, with the parts' places in the box."""
        for stored, rank in self.manifest.tensors[tensor].boxes:
            if common := overlap(box, stored):
                name = file_of(self.state, rank)
                whole = self.file(name).array(key_of(tensor, stored), shape_of(stored), name in self.checked)
                yield inside(common, box), whole[inside(common, stored)]

    def file(self, name: str) -> "StoredTensors":
        if name not in self.files:
            self.files[name] = StoredTensors(self.root, name, self.manifest)
        return self.files[name]

    def check(self) -> None:
        """Raise UserError unless all files in `checked` are as they were written."""
        for name in self.checked:
            self.file(name).check()


class StoredTensors:
    """A safetensors file that is mapped into memory, so that its elements are copied once, to where they belong.

    Its checksum grows with the elements that are asked for: they are then in the cache when they are copied.
    Raises UserError if the file is missing, is another one, or is cut off.
    """

    def __init__(self, root: str, name: str, manifest: Manifest):
        self.root, self.dtype, self.seal = root, manifest.dtype, manifest.files[name]
        self.path = path = os.path.join(folder_of(root, manifest.iteration), name)
        if not is_there(path):
            raise UserError(f"{path} is missing.{others(root)}")
        with opened_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size != self.seal.bytes:
            raise UserError(f"{path} is damaged: it has {size:,} bytes, and {self.seal.bytes:,} were written."
                            f"{others(root)}")
        open_tensors(path)      # which checks that the header describes all bytes after it
        with reading(path):
            self.bytes = np.asarray(np.memmap(path, np.uint8, "r"))
        self.begin = 8 + int.from_bytes(self.bytes[:8], "little")
        self.header = json.loads(bytes(self.bytes[8:self.begin]))
        self.digest, self.digested = xxhash.xxh3_128(), 0

    def array(self, name: str, shape: tuple[int, ...], checked: bool) -> np.ndarray:
        """Return an array, which is not copied yet; `checked` adds it to the checksum, with all before it. Raise
        UserError unless the file has it in this shape and in the checkpoint's format.
        """
        found, expected = self.header.get(name, {}), {"dtype": TYPES[self.dtype], "shape": list(shape)}
        if {key: found.get(key) for key in expected} != expected:
            self.check()        # a damaged header is the likelier reason
            raise UserError(f"{self.path} holds {name} as {found}, but {MANIFEST} says that it is {expected}.")
        start, stop = (self.begin + offset for offset in found["data_offsets"])
        if checked:
            self.add_to_digest(stop)
        return self.bytes[start:stop].view(self.dtype).reshape(shape)

    def add_to_digest(self, stop: int) -> None:
        """Add the bytes of the file up to `stop` to its checksum, if they are not in it."""
        if self.digested < stop:
            self.digest.update(self.bytes[self.digested:stop].data)
            self.digested = stop

    def check(self) -> None:
        """Raise UserError if the file is not as it was written."""
        self.add_to_digest(len(self.bytes))
        if self.digest.hexdigest() != self.seal.xxh128:
            raise UserError(f"{self.path} is damaged: its checksum is not the one in {MANIFEST}.{others(self.root)}")
