"""Pictures of the flat buffer under a rank's tensors (reference/parallel/layout.py): the tensors in it, and the owners
of its parts.
"""
from math import prod
from typing import Any

from reference.parallel.layout import Bucket, Layout, unit_of
from shardlab.notebook.pictures.shards import WHOLE, color_of, rank_colors
from shardlab.report.drawing import Picture, draw_box, draw_legend, hide_frame, name_rows, one_panel

TINTS = (("#B4C7DE", "#D9E4F0"), ("#DFCCAC", "#F0E6D4"))     # units take turns, and in each of them its tensors
HATCHED: dict[str, Any] = {"edgecolor": "#909090", "hatch": "/////", "linewidth": 0}      # padding
WIDTH, LETTER = 8.2, 0.075      # inches: of the widest bucket, and of a small letter


def draw_layout(layout: Layout, title: str = "") -> Picture:
    """Draw a row for each bucket: its tensors side by side, and below them their owners."""
    buckets = layout.buckets
    widest = max(bucket.size for bucket in buckets)
    figure, axes = one_panel(WIDTH + 1.2, 0.95 * len(buckets) + 1.0, xlim=(0, widest))
    for row, bucket in enumerate(buckets):
        draw_tensors(axes, layout, bucket, row, widest / WIDTH)
        draw_owned(axes, layout, bucket, row)
    name_rows(axes, [f"bucket {row}" for row in range(len(buckets))], 0.46)
    axes.set_xlabel("elements of a bucket", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    hide_frame(axes, below=True)
    entries: dict[str, Any] = {**rank_colors(range(layout.parts) if layout.parts > 1 else ())}
    if any(padding_of(layout, bucket) for bucket in buckets):
        entries["padding"] = {"facecolor": "white", **HATCHED}
    draw_legend(figure, entries)
    said = (f"bucket {row} has {bucket.size} elements, {padding_of(layout, bucket)} of them padding"
            for row, bucket in enumerate(buckets))
    owned = f"in {layout.parts} equal parts, without regard to tensors, one for each rank"
    figure.set_label(f"{title}: tensors side by side in {len(buckets)} buckets, each of which is "
                     f"{owned if layout.parts > 1 else 'held by every rank'}. {'; '.join(said)}.")
    return figure


def draw_tensors(axes, layout: Layout, bucket: Bucket, row: int, elements_an_inch: float) -> None:
    """Draw tensors, with names where there is room, and above them their unit."""
    inside = [segment for segment in layout.segments if layout.bucket_of[unit_of(segment.name)] is bucket]
    for i, segment in enumerate(inside):
        unit, size = unit_of(segment.name), prod(segment.shape)
        tint = TINTS[bucket.units.index(unit) % 2][i % 2]
        name = segment.name.removeprefix(f"{unit}.")
        fitting = [one for one in (name, name.split(".")[-1]) if LETTER * len(one) < size / elements_an_inch]
        draw_box(axes, segment.offset - bucket.start, row + 0.24, size, 0.33, tint,
                 fitting[0] if fitting and name != unit else "", 7)
    for unit in bucket.units:
        mine = [segment for segment in inside if unit_of(segment.name) == unit]
        start, stop = mine[0].offset - bucket.start, mine[-1].slice.stop - bucket.start
        if LETTER * len(unit) < (stop - start) / elements_an_inch:
            axes.text((start + stop) / 2, row + 0.2, unit, ha="center", va="bottom", fontsize=8)
        elif unit == bucket.units[-1] and start + LETTER * len(unit) * elements_an_inch < WIDTH * elements_an_inch:
            axes.text(start, row + 0.2, unit, ha="left", va="bottom", fontsize=8)
    if padded := padding_of(layout, bucket):
        draw_box(axes, bucket.size - padded, row + 0.24, padded, 0.33, "white", **HATCHED)


def draw_owned(axes, layout: Layout, bucket: Bucket, row: int) -> None:
    """Draw equal parts, without regard to tensors. A buffer that is not sharded belongs to all ranks."""
    for rank in range(layout.parts):
        own = layout.owned_piece(bucket, rank).in_buffer
        color = color_of(rank) if layout.parts > 1 else WHOLE
        draw_box(axes, own.start - bucket.start, row + 0.6, own.stop - own.start, 0.28, color, edgecolor="white",
                 linewidth=1)


def padding_of(layout: Layout, bucket: Bucket) -> int:
    """Return the elements at a bucket's end that belong to no tensor."""
    return bucket.stop - max(segment.slice.stop for segment in layout.segments
                             if layout.bucket_of[unit_of(segment.name)] is bucket)
