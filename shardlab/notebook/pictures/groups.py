"""Pictures of servers' links, and of the groups that ranks form: which messages leave a server."""
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import FancyBboxPatch

from reference.config import ParallelConfig
from reference.costs.hardware import Link
from shardlab.notebook.pictures.shards import OWNERS, WHOLE
from shardlab.predict.group import members_by_color, survey
from shardlab.report.drawing import Picture, described, draw_box, whole_axes, write

KINDS = ("tensor", "data", "pipeline")      # in the order in which ranks are numbered
SERVER, ALONE = "#EDEDED", "#A8A8A8"        # a server; a group of one rank, which sends nothing
ROW = 1.9                                   # the height of a row, where a rank is 1 wide
POINT = 30e9                                # bytes a second: a link that is one point wide


def groups_of(c: ParallelConfig) -> dict[str, list[list[int]]]:
    """Return the groups of ranks of each kind, as `connect` in mpi_impl/comm/topology.py forms them."""
    colors = survey(c)
    return {kind: list(members_by_color(colors[kind]).values()) for kind in KINDS}


def crosses(group: Sequence[int], server: int) -> bool:
    """Report whether a group's ranks are in more than one server of this many ranks."""
    return len({rank // server for rank in group}) > 1


def draw_groups(c: ParallelConfig, server: int, title: str) -> Picture:
    """Draw a row for each kind of group, a colour for each group. Arcs join neighbours, dashed if they leave a server.
    """
    n, below = c.world_size, ROW * len(KINDS)
    figure = Picture((1.7 + 0.78 * n, 0.3 + 0.78 * below))
    axes = figure.add_axes((0, 0, 1, 1), aspect="equal", xlim=(-1.9, n + 0.2), ylim=(below + 0.15, -0.35))
    axes.axis("off")
    write(axes, -1.8, -0.1, title, "right", 11)
    for first in range(0, n, server):
        width = min(server, n - first)
        axes.add_patch(FancyBboxPatch((first + 0.08, 0.2), width - 0.16, below - 0.25, facecolor=SERVER,
                                      edgecolor="none", boxstyle="round,pad=0,rounding_size=0.15"))
        write(axes, first + width / 2, below + 0.02, f"server {first // server}", size=8.5, color="#505050")
    words = []
    for row, (kind, groups) in enumerate(groups_of(c).items()):
        bottom = ROW * (row + 1) - 0.3      # of the boxes
        write(axes, -1.8, bottom - 0.35, f"{kind}\n{len(groups)} groups of {len(groups[0])}", "right")
        for i, group in enumerate(groups):
            draw_group(axes, group, bottom, OWNERS[i % len(OWNERS)] if len(group) > 1 else ALONE, server)
        words.append(f"{kind} groups {', '.join('-'.join(map(str, group)) for group in groups)}, "
                     f"{sum(crosses(group, server) for group in groups)} of which leave a server")
    return described(figure, f"{title}, on servers of {server} ranks: ", words)


def draw_group(axes, ranks: Sequence[int], bottom: float, color: str, server: int) -> None:
    """Draw boxes with the ranks' numbers, and arcs above them."""
    for rank in ranks:
        draw_box(axes, rank + 0.16, bottom - 0.68, 0.68, 0.68, color, str(rank), 10, zorder=3)
    angle = np.linspace(0, np.pi, 40)
    for one, other in zip(ranks, ranks[1:]):
        middle, half = (one + other + 1) / 2, (other - one) / 2
        height = min(0.28 + 0.14 * half, 0.85)
        axes.plot(middle - half * np.cos(angle), bottom - 0.68 - height * np.sin(angle), color=color, linewidth=2,
                  linestyle="--" if crosses((one, other), server) else "-", zorder=2)


def draw_servers(servers: int, size: int, inside: Link, adapter: Link) -> Picture:
    """Draw servers of `size` GPUs: the switch of each above, the network below. A line's width is its bandwidth."""
    step = size + 1      # from a server to the next, in GPUs of half an inch
    fast, slow = (f"{link.bandwidth / 1e9:g} GB/s" for link in (inside, adapter))
    figure, axes = whole_axes(servers * step / 2 - 0.3, 2.4)
    for server in range(servers):
        for x in (np.arange(size) + server * step) / 2 + 0.35:
            axes.plot((x, x), (0.45, 1.2), color=OWNERS[0], linewidth=inside.bandwidth / POINT)
            axes.plot((x, x), (1.2, 1.95), color=OWNERS[1], linewidth=adapter.bandwidth / POINT)
            draw_box(axes, x - 0.18, 1.02, 0.36, 0.36, WHOLE, "GPU", 7, zorder=3)
        draw_box(axes, server * step / 2 + 0.1, 0.1, size / 2, 0.35, OWNERS[0],
                 f"switch of server {server}: {fast} for each GPU, each way")
    draw_box(axes, 0.1, 1.95, servers * step / 2 - 0.5, 0.35, OWNERS[1],
             f"network: {slow} for each GPU, each way")
    return described(figure, f"{servers} servers of {size} GPUs. Each GPU has {fast} to the switch of its server, and "
                     f"{slow} to the network that joins the servers")
