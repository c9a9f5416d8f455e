"""Matrix products by cuBLAS: halves on tensor cores with sums in float32, nothing copied, nothing converted.

CuPy's own matmul copies transposed factors beyond two dimensions, and neither adds to what is there nor gives float32
for halves.
"""
import numpy as np

PLAIN, TRANSPOSED = 0, 1      # cuBLAS's operations
DEFAULT = -1                  # its choice of an algorithm


def number(dtype) -> np.dtype:
    """What is computed in, for arrays of this dtype: float64, or float32 for all others."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def multiply(x, y, out, add: bool = False, scale: float = 1.0):
    """out = scale x @ y, or with `add` out += it: x [r, k], y [k, c], out [r, c], or [n, ...] of each.

    x and y have one dtype, out that one or `number(it)`. Each has neighbours along a row or along a column; out along a
    row. The others' rows and columns may be apart.
    """
    (r, k), c = x.shape[-2:], y.shape[-1]
    assert y.shape[-2] == k and out.shape[-2:] == (r, c), f"{x.shape} @ {y.shape} is not {out.shape}"
    (how_x, step_x, x), (how_y, step_y, y), (how_out, step_out, whole) = map(layout, (x, y, out))
    assert how_out == PLAIN and whole is out, "what is computed needs neighbours along a row"
    if out.size == 0:
        return out
    from cupy.cuda.device import get_cublas_handle
    from cupy_backends.cuda.libs import cublas
    compute = number(x.dtype)
    factors = np.array([scale, float(add)], compute)
    alpha, beta = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    # cuBLAS counts along columns, and so sees the transpose of each: it computes out^T = y^T x^T.
    sizes = get_cublas_handle(), how_y, how_x, c, r, k, alpha
    a, b, result = ((z.data.ptr, cuda_type(z.dtype), step) for z, step in ((y, step_y), (x, step_x), (out, step_out)))
    how = cublas.CUBLAS_COMPUTE_64F if compute == np.float64 else cublas.CUBLAS_COMPUTE_32F
    if out.ndim == 2:
        cublas.gemmEx(*sizes, *a, *b, beta, *result, how, DEFAULT)
    else:
        apart = [z.strides[0] // z.itemsize for z in (y, x, out)]
        cublas.gemmStridedBatchedEx(*sizes, *a, apart[0], *b, apart[1], beta, *result, apart[2], len(out), how, DEFAULT)
    return out


def layout(x):
    """How x [..., rows, columns] lies: -> PLAIN or TRANSPOSED, elements from row to row (or column to column), and x,
    or a copy if it lies in neither way.
    """
    rows, columns = x.shape[-2:]
    row, column = (step // x.itemsize for step in x.strides[-2:])
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return PLAIN, (row if rows > 1 else columns), x
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return TRANSPOSED, (column if columns > 1 else rows), x
    return PLAIN, columns, x.copy()


def cuda_type(dtype) -> int:
    from cupy.cuda import runtime
    return {"float64": runtime.CUDA_R_64F, "float32": runtime.CUDA_R_32F, "float16": runtime.CUDA_R_16F,
            "bfloat16": runtime.CUDA_R_16BF}[str(dtype)]
