"""Loss curves of many runs: for each kind the median over its seeds, and a band between the best and the worst."""
import numpy as np
from matplotlib.figure import Figure

from mpi_impl.runtime.pictures import save

COLORS = {"rearranged": "#1f77b4", "original": "#d62728"}
SMOOTHED = 20      # iterations, whose mean is a point


def draw_curves(path: str, losses: dict, chance: float) -> None:
    """Draw a panel for each depth; `losses` [iterations] are by Run (layer_norm_order.py)."""
    depths = sorted({run.layers for run in losses})
    figure = Figure(figsize=(5.2 * len(depths), 4.2), layout="constrained")
    panels = figure.subplots(1, len(depths), sharey=True, squeeze=False)
    for axes, layers in zip(panels[0], depths):
        for order, color in COLORS.items():
            curves = np.array([smooth(x) for run, x in losses.items() if (run.layers, run.order) == (layers, order)])
            at = np.arange(1, curves.shape[1] + 1) * SMOOTHED
            draw_band(axes, at, np.minimum(curves, 2 * chance), color, f"{order} order")
        axes.axhline(chance, color="0.5", linestyle=":", linewidth=1)
        axes.text(at[-1], chance, "knows nothing", color="0.4", ha="right", va="bottom", fontsize=9)
        axes.set_title(f"{layers} layers")
        axes.set_xlabel("iteration")
        axes.set_ylim(0, 1.15 * chance)
    panels[0][0].set_ylabel("loss of masked numbers, nats")
    panels[0][0].legend(loc="lower left", frameon=False)
    figure.suptitle("Layer norm and residual connection: BERT's original order, and the rearranged one")
    save(figure, path)


def draw_stale_weights(path: str, losses: dict, times: dict, chance: float) -> None:
    """Draw a panel for each rate, of losses [m] by StaleRun (stale_weights.py) against times [m] by way."""
    from mpi_impl.experiments.stale_weights import WAYS
    rates = sorted({run.lr for run in losses})
    figure = Figure(figsize=(5.2 * len(rates), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rates), sharey=True, squeeze=False)
    for axes, lr in zip(panels[0], rates):
        for way, color in zip(WAYS, ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728")):
            curves = np.array([smooth(x) for run, x in losses.items() if (run.way, run.lr) == (way, lr)])
            at = smooth(times[way].astype(float))
            draw_band(axes, at, np.minimum(curves, 2 * chance), color, WAYS[way])
        axes.axhline(chance, color="0.5", linestyle=":", linewidth=1)
        axes.set_title(f"rate {lr:g}")
        axes.set_xlabel("time, in microbatches on one rank")
        axes.set_xlim(0, 2 * min(at[-1] for at in times.values()))
        axes.set_ylim(0, 1.15 * chance)
    panels[0][0].set_ylabel("loss, nats")
    panels[0][0].legend(loc="upper right", frameon=False, fontsize=8)
    figure.suptitle("Pipelines with and without a flush, the same microbatches")
    save(figure, path)


def draw_shared_layers(path: str, losses: dict, layers: int, limits: dict[str, float]) -> None:
    """Draw the losses [iterations] by SharingRun (shared_layers.py), between the limits, each with its name."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, color in zip(dict.fromkeys(run.kind for run in losses), ("#1f77b4", "#d62728", "#7f7f7f")):
        curves = np.array([smooth(x) for run, x in losses.items() if run.kind == kind])
        draw_band(axes, np.arange(1, curves.shape[1] + 1) * SMOOTHED, curves, color, kind)
    for name, loss in limits.items():
        axes.axhline(loss, color="0.5", linestyle=":", linewidth=1)
        axes.text(curves.shape[1] * SMOOTHED, loss, name, color="0.4", ha="right", va="bottom", fontsize=9)
    axes.set_ylim(0, 1.15 * max(limits.values()))
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss, nats")
    axes.legend(loc="upper right", frameon=False, bbox_to_anchor=(1, 0.88))
    axes.set_title(f"{layers} layers with parameters of their own, and with shared ones")
    save(figure, path)


def draw_band(axes, at, curves, color: str, label: str) -> None:
    """Draw the median of curves [n, points], and the band between the least and the most."""
    axes.fill_between(at, curves.min(0), curves.max(0), color=color, alpha=0.18, linewidth=0)
    axes.plot(at, np.median(curves, 0), color=color, linewidth=2, label=label)


def smooth(losses: np.ndarray) -> np.ndarray:
    """Return the means over windows of SMOOTHED iterations; one mean if there are fewer."""
    n = max(1, len(losses) // SMOOTHED)
    return losses[:n * SMOOTHED].reshape(n, -1).mean(1)
