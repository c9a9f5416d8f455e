"""The computations of a rank, on its own pieces. The dimensions of an array are in the order of its named axes.

forward maps the operands to the result and a cache; backward maps the result's gradient and the cache to a gradient of
each operand, or of the first ones only, if the others are constants.
"""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Product(NamedTuple):
    """Products of the elements with the same indices, summed over the axes that the result lacks."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    out: tuple[str, ...]

    def forward(self, x, y):
        return contract(x, self.x, y, self.y, self.out), (x, y)

    def backward(self, dz, cache):
        x, y = cache
        return contract(dz, self.out, y, self.y, self.x), contract(dz, self.out, x, self.x, self.y)


def contract(x, x_axes, y, y_axes, out):
    """Multiply arrays as matrices, one product for each index of the axes that both and the result have."""
    both = [axis for axis in out if axis in x_axes and axis in y_axes]
    left, right = ([axis for axis in out if axis in axes and axis not in both] for axes in (x_axes, y_axes))
    summed, sizes = [axis for axis in x_axes if axis not in out], dict(zip(x_axes + y_axes, x.shape + y.shape))

    def matrices(array, axes, *groups):
        array = np.transpose(array, [axes.index(axis) for group in groups for axis in group])
        return array.reshape([np.prod([sizes[axis] for axis in group], dtype=int) for group in groups])

    z = np.matmul(matrices(x, x_axes, both, left, summed), matrices(y, y_axes, both, summed, right))
    axes = both + left + right
    return np.transpose(z.reshape([sizes[axis] for axis in axes]), [axes.index(axis) for axis in out])


class Sum(NamedTuple):
    """x + y, or x - y, with y repeated along the axes that it lacks."""

    x: tuple[str, ...]
    y: tuple[str, ...]
    sign: int

    def forward(self, x, y):
        y = y.reshape([y.shape[self.y.index(axis)] if axis in self.y else 1 for axis in self.x])
        return (x + y if self.sign > 0 else x - y), None

    def backward(self, dz, _):
        dy = dz
        for dimension in reversed([i for i, axis in enumerate(self.x) if axis not in self.y]):
            dy = dy.sum(dimension)
        return dz, self.sign * dy


class Function(NamedTuple):
    """A function of one array, and perhaps of constants, and what maps the result's gradient to the array's."""

    forward: Callable
    of_array: Callable

    def backward(self, dz, cache):
        return self.of_array(dz, cache),
