"""Matrix products by cuBLAS: halves on tensor cores with sums in float32, nothing copied, nothing converted.

CuPy's own matmul copies transposed factors beyond two dimensions, and neither adds to what is there nor gives float32
for halves.
"""
from functools import cache

import numpy as np

from mpi_impl.kernels.cuda import cublas
from mpi_impl.kernels.cuda.cublas import DEFAULT, FORMATS, PLAIN, TRANSPOSED
from mpi_impl.kernels.fused import number
from mpi_impl.runtime.arrays import counter_of


def multiply(x, y, out, add: bool = False, scale: float = 1.0):
    """Set out = scale x @ y, or with `add` out += it: x [r, k], y [k, c], out [r, c], or [n, ...] of each.

    x and y have one dtype; out has that one or `number(it)`. The rows of out are contiguous, and the rows or columns of
    x and y are, else they are copied. There may be gaps between rows (or columns).
    """
    (r, k), c = x.shape[-2:], y.shape[-1]
    assert y.shape[-2] == k and out.shape[-2:] == (r, c), f"{x.shape} @ {y.shape} is not {out.shape}"
    (how_x, step_x, x), (how_y, step_y, y), (how_out, step_out, whole) = map(layout, (x, y, out))
    assert how_out == PLAIN and whole is out, "the rows of out are not contiguous"
    if out.size == 0:
        return out
    if (counter := counter_of(out)):
        counter.multiply(r, k, c, out.size // (r * c))
        return out
    library, (compute, alpha, beta, _) = cublas.library(), factors(number(x.dtype), scale, add)
    # cuBLAS counts along columns, and so sees the transpose of each: it computes out^T = y^T x^T.
    sizes = cublas.here(), how_y, how_x, c, r, k, alpha
    a, b, result = ((z.data.ptr, FORMATS[z.dtype], step) for z, step in ((y, step_y), (x, step_x), (out, step_out)))
    if out.ndim == 2:
        library.cublasGemmEx(*sizes, *a, *b, beta, *result, compute, DEFAULT)
    else:
        apart = [z.strides[0] // z.itemsize for z in (y, x, out)]
        library.cublasGemmStridedBatchedEx(*sizes, *a, apart[0], *b, apart[1], beta, *result, apart[2], len(out),
                                           compute, DEFAULT)
    return out


def layout(x):
    """Find the memory layout of x [..., rows, columns].

    -> PLAIN or TRANSPOSED, elements from row to row (or column to column), and x, or a copy if it has neither layout
    """
    rows, columns = x.shape[-2:]
    row, column = (step // x.itemsize for step in x.strides[-2:])
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return PLAIN, (row if rows > 1 else columns), x
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return TRANSPOSED, (column if columns > 1 else rows), x
    return PLAIN, columns, x.copy()


@cache
def factors(dtype, scale: float, add: bool):
    """Return the type in which cuBLAS computes, the addresses of alpha and beta, and the array that holds them."""
    values = np.array([scale, float(add)], dtype)
    return cublas.COMPUTE[values.dtype], values.ctypes.data, values.ctypes.data + values.itemsize, values
