"""Tensor parallelism outside transformers: two convolutions, sharded as the MLP is."""
import numpy as np
from hypothesis import given, strategies as st

from reference.comm.mappings import TENSOR_PARALLEL
from reference.layers.convolution import (convolution, convolution_backward, convolutions_backward,
                                          convolutions_forward, convolutions_tensors, sharded_convolutions_backward,
                                          sharded_convolutions_forward)
from reference.ops import ACTIVATIONS
from reference.params import join, split, tree_map
from tests.cases import close, trees_close
from tests.reference.test_ops import SEEDS, SMALL, draw, gradient_is_right

KERNELS = st.sampled_from([1, 3, 5])
ANY_ACTIVATION = st.sampled_from(sorted(ACTIVATIONS))


@given(SMALL, SMALL, SMALL, KERNELS, SEEDS)
def test_a_convolution_is_its_definition(height, width, c, k, seed):
    """Each output adds up its pixel and the neighbours that exist, each through a matrix of its own."""
    x, w = draw(seed, 2, height, width, c), draw(seed, k, k, c, 3)
    expected = np.zeros((2, height, width, 3))
    for row, column, i, j in np.ndindex(height, width, k, k):
        at = row + i - k // 2, column + j - k // 2
        if 0 <= at[0] < height and 0 <= at[1] < width:
            expected[:, row, column] += x[:, at[0], at[1]] @ w[i, j]
    close(convolution(x, w), expected)


@given(SMALL, SMALL, KERNELS, SEEDS)
def test_convolution_backward(height, width, k, seed):
    x, w, dy = draw(seed, 1, height, width, 2), draw(seed, k, k, 2, 2), draw(seed, 2, width, height, 1).T
    dx, dw = convolution_backward(dy, x, w)
    gradient_is_right(dx, lambda x: convolution(x, w), x, dy)
    gradient_is_right(dw, lambda w: convolution(x, w), w, dy)


@given(st.integers(1, 4), st.integers(1, 2), SMALL, SMALL, KERNELS, ANY_ACTIVATION, SEEDS)
def test_convolutions_sharded_by_channels_equal_the_whole(t, each, height, c, k, activation, seed):
    """Output and all gradients, on every rank, with one sum forward and one backward."""
    tensors = convolutions_tensors(k, c, t * each, 1.0)
    p = tree_map(lambda tensor: draw(seed, *tensor.shape), tensors)
    x, dy = draw(seed, 2, height, 3, c), draw(seed, c, 3, height, 2).T
    y, cache = convolutions_forward(x, p, activation)
    dx, grads = convolutions_backward(dy, p, cache, activation)

    shards = split(p, tensors, t)
    ys, caches = sharded_convolutions_forward([x] * t, shards, activation, TENSOR_PARALLEL)
    dxs, shard_grads = sharded_convolutions_backward([dy] * t, shards, caches, activation, TENSOR_PARALLEL)
    for found, found_dx in zip(ys, dxs, strict=True):
        close(found, y)
        close(found_dx, dx)
    trees_close(join(shard_grads, tensors), grads)
