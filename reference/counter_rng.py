"""Random numbers as a function: of a seed, of what they are for, and of an index. Nothing is drawn in order.

A rank that holds columns 512 to 1023 of a weight asks for just those indices and gets the numbers that any other
split of the same weight would have there. The generator is a keyed integer hash over uint32 arrays: multiplications
that wrap around and shifts, so that NumPy and CuPy give the same bits.
"""
from hashlib import blake2b

import numpy as np


def key(seed: int, *purpose) -> tuple[int, int]:
    """Two 32-bit words that stand for (seed, purpose), as in `key(1234, "weights", "blocks.3.mlp.w_in")`.

    A purpose is made of strings, integers (of any library) and None.
    """
    plain = tuple(part if part is None or isinstance(part, str) else int(part) for part in (seed, *purpose))
    digest = blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def indices(shape, whole, first, like):
    """uint64 [shape]: where each element of a part stands in the whole array, counted row by row.

    The whole has the shape `whole` (of which whole[0] does not matter), and the part begins at the coordinates `first`.
    """
    index = np.zeros_like(like, shape=(1,) * len(shape), dtype=np.uint64)
    for axis, size in enumerate(whole):
        index = index * size + coordinates(shape, axis, first[axis], like)
    return index


def coordinates(shape, axis: int, first: int, like):
    """uint64 [1, ..., shape[axis], ..., 1]: the coordinates along one axis, as far as a part of this shape goes."""
    along = np.arange(first, first + shape[axis], dtype=np.uint64, like=like)
    return along.reshape([-1 if i == axis else 1 for i in range(len(shape))])


def bits(key: tuple[int, int], index):
    """uint32, evenly distributed, for every element of the uint64 array `index`."""
    x = (index & 0xFFFFFFFF).astype(np.uint32)
    x = scramble(x ^ key[0])
    x = scramble(x + (index >> 32).astype(np.uint32) ^ key[1])
    return scramble(x + key[0])


def scramble(x):
    """A bijection of 32-bit words in which every input bit flips every output bit with a chance near 1/2.

    Two rounds of xor-shift and multiply by an odd constant (constants: C. Wellons' search, `lowbias32`).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uniform(key: tuple[int, int], index):
    """float64 in the open interval (0, 1)."""
    return (bits(key, index) + 0.5) * 2.0**-32


def normal(key: tuple[int, int], index):
    """float64 with mean 0 and variance 1, by Box and Muller's transform of two uniform numbers.

    NumPy's own normal draws reject some candidates, so there the n-th number cannot be had without the first n - 1.
    """
    radius = np.sqrt(-2 * np.log(uniform(key, 2 * index)))
    return radius * np.cos(2 * np.pi * uniform(key, 2 * index + 1))
