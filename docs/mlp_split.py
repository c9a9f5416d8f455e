"""The README's picture mlp_split.svg: `python docs/mlp_split.py`."""
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "shardlab", "font.family": "sans-serif"})
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

WHOLE, RANKS = "#e4e4e4", ("#8ab6e8", "#f5b277")      # on all ranks; on rank 0, on rank 1
FADED = {"#8ab6e8": "#e2eefb", "#f5b277": "#fdeede"}


def matrix(axes, x, y, width, height, color, name, shape):
    """Draw a matrix with its lower left corner at (x, y); the name inside, the shape below."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444", linewidth=1))
    axes.text(x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=13)
    axes.text(x + width / 2, y - 0.1, shape, ha="center", va="top", fontsize=8.5, color="#555555")


def arrow(axes, start, end):
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="#444444",
                                   shrinkA=0, shrinkB=0))


def operator(axes, x, name, forward, backward):
    """Draw f or g: a bar across both ranks, with its operation in each direction."""
    axes.add_patch(FancyBboxPatch((x - 0.17, -2.55), 0.34, 5.1, boxstyle="round,pad=0.02,rounding_size=0.15",
                                  facecolor="#444444", edgecolor="none"))
    axes.text(x, 0, name, ha="center", va="center", fontsize=17, color="white", style="italic")
    axes.text(x, 2.75, f"forward: {forward}", ha="center", va="bottom", fontsize=9.5)
    axes.text(x, -2.75, f"backward: {backward}", ha="center", va="top", fontsize=9.5)


def lane(axes, rank, y):
    """Draw the computation of one rank between f and g."""
    color = RANKS[rank]
    axes.add_patch(FancyBboxPatch((2.75, y - 1.12), 9.1, 2.24, boxstyle="round,pad=0.02,rounding_size=0.12",
                                  facecolor=FADED[color], edgecolor="none"))
    axes.text(2.87, y + 1.0, f"rank {rank}", fontsize=9.5, va="top", color="#555555")
    arrow(axes, (2.57, y), (3.25, y))
    matrix(axes, 3.3, y - 0.5, 0.75, 1.0, WHOLE, "$X$", "$b\\,s \\times h$")
    axes.text(4.27, y, "·", ha="center", va="center", fontsize=18)
    matrix(axes, 4.5, y - 0.4, 1.3, 0.8, color, f"$A_{rank}$", "$h \\times 4h/2$,\nits columns")
    arrow(axes, (5.9, y), (7.0, y))
    axes.text(6.45, y + 0.12, "GeLU", ha="center", va="bottom", fontsize=10.5)
    matrix(axes, 7.05, y - 0.5, 1.3, 1.0, color, f"$Y_{rank}$", "$b\\,s \\times 4h/2$")
    axes.text(8.57, y, "·", ha="center", va="center", fontsize=18)
    matrix(axes, 8.8, y - 0.5, 0.8, 1.0, color, f"$B_{rank}$", "$4h/2 \\times h$,\nits rows")
    axes.text(9.87, y, "=", ha="center", va="center", fontsize=15)
    matrix(axes, 10.15, y - 0.5, 0.75, 1.0, color, f"$Z_{rank}$", "a partial\nsum")
    arrow(axes, (11.0, y), (12.05, y))


def whole_matrices(axes, y):
    """Draw A and B before they are split, in the colours of the ranks that hold their shards."""
    for rank, color in enumerate(RANKS):
        matrix(axes, 3.95 + 1.3 * rank, y - 0.4, 1.3, 0.8, color, f"$A_{rank}$", "")
        matrix(axes, 8.8, y + 0.05 - 0.65 * rank, 0.8, 0.65, color, f"$B_{rank}$", "")
    axes.text(3.75, y, "$A$ =", ha="right", va="center", fontsize=13)
    axes.text(8.6, y, "$B$ =", ha="right", va="center", fontsize=13)
    axes.text(5.25, y - 0.55, "split by columns", ha="center", va="top", fontsize=9.5, color="#555555")
    axes.text(9.2, y - 0.75, "split by rows", ha="center", va="top", fontsize=9.5, color="#555555")


def main():
    figure, axes = pyplot.subplots(figsize=(11.5, 6))
    arrow(axes, (1.25, 0), (2.2, 0))
    matrix(axes, 0.4, -0.5, 0.75, 1.0, WHOLE, "$X$", "$b\\,s \\times h$, on all ranks")
    operator(axes, 2.4, "f", "nothing", "all-reduce")
    lane(axes, 0, 1.3)
    lane(axes, 1, -1.3)
    operator(axes, 12.2, "g", "all-reduce", "nothing")
    arrow(axes, (12.4, 0), (13.3, 0))
    matrix(axes, 13.35, -0.5, 0.75, 1.0, WHOLE, "$Z$", "$Z_0 + Z_1$, on all ranks")
    whole_matrices(axes, 4.3)
    axes.set(xlim=(-0.4, 15), ylim=(-3.2, 5.1), aspect="equal")
    axes.axis("off")
    figure.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
