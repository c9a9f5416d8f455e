"""Pictures as files."""
from matplotlib.figure import Figure

from mpi_impl.files import writing


def save(figure: Figure, path: str) -> None:
    """Its name says in what format. No date goes in, so that the same picture is the same file. Raises UserError."""
    with writing(path):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.endswith(".svg") else None)
