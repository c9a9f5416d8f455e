"""The machine's rate of reading weights: each process multiplies a vector with one large float32 matrix, on request.

Its argument is the number of the matrix's elements. It has as many columns as OpenBLAS multiplies fastest.
"""
import sys

import numpy as np
from turns import serve

ROWS = 768

if __name__ == "__main__":
    matrix = np.random.default_rng(0).standard_normal((ROWS, int(sys.argv[1]) // ROWS), np.float32)
    vector = np.ones(ROWS, np.float32)
    out = np.empty(matrix.shape[1], np.float32)
    serve(lambda: np.matmul(vector, matrix, out=out))
