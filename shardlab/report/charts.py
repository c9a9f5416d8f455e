"""The common style of charts: axes, and the colours of all pictures. It does not need matplotlib itself."""

GRID = "#E4E4E4"

# Near the colours of Okabe and Ito: people who are blind to red or green can tell them apart, and their pale shades.
COLORS = {"F": "#0072B2", "B": "#008F6B", "I": "#EE7733", "W": "#F0E442", "communication": "#BB2200",
          "other": "#404040"}
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient",
         "communication": "communication", "other": "other"}
MEMORY = {"parameters": "#0072B2", "gradients": "#EE7733", "optimizer": "#F0C842", "activations": "#008F6B",
          "computed again": "#7CCBB4", "whole for a while": "#CC79A7", "offloaded": "#A0A0A0"}
AXES = {"tensor": "#0072B2", "pipeline": "#EE7733", "data": "#008F6B", "embedding": "#CC79A7", "model": "#F0C842",
        "world": "#A0A0A0", "context": "#56B4E9", "replicas": "#44AA99", "copies": "#332288", "expert": "#AA4422",
        "expert replicas": "#999933", "holders": "#DDCC77", "shards": "#F4A582",
        "instances": "#661100"}      # the groups of ranks


def finish(axes, xlabel: str, title: str, grid: str, ylabel: str = "") -> None:
    """Label the axes, and leave only a pale grid and the lines at the left and below. `grid`: 'x', 'y' or 'both'."""
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel or axes.get_ylabel(), fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    axes.tick_params(labelsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
