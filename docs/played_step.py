"""The README's moving picture played_step.svg, of the page that the demo has written:

    ./run.sh demo && python docs/played_step.py runs/demo/report.html

It shows what the page's player shows: the step on the ranks' own clocks, and the messages between stages.
"""
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 830, 112, 14, 66, 26, 14
SECONDS, HELD = 14, 0.85        # of a round; the share of it in which the step is played, and not held at its end
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.pale { fill: #57606a; }
.name { fill: #fff; text-anchor: middle; font-size: 11px; }
.ahead { opacity: 0.16; }
#still:target ~ :is([clip-path], circle, line) { display: none; }
#still:target ~ .ahead { opacity: 1; }
@media (prefers-reduced-motion: reduce) {
  [clip-path], circle, line { display: none; }
  .ahead { opacity: 1; }
}
"""


def main(page: str) -> None:
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path(page).read_text(), re.DOTALL)[1])
    Path(__file__).with_name("played_step.svg").write_text("\n".join(picture(data)) + "\n")


def picture(data: dict) -> Iterator[str]:
    run, ranks, colors = data["run"], data["player"]["ranks"], data["colors"]["actions"]
    stages = [rank["pipeline"] for rank in data["topology"]]
    tops = [TOP + rank * LANE + stage * GAP for rank, stage in enumerate(stages)]
    bottom = tops[-1] + LANE
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 36}" role="img" aria-label="One '
           f'training step, played: forward and backward passes of four microbatches on eight ranks.">')
    yield f'<style>{STYLE}</style><g id="still"/>'       # played_step.svg#still does not move
    yield f'<rect width="{WIDTH}" height="{bottom + 36}" rx="6" fill="#fff"/>'
    yield f'<text class="title" x="14" y="26">One training step of a GPT on {len(ranks)} ranks</text>'
    yield (f'<text class="pale" x="14" y="46">{run["t"]} shards of every layer × {run["p"]} pipeline stages × '
           f'{run["d"]} replicas; {run["step"]["microbatches of a replica"]} microbatches, in the order 1F1B</text>')
    for rank, (place, top) in enumerate(zip(data["topology"], tops)):
        yield f'<text class="pale" x="14" y="{top + 17}">rank {rank}, stage {place["pipeline"]}</text>'
        yield f'<rect x="{LEFT}" y="{top + 2}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 4}" fill="#f3f4f6"/>'
    boxes = list(actions(data["player"], tops, colors))
    yield f'<g class="ahead">{"".join(boxes)}</g>'
    yield (f'<clipPath id="past"><rect x="{LEFT}" y="0" height="{bottom}" width="0">'
           f'{animate("width", (0, 0), (1, WIDTH - LEFT - RIGHT))}</rect></clipPath>')
    yield f'<g clip-path="url(#past)">{"".join(boxes)}</g>'
    yield from messages(data["player"], tops, colors["communication"])
    yield (f'<line y1="{TOP - 6}" y2="{bottom + 4}" x1="0" x2="0" stroke="#24292f" stroke-width="1.5">'
           f'{animate("x1", (0, LEFT), (1, WIDTH - RIGHT))}{animate("x2", (0, LEFT), (1, WIDTH - RIGHT))}</line>')
    yield from legend(bottom + 24, colors)
    yield "</svg>"


def actions(player: dict, tops: list[int], colors: dict[str, str]) -> Iterator[str]:
    for rank, top in zip(player["ranks"], tops):
        for name, begin, end in rank["actions"]:
            x, width = place_of(begin, player), place_of(end, player) - place_of(begin, player)
            kind, microbatch = re.fullmatch(r"\d+([A-Z])(\d+)", name).groups()
            yield (f'<rect x="{x:.1f}" y="{top + 2}" width="{max(width - 1, 1):.1f}" height="{LANE - 4}" rx="2" '
                   f'fill="{colors[kind]}"/><text class="name" x="{x + width / 2:.1f}" y="{top + 17}">'
                   f'{kind}{microbatch}</text>')


def messages(player: dict, tops: list[int], color: str) -> Iterator[str]:
    """Draw a dot for each message, which goes from its sender to its receiver, slowly enough for an eye."""
    for source, target, _, sent, _, received in player["messages"]:
        begin, end = sent / player["end"], max(received, sent + 0.02 * player["end"]) / player["end"]
        x, y = [place_of(time * player["end"], player) for time in (begin, end)], [tops[source], tops[target]]
        yield (f'<circle r="4.5" fill="{color}" stroke="#fff" opacity="0">'
               + animate("opacity", (0, 0), (begin, 0), (begin, 1), (end, 1), (end, 0), (1, 0))
               + animate("cx", (0, x[0]), (begin, x[0]), (end, x[1]), (1, x[1]))
               + animate("cy", *((time, top + LANE / 2) for time, top in
                                 ((0, y[0]), (begin, y[0]), (end, y[1]), (1, y[1])))) + "</circle>")


def place_of(time: float, player: dict) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / player["end"]


def animate(attribute: str, *points: tuple[float, float]) -> str:
    """Return an animation through (time, value) points, with times from 0 to 1; the last value is held for a while."""
    points = (*points, (1 / HELD, points[-1][1]))
    values = ";".join(f"{value:.4g}" for _, value in points)
    times = ";".join(f"{time * HELD:.4g}" for time, _ in points)
    return (f'<animate attributeName="{attribute}" values="{values}" keyTimes="{times}" dur="{SECONDS}s" '
            'repeatCount="indefinite"/>')


def legend(y: int, colors: dict[str, str]) -> Iterator[str]:
    entries = ((0, colors["F"], "forward of a microbatch"), (170, colors["B"], "its backward"),
               (274, colors["communication"], "a message between stages, slowed down"),
               (560, "#d8dadd", "a rank waits"))
    for x, color, words in entries:
        yield f'<rect x="{LEFT + x}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>'
        yield f'<text x="{LEFT + x + 18}" y="{y}">{words}</text>'


if __name__ == "__main__":
    main(sys.argv[1])
