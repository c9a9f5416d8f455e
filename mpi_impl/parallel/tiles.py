"""Tiles: runs of elements that a rank owns, of any tensors, which are loaded, changed and stored together."""
from mpi_impl.runtime.arrays import on_device
from reference.parallel.layout import Piece

# Elements in a tile: no more of an offloaded shard is on the device at the same time.
TILE = 1 << 16              # they stay in a core's cache
DEVICE_TILE = 1 << 26       # they keep a GPU busy while the next ones are prepared


class Tile:
    """Neighbouring elements of a shard, and which of them belong to tensors with weight decay."""

    def __init__(self, start: int, shift: int, limit: int):
        """Begin an empty tile at this element of the shard, which is `shift` further on in the flat buffer. It takes at
        most `limit` elements.
        """
        self.start, self.stop, self.shift, self.end = start, start, shift, start + limit
        self.runs: list[tuple[slice, bool]] = []    # its elements, and whether their tensors have weight decay

    def has_room(self, start: int, shift: int) -> bool:
        """Report whether the elements that begin here are neighbours, and at least one of them fits."""
        return (self.stop, self.shift) == (start, shift) and self.stop < self.end

    def extend(self, stop: int, decay: bool) -> int:
        """Add the next elements, up to `stop` or until the tile is full; return where it now ends."""
        first, self.stop = self.stop, min(stop, self.end)
        if self.runs and self.runs[-1][1] == decay:
            first = self.runs.pop()[0].start + self.start
        self.runs.append((slice(first - self.start, self.stop - self.start), decay))
        return self.stop

    @property
    def place(self) -> Piece:
        """Return the tile's place in a Buffer."""
        return Piece(None, slice(self.start + self.shift, self.stop + self.shift), slice(self.start, self.stop))


def tiles(pieces: list[Piece], device_prototype) -> list[Tile]:
    """Return tiles for all elements of the pieces, which are in the order of the shard.

    Small tensors join their neighbours: one by one, they would cost more in calls than in arithmetic.
    `device_prototype` is an array on the device that computes.
    """
    limit, found = DEVICE_TILE if on_device(device_prototype) else TILE, list[Tile]()
    for of, in_buffer, in_shard in pieces:
        start, shift = in_shard.start, in_buffer.start - in_shard.start
        while start < in_shard.stop:
            if not found or not found[-1].has_room(start, shift):
                found.append(Tile(start, shift, limit))
            start = found[-1].extend(in_shard.stop, of.tensor.decay)
    return found
