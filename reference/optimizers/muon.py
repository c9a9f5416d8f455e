"""Muon: momentum, orthogonalized matrix by matrix (Jordan et al. 2024). Formulas only.

Adam looks at one element at a time; Muon's update of an element depends on its whole matrix. For a momentum U S V^T it
is about U V^T: all directions in which gradients point get the same step, whatever their singular values. Nobody
computes U and V. An odd polynomial of X changes the singular values alone, and five rounds of the one below
bring all that are not tiny close to 1 (Newton-Schulz). So it takes only products of matrices:

    X <- X / (|X| + eps)                    |X| is the Frobenius norm, and no singular value is above it
    X <- a X + (b A + c A A) X              five times, with A = X X^T  [n, n], n <= m

What tensor parallelism shards is orthogonalized whole (`--muon-tp-mode`): each rank gathers the shards and computes the
same as the others (duplicated), or it keeps its own, and all sum A in every round (distributed). With X sharded by
columns A is a sum of products of shards; X sharded by rows is transposed. To orthogonalize each shard alone, as
Megatron does by default (blockwise), is another optimizer for every t.
"""
from math import prod, sqrt

import numpy as np

from reference.comm.collectives import all_reduce
from reference.config import OptimizerConfig
from reference.optimizers.adam import adam_update, decay_weights
from reference.params import Tensor, shard, whole

COEFFICIENTS = 3.4445, -4.7750, 2.0315      # a, b, c: Jordan et al. 2024
EPS = 1e-7                                  # of the norm


def is_matrix(tensor: Tensor) -> bool:
    """Report whether it is a matrix of a layer, or several: Muon's. All else is Adam's.

    Those are the weights that tensor parallelism shards, but for tables, which are padded. The rest is tables, norms,
    biases, and what computes scores, small and replicated: routers and the heads of a BERT.
    """
    return tensor.decay and tensor.split is not None and not tensor.pad_to


def update_whole(param, grad, m, v, tensor: Tensor, step: int, lr: float, c: OptimizerConfig) -> None:
    """Do one step of the optimizer in place on a whole tensor; `step` counts from 1."""
    if c.muon and is_matrix(tensor):
        muon_update(param, grad, m, tensor, lr, c, orthogonalized)
    else:
        adam_update(param, grad, m, v, step, lr, tensor.decay, c)


def muon_update(param, grad, m, tensor: Tensor, lr: float, c: OptimizerConfig, orthogonalize) -> None:
    """Do one step of Muon, in place on param and m, which like grad are of a weight or its shard.

    m is a running mean of the gradients. orthogonalize(x, tensor, c) returns the update along x, which does not depend
    on the magnitude of x: so the mean of the first steps needs no correction. Decay is AdamW's (Liu et al. 2025).
    """
    m *= c.muon_momentum
    m += (1 - c.muon_momentum) * grad
    direction = (1 - c.muon_momentum) * grad + c.muon_momentum * m if c.muon_use_nesterov else m
    decay_weights(param, lr, c)
    param -= lr * orthogonalize(direction, tensor, c)


# ---- the matrices of a weight ----------------------------------------------------------------------------------------


def matrices(x, tensor: Tensor) -> list:
    """Return a weight's matrices, or those of its shard, as views [rows, columns]: Q, K and V are three, the sides of a
    gate two, and each expert has its own. (Megatron splits Q, K and V likewise, unless told --muon-no-split-qkv.)

    The first axis has the rows, of stacked experts the second. The axes from the sharded one on have the columns, and
    an axis in between numbers matrices; where the rows are sharded, all axes after them have the columns.
    """
    first = int(tensor.dealt)
    stacks = x.reshape(prod(x.shape[:first]), x.shape[first], prod(x.shape[first + 1:tensor.split]), -1)
    return [stack[:, i] for stack in stacks for i in range(stack.shape[1])]


def shards_by_columns(x, tensor: Tensor) -> list:
    """Return the same of a shard, each [n, m/t]: transposed if tensor parallelism shards rows."""
    found = matrices(x, tensor)
    return [matrix.T for matrix in found] if tensor.split == int(tensor.dealt) else found


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """Return the rows and columns of each of a whole weight's matrices."""
    first = int(tensor.dealt)
    return tensor.shape[first], prod(tensor.shape[max(first + 1, tensor.split or 0):])


def scale(tensor: Tensor, c: OptimizerConfig) -> float:
    """Return the factor of the update of each matrix, which maps `rows` inputs to `columns` outputs.

    spectral:       sqrt(max(outputs, inputs)); elements are about 1, as those of Adam's (Liu et al. 2025)
    unit_rms_norm:  sqrt(outputs / inputs); outputs move by as much as inputs have (Bernstein 2025)
    shape_scaling:  sqrt(max(1, outputs / inputs)) (Jordan et al. 2024)
    """
    rows, columns = matrix_shape(tensor)
    factors = {"spectral": max(columns, rows), "unit_rms_norm": columns / rows, "shape_scaling": max(1, columns / rows)}
    return c.muon_extra_scale_factor * sqrt(factors[c.muon_scale_mode])


def multiplications(tensor: Tensor) -> int:
    """Return how many a round of Newton-Schulz takes for a whole weight: n^2 (2 m + n) for each matrix [n, m]."""
    n, m = sorted(matrix_shape(tensor))
    return prod(tensor.shape) // (n * m) * n * n * (2 * m + n)


# ---- a whole weight -------------------------------------------------------------------------------------------------


def orthogonalized(x, tensor: Tensor, c: OptimizerConfig):
    """Return the update along x, a whole weight's momentum: each of its matrices orthogonalized, and scaled."""
    y = np.empty_like(x, order="C")
    for matrix, out in zip(matrices(x, tensor), matrices(y, tensor)):
        out[...] = scale(tensor, c) * newton_schulz(matrix, c.muon_num_ns_steps)
    return y


def newton_schulz(x, steps: int):
    """Orthogonalize the whole matrix x [n, m]."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, steps).T                  # the same, with a smaller A
    x = x / (np.sqrt((x * x).sum()) + EPS)
    for _ in range(steps):
        x = quintic(x, x @ x.T)                             # [n, m] @ [m, n] -> [n, n]
    return x


def quintic(x, gram):
    """Compute a x + (b A + c A A) x for x [n, m], or for some of its columns; A is x x^T [n, n] of all of them."""
    a, b, c = COEFFICIENTS
    return a * x + (b * gram + c * (gram @ gram)) @ x       # [n, n] @ [n, m] -> [n, m]


# ---- its shards on t ranks ------------------------------------------------------------------------------------------


def sharded_orthogonalized(xs, tensor: Tensor, c: OptimizerConfig) -> list:
    """Return the update along each rank's x, a shard of a weight's momentum."""
    t = len(xs)
    if c.muon_tp_mode == "duplicated":
        y = orthogonalized(whole(xs, tensor), tensor, c)    # every rank gathers all shards, and computes all of this
        return [shard(y, tensor, t, rank) for rank in range(t)]
    ys = [np.empty_like(x, order="C") for x in xs]
    for shards, outs in zip(zip(*(shards_by_columns(x, tensor) for x in xs)),
                            zip(*(shards_by_columns(y, tensor) for y in ys))):
        for out, found in zip(outs, sharded_newton_schulz(shards, tensor.copies(t), c.muon_num_ns_steps)):
            out[...] = scale(tensor, c) * found
    return ys


def sharded_newton_schulz(xs, copies: int, steps: int) -> list:
    """Orthogonalize a matrix of which each rank has columns, x [n, m/t], as have the neighbours that hold copies."""
    squares = all_reduce([(x * x).sum() / copies for x in xs])
    xs = [x / (np.sqrt(total) + EPS) for x, total in zip(xs, squares)]
    for _ in range(steps):
        grams = all_reduce([x @ x.T / copies for x in xs])  # [n, m/t] @ [m/t, n] -> [n, n], a partial sum
        xs = [quintic(x, gram) for x, gram in zip(xs, grams)]
    return xs
