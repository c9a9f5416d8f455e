"""How much is allocated while something is at work: NumPy tells tracemalloc of every array."""
import tracemalloc


def most_bytes(act) -> int:
    """The most that there is at once, while `act()` runs, of what it allocates."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()      # else whatever this process does later would take ten times as long
