"""The README's moving picture played_step.svg, of the page that the demo has written:

    ./run.sh demo && python docs/played_step.py runs/demo/report.html

It shows what the page's player shows: the step on the ranks' own clocks, and the messages between stages. In a dark
scheme it is dark; whoever asks for less motion sees the whole step, at its end.
"""
import json
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 830, 128, 14, 106, 26, 26
SECONDS, HELD = 14, 0.85        # of a round; the share of it in which the step is played, and not held at its end
FLIGHT, TRACE = 0.03, 0.12      # of the step: how long a message is seen to travel, and its path after it
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.pale { fill: #57606a; }
text.name { fill: #fff; text-anchor: middle; font-size: 11px; }
.page { fill: #fff; }
.lane { fill: #e6e8eb; }
.now { stroke: #24292f; stroke-width: 2; }
.ahead { opacity: 0.2; }
.names .name { fill: #57606a; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .pale { fill: #9da7b1; }
  .page { fill: #131416; }
  .lane { fill: #2b3036; }
  .now { stroke: #e6edf3; }
  .ahead { opacity: 0.35; }
  .names .name { fill: #9da7b1; }
}
#still:target ~ .moving { display: none; }
#still:target ~ .ahead { opacity: 1; }
#still:target ~ .names .name { fill: #fff; }
@media (prefers-reduced-motion: reduce) {
  .moving { display: none; }
  .ahead { opacity: 1; }
  .names .name { fill: #fff; }
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
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 12}" role="img" aria-label="One '
           f'training step, played: forward and backward passes of four microbatches on eight ranks.">')
    yield f'<style>{STYLE}</style><g id="still"/>'       # played_step.svg#still does not move
    yield f'<rect class="page" width="{WIDTH}" height="{bottom + 12}" rx="6"/>'
    yield f'<text class="title" x="14" y="26">One training step of a GPT on {len(ranks)} ranks</text>'
    yield (f'<text class="pale" x="14" y="46">{run["t"]} shards of every layer × {run["p"]} pipeline stages × '
           f'{run["d"]} replicas; {run["step"]["microbatches of a replica"]} microbatches, in the order 1F1B</text>')
    yield from legend(70, colors)
    titles = []
    for rank, (place, top) in enumerate(zip(data["topology"], tops)):
        if stages.index(place["pipeline"]) == rank:
            layers = " and ".join(map(str, chain(*place["stages"].values())))
            titles.append(f'<text x="{LEFT}" y="{top - 4}">stage {place["pipeline"]} of the pipeline: layers '
                          f'{layers}</text>')
        yield f'<text class="pale" x="14" y="{top + 17}">rank {rank}, replica {place["data"]}</text>'
        yield f'<rect class="lane" x="{LEFT}" y="{top + 2}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 4}"/>'
    boxes, names, passed = zip(*actions(data["player"], tops, colors))
    yield f'<g class="ahead">{"".join(boxes)}</g>'
    yield (f'<clipPath id="past"><rect x="{LEFT}" y="0" height="{bottom}" width="0">'
           f'{animate("width", (0, 0), (1, WIDTH - LEFT - RIGHT))}</rect></clipPath>')
    yield f'<g class="moving"><g clip-path="url(#past)">{"".join(boxes)}</g>'
    yield (f'<line class="now" y1="{TOP - 4}" y2="{bottom + 4}" x1="0" x2="0">'
           f'{animate("x1", (0, LEFT), (1, WIDTH - RIGHT))}{animate("x2", (0, LEFT), (1, WIDTH - RIGHT))}</line>')
    yield from messages(data["player"], tops, colors["communication"])
    yield "</g>"
    yield f'<g class="names">{"".join(names)}</g><g class="moving">{"".join(passed)}</g>'    # nothing cuts the letters
    yield f'{"".join(titles)}</svg>'


def actions(player: dict, tops: list[int], colors: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the box of each action, its name, and its name when the line has passed it."""
    for rank, top in zip(player["ranks"], tops):
        for name, begin, end in rank["actions"]:
            x, width = place_of(begin, player), place_of(end, player) - place_of(begin, player)
            kind, microbatch = re.fullmatch(r"\d+([A-Z])(\d+)", name).groups()
            box = (f'<rect x="{x:.1f}" y="{top + 2}" width="{max(width - 1, 1):.1f}" height="{LANE - 4}" rx="2" '
                   f'fill="{colors[kind]}"/>')
            text = f'<text class="name" x="{x + width / 2:.1f}" y="{top + 17}">{kind}{microbatch}'
            half = (begin + end) / 2 / player["end"]
            shown = animate("opacity", (0, 0), (half, 0), (half, 1), (1, 1))
            yield box, f"{text}</text>", f"{text}{shown}</text>"


def messages(player: dict, tops: list[int], color: str) -> Iterator[str]:
    """Draw a dot for each message, which goes to its receiver slowly enough for an eye, and its path."""
    for source, target, _, sent, _, received in player["messages"]:
        begin, end = sent / player["end"], max(received / player["end"], min(sent / player["end"] + FLIGHT, 1))
        x, y = [place_of(time * player["end"], player) for time in (begin, end)], [tops[source], tops[target]]
        gone = min(end + TRACE, 1)
        yield (f'<line x1="{x[0]:.1f}" y1="{y[0] + LANE / 2}" x2="{x[1]:.1f}" y2="{y[1] + LANE / 2}" stroke="{color}" '
               f'stroke-width="2" opacity="0">'
               + animate("opacity", (0, 0), (begin, 0), (begin, 0.8), (end, 0.8), (gone, 0), (1, 0)) + "</line>")
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
    entries = ((0, f'fill="{colors["F"]}"', "F", "forward of a microbatch"),
               (190, f'fill="{colors["B"]}"', "B", "its backward"), (505, 'class="lane"', "", "the rank waits"))
    for x, look, name, words in entries:
        yield (f'<rect x="{14 + x}" y="{y - 13}" width="18" height="18" rx="2" {look}/>'
               f'<text class="name" x="{23 + x}" y="{y}">{name}</text><text x="{38 + x}" y="{y}">{words}</text>')
    yield (f'<circle r="4.5" cx="331" cy="{y - 4}" fill="{colors["communication"]}" stroke="#fff"/>'
           f'<text x="342" y="{y}">a message, slowed down</text>')


if __name__ == "__main__":
    main(sys.argv[1])
