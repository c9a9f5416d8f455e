"""The memory of an array, on the host or on a device, and its format: and the way there and back."""
import ml_dtypes
import numpy as np

TILE = 1 << 15      # elements: a few arrays of this size fit the second-level cache
HALVES = frozenset([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])

# ---- formats (reference/precision.py) ----


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a format. NumPy has no bfloat16 of its own."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_half(x) -> bool:
    """Report whether x is an array of one of the formats of two bytes."""
    return getattr(x, "dtype", None) in HALVES


def widened(x):
    """Widen an array of halves to float32, which loses nothing, or each of a tuple. Leave anything else as it is."""
    if type(x) is tuple:
        return tuple(map(widened, x))
    return x.astype(np.float32) if is_half(x) else x


def narrowed(x, dtype: np.dtype):
    """Round x of float32 to a format of two bytes: to the nearest number, or to infinity beyond the largest.

    Return x unchanged if it is in that format already.

    On a CPU, NumPy needs 20 times as long for what becomes one of float16's numbers below 2^-14, and gradients are full
    of them. They are 2^-24 apart, as float32's are from 0.5 to 1: so a sum there rounds as float16 does.
    """
    if x.dtype == dtype or dtype != np.float16 or not isinstance(x, np.ndarray):
        return x.astype(dtype, copy=False)
    y = np.empty(x.shape, dtype)
    flat, out = x.reshape(-1), y.reshape(-1)
    for start in range(0, x.size, TILE):
        part = flat[start:start + TILE]
        out[start:start + TILE] = np.where(abs(part) < 2**-14, np.copysign((part + 0.75) - 0.75, part), part)
    return y


# ---- memory ----


def contiguous(x):
    """Return x, or a contiguous copy if it is a view with gaps."""
    return x if x.flags.c_contiguous else x.copy()


def on_device(x) -> bool:
    return not isinstance(x, np.ndarray)


def counter_of(x):
    """Return what counts the work on x in place of doing it, or None: an array without data brings one
    (prediction/meta_device.py).
    """
    return getattr(x, "counter", None)


def address(x) -> int:
    """Return the address of the elements, on the host or on the device."""
    return x.data.ptr if on_device(x) else x.ctypes.data


def to_host(x):
    """Return a contiguous host array with x's elements: x itself if it is one."""
    return contiguous(x.get() if on_device(x) else x)


def moved_to(host, x):
    """Move a host array to the memory in which x is."""
    return np.asarray(host, like=x) if on_device(x) else host
