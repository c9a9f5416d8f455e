"""The peak of allocated memory: NumPy reports every array to tracemalloc."""
import tracemalloc


def most_bytes(act) -> int:
    """Return the peak of the bytes that `act()` allocates."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()      # else whatever this process does later would take ten times as long
