"""Pictures of the flat buffer under a rank's tensors (reference/parallel/layout.py): the tensors in it, and the owners
of its parts.
"""
from math import prod
from typing import Any

from reference.parallel.layout import Bucket, Layout, Segment, unit_of
from shardlab.notebook.pictures.shards import WHOLE, color_of, rank_colors
from shardlab.report.drawing import (SMALL, Picture, described, draw_box, draw_legend, hide_frame, name_rows, one_panel,
                                     write)

TINTS = (("#B4C7DE", "#D9E4F0"), ("#DFCCAC", "#F0E6D4"))     # units take turns, and in each of them its tensors
HATCHED: dict[str, Any] = {"edgecolor": "#909090", "hatch": "/////", "linewidth": 0}      # padding
WIDTH, LETTER = 8.2, 0.075      # inches: of the widest bucket, and of a small letter


def draw_layout(layout: Layout, title: str) -> Picture:
    """Draw a row for each bucket: its tensors side by side, and below them their owners: equal parts, without regard to
    tensors. A buffer that is not sharded belongs to all ranks.
    """
    buckets, parts = layout.buckets, layout.parts
    widest = max(bucket.size for bucket in buckets)
    figure, axes = one_panel(WIDTH + 1.2, 0.95 * len(buckets) + 1.0, xlim=(0, widest))
    words, entries = [], dict[str, Any](rank_colors(range(parts) if parts > 1 else ()))
    for row, bucket in enumerate(buckets):
        inside = [segment for segment in layout.segments if layout.bucket_of[unit_of(segment.name)] is bucket]
        draw_tensors(axes, inside, bucket, row, widest / WIDTH)
        padded = bucket.stop - max(segment.slice.stop for segment in inside)
        words.append(f"bucket {row} has {bucket.size} elements, {padded} of them padding")
        if padded:
            draw_box(axes, bucket.size - padded, row + 0.24, padded, 0.33, "white", **HATCHED)
            entries["padding"] = {"facecolor": "white", **HATCHED}
        for rank in range(parts):
            own = layout.owned_piece(bucket, rank).in_buffer
            draw_box(axes, own.start - bucket.start, row + 0.6, own.stop - own.start, 0.28,
                     color_of(rank) if parts > 1 else WHOLE, edgecolor="white", linewidth=1)
    name_rows(axes, [f"bucket {row}" for row in range(len(buckets))], 0.46)
    axes.set_xlabel("elements of a bucket", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    hide_frame(axes, below=True)
    draw_legend(figure, entries)
    held = (f"in {parts} equal parts, without regard to tensors, one for each rank" if parts > 1 else
            "held by every rank")
    return described(figure, f"{title}: tensors side by side in {len(buckets)} buckets, each of which is {held}. ",
                     words)


def draw_tensors(axes, inside: list[Segment], bucket: Bucket, row: int, elements_an_inch: float) -> None:
    """Draw tensors, with names where there is room, and above them their unit."""
    def fits(name: str, size: float) -> bool:
        return LETTER * len(name) * elements_an_inch < size

    for i, segment in enumerate(inside):
        unit, size = unit_of(segment.name), prod(segment.shape)
        name = segment.name.removeprefix(f"{unit}.")
        fitting = [short for short in (name, name.split(".")[-1]) if fits(short, size) and name != unit]
        tint = TINTS[bucket.units.index(unit) % 2][i % 2]
        draw_box(axes, segment.offset - bucket.start, row + 0.24, size, 0.33, tint, fitting[0] if fitting else "", 7)
    for unit in bucket.units:
        mine = [segment for segment in inside if unit_of(segment.name) == unit]
        start, stop = mine[0].offset - bucket.start, mine[-1].slice.stop - bucket.start
        if fits(unit, stop - start):
            write(axes, (start + stop) / 2, row + 0.2, unit, "above", SMALL)
        elif unit == bucket.units[-1] and fits(unit, WIDTH * elements_an_inch - start):
            write(axes, start, row + 0.2, unit, "above", SMALL, ha="left")
