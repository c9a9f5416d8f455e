"""Pictures of dropout's masks: kept elements have the colour of the rank that drew them, dropped ones are white."""
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb

from shardlab.notebook.pictures.shards import color_of
from shardlab.report.drawing import Picture, described, draw_box, hide_frame, name_rows, paint, several_panels

SIDE = 0.95     # inches: the longer side of a mask


class Drawn(NamedTuple):
    """A mask, and the rank that drew it."""

    title: str
    keep: np.ndarray     # bool [rows, columns]
    rank: int


def draw_masks(rows: Mapping[str, Sequence[Drawn]]) -> Picture:
    """Draw a line of masks for each name."""
    columns = max(map(len, rows.values()))
    figure, panels = several_panels(SIDE * 1.2 * columns + 1.5, (SIDE + 0.35) * len(rows), len(rows), columns)
    for first, (name, masks) in zip(range(0, len(panels), columns), rows.items()):
        for axes, mask in zip(panels[first:], masks):
            paint(axes, np.where(mask.keep[..., None], to_rgb(color_of(mask.rank)), 1.0), mask.title)
        for axes in panels[first + len(masks):first + columns]:
            axes.axis("off")
        panels[first].set_ylabel(name, fontsize=9, rotation=0, ha="right", va="center", labelpad=12)
    return described(figure, "Masks of dropout, in the colour of the rank that drew them. ", (
        f"{name}: {len({mask.keep.tobytes() for mask in masks})} different masks on {len(masks)} ranks"
        for name, masks in rows.items()))


def draw_mask_parts(masks: Mapping[str, Sequence[np.ndarray]], title: str = "") -> Picture:
    """Draw panels of masks, in each the ranks' parts [heads, elements] below one another; dropped is white."""
    wide = max(part.shape[1] for parts in masks.values() for part in parts)
    high = max(sum(len(part) for part in parts) for parts in masks.values())
    figure, panels = several_panels(10, 0.75 + 9.6 / len(masks) * high / wide, 1, len(masks))
    for axes, (name, parts) in zip(panels, masks.items()):
        top = 0
        for rank, part in enumerate(parts):
            for head, i in np.argwhere(part):
                draw_box(axes, i, top + head, 1, 1, color_of(rank), edgecolor="white", linewidth=0.4)
            top += len(part)
            axes.axhline(top, color="#505050", linewidth=0.8)
        name_rows(axes, range(top))
        axes.set(xlim=(0, wide), ylim=(high, 0), aspect="equal", xticks=[])
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_ylabel("head", fontsize=8)
        hide_frame(axes, 8 if len(masks) < 3 else 6.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return described(figure, f"{title or 'Masks of dropout'}. Elements kept, on rank 0, 1, ...: ", (
        f"{name}: {' and '.join(f'{int(part.sum())} of {part.size}' for part in parts)}"
        for name, parts in masks.items()))
