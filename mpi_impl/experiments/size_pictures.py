"""Pictures of the sizes of models and of batches: for each kind the median over its seeds, and a band from the best to
the worst.
"""
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mpi_impl.experiments import model_size
from mpi_impl.runtime.pictures import save
from reference.costs.parameters import parameters

GPT, BERT = "#1f77b4", "#d62728"


def draw_model_size(path: str, curves: dict) -> None:
    """Draw a panel for each architecture, of Curves (model_size.py) by SizeRun; and one of the final losses by size."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    panels = figure.subplots(1, len(model_size.NAMES) + 1, sharey=True)
    for axes, (architecture, name) in zip(panels, model_size.NAMES.items()):
        sizes = model_size.finals(curves, architecture)
        for size, color in zip(sizes, colormaps["viridis"](np.linspace(0.85, 0.1, len(sizes)))):
            of_size = [curve for one, curve in curves.items() if one[:2] == (architecture, size)]
            seen = of_size[0].iterations * model_size.SAMPLES * model_size.POSITIONS / 1000
            draw_band(axes, seen, np.array([curve.losses for curve in of_size]), color, f"h = {size}")
        axes.set_title(f"{name}: validation loss")
        axes.set_xlabel("thousand bytes of text seen")
        axes.legend(loc="upper right", frameon=False)
    for (architecture, name), color in zip(model_size.NAMES.items(), (GPT, BERT)):
        sizes = model_size.finals(curves, architecture)
        at = np.array([parameters(model_size.model_of(architecture, size)) for size in sizes])
        draw_band(panels[-1], at, np.array(list(sizes.values())).T, color, name, marker="o")
    panels[-1].set_title("after all of it")
    panels[-1].set_xlabel("parameters")
    panels[-1].set_xscale("log")
    panels[-1].legend(loc="upper right", frameon=False)
    panels[0].set_ylim(top=1.2 * max(curve.final for curve in curves.values()))     # what comes first is far above
    panels[0].set_ylabel("nats a byte; for BERT of the masked ones")
    save(figure, path)


def draw_batch_size(path: str, steps: dict, fewest: tuple[float, float] | None, loss: float) -> None:
    """Draw the steps, and the samples, by batch size, beside perfect scaling and McCandlish's curve (batch_size.py)."""
    reached = {b: several for b, several in steps.items() if np.isfinite(several).all()}
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    if reached:
        at = np.array(list(reached))
        several = np.array(list(reached.values())).T                        # [seeds, batch sizes]
        perfect = np.median(several[:, 0]) * at[0] / at                     # half the steps for twice the batch
        smooth = np.geomspace(at[0], at[-1], 100)
        for axes, samples in ((left, 1), (right, at)):
            draw_band(axes, at, several * samples, GPT, "measured", marker="o")
            axes.plot(at, perfect * samples, color="0.5", linestyle=":", label="perfect scaling")
            if fewest:
                axes.plot(smooth, (fewest[0] + fewest[1] / smooth) * (1 if axes is left else smooth), color=BERT,
                          linewidth=1, linestyle="--", label="fewest steps + fewest samples / B")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(at, [str(b) for b in at])
    for axes, what in ((left, "steps"), (right, "samples")):
        axes.set_title(f"{what} to a validation loss of {loss:g}")
        axes.set_xlabel("batch size B")
        axes.set_ylabel(what)
    if reached:
        left.legend(loc="upper right", frameon=False)
    figure.suptitle("What a batch of twice the size saves, and what it costs")
    save(figure, path)


def draw_band(axes: Axes, at: np.ndarray, several: np.ndarray, color, label: str, marker: str = "") -> None:
    """Draw the median of curves, [seeds, points], and the band that they fill."""
    axes.fill_between(at, several.min(0), several.max(0), color=color, alpha=0.18, linewidth=0)
    axes.plot(at, np.median(several, 0), color=color, linewidth=2, label=label, marker=marker)
