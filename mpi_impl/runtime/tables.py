"""Tables of text."""
from collections.abc import Collection, Sequence


def verdict(found: float, value: float, of: str = "") -> str:
    """`= 12`, or `NOT 12`."""
    return f"{'=' if found == value else 'NOT'} {of or f'{value:,}'}"


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Rows of cells as lines: numbers to the right, the columns in `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) if i in left else cell.rjust(w)
                               for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)


def bytes_of(size: float) -> str:
    """In a unit that is easily read, a power of ten: `1.43 GB`."""
    unit, name = unit_for(size)
    return f"{size / unit:,.3g} {name}"


def unit_for(size: float) -> tuple[float, str]:
    """In what unit so many bytes are easily read, and its name."""
    return next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= unit), (1, "bytes"))
