"""Tables of text."""
from collections.abc import Collection, Sequence

WIDTH = 118     # of a line of text, in columns


def verdict(found: float, value: float, of: str = "") -> str:
    """Return `= 12`, or `NOT 12`."""
    return f"{'=' if found == value else 'NOT'} {of or f'{value:,}'}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Align rows of cells as lines: numbers to the right, the columns in `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) if i in left else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def count(n: int, noun: str = "rank") -> str:
    """Return '1 rank', '2 batches' or '1,000 files'."""
    return f"{n:,} {noun}" + ("" if n == 1 else "es" if noun.endswith("ch") else "s")


def bytes_of(size: float) -> str:
    """Return a size in a unit that is easily read, a power of ten: `1.43 GB`."""
    unit, name = unit_for(size)
    return f"{size / unit:,.3g} {name}"


def unit_for(size: float) -> tuple[float, str]:
    """Choose the unit in which a number of bytes is easily read. Return its size and its name."""
    return next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= unit), (1, "bytes"))
