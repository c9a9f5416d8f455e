"""Pictures as files."""
from typing import TYPE_CHECKING

from mpi_impl.runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: "Figure", path: str, dpi: int = 130) -> None:
    """Write a picture, whole or not at all, in the format that its name says. Raises UserError.

    No date goes in, so that the same picture is the same file.
    """
    with replacing(path) as aside:
        figure.savefig(aside, dpi=dpi, metadata={"Date": None} if path.endswith(".svg") else None)
