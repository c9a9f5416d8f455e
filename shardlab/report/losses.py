"""Pictures of a run."""
from matplotlib.figure import Figure

from mpi_impl.runtime.pictures import save


def plot_losses(path: str, losses, validation, unigram: float | None) -> None:
    """Plot training and validation loss, pairs (iteration, nats per token), and the unigram model's level."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*losses, strict=True), color="tab:blue", linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    if unigram is not None:
        axes.axhline(unigram, color="gray", linestyle="--", linewidth=1, label="unigram model, validation")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)
