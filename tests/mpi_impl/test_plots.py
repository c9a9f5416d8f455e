"""The plot shows each curve under its own name."""
from matplotlib.figure import Figure

from mpi_impl.reports.losses import plot_losses


def test_curves_and_their_names(tmp_path, monkeypatch):
    """Training by iteration, validation where it was taken, the unigram model as a level; and the file is a PNG."""
    drawn, save = {}, Figure.savefig

    def keep(figure, *arguments, **settings):
        drawn.update({line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()})
        save(figure, *arguments, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    plot_losses(str(tmp_path / "losses.png"), [(1, 5.0), (2, 4.0)], [(2, 4.5)], 6.0)
    assert drawn["training"] == [[1, 5], [2, 4]] and drawn["validation"] == [[2, 4.5]]
    assert [y for _, y in drawn["unigram model, validation"]] == [6, 6]
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
