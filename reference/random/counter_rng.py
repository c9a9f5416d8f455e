"""Random numbers as a function of a seed, a purpose and an index. Nothing is drawn in order.

A rank that holds columns 512 to 1023 of a weight asks for just those indices and gets the numbers that every other
sharding of the weight has there. The generator is a keyed integer hash over uint32 arrays: multiplications that wrap
around and shifts, so that NumPy and CuPy give the same bits.
"""
from hashlib import blake2b

import numpy as np


def key(seed: int, *purpose) -> tuple[int, int]:
    """Hash (seed, purpose) into two 32-bit words, as in `key(1234, "weights", "blocks.3.mlp.w_in")`.

    A purpose is made of strings, integers (of any library) and None.
    """
    plain = tuple(part if part is None or isinstance(part, str) else int(part) for part in (seed, *purpose))
    digest = blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def indices(shape, whole, first, like):
    """Return uint64 [shape], the row-major index in the whole array of each element of a shard.

    The whole array has the shape `whole` (whole[0] does not matter), and the shard begins at the coordinates `first`.
    Along an axis a shard may be several runs of the whole, of one length: then `first` has a tuple of their beginnings.
    """
    index = np.zeros_like(like, shape=(1,) * len(shape), dtype=np.uint64)
    for axis, size in enumerate(whole):
        index = index * size + coordinates(shape, axis, first[axis], like)
    return index


def coordinates(shape, axis: int, first: int | tuple[int, ...], like):
    """Return uint64 [1, ..., shape[axis], ..., 1], the coordinates of a shard of this shape along one axis."""
    starts = first if isinstance(first, tuple) else (first,)
    n = shape[axis] // len(starts)
    along = np.concatenate([np.arange(start, start + n, dtype=np.uint64, like=like) for start in starts])
    return along.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def bits(key: tuple[int, int], index):
    """Draw an evenly distributed uint32 for every element of the uint64 array `index`."""
    x = (index & 0xFFFFFFFF).astype(np.uint32)
    x = scramble(x ^ key[0])
    x = scramble(x + (index >> 32).astype(np.uint32) ^ key[1])
    return scramble(x + key[0])


def scramble(x):
    """Apply a bijection of 32-bit words in which every input bit flips every output bit with a chance near 1/2.

    It is two rounds of xor-shift and multiply by an odd constant (constants: C. Wellons' search, `lowbias32`).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(key: tuple[int, int], index):
    """Draw float64 in the open interval (0, 1)."""
    return (bits(key, index) + 0.5) * 2.0**-32


def normal(key: tuple[int, int], index):
    """Draw float64 with mean 0 and variance 1, by Box and Muller's transform of two uniform numbers.

    NumPy's own normal draws reject some candidates, so there the n-th number needs the first n - 1.
    """
    radius = np.sqrt(-2 * np.log(uniform(key, 2 * index)))
    return radius * np.cos(2 * np.pi * uniform(key, 2 * index + 1))
