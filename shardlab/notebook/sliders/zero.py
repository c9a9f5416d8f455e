"""The player of ZeRO: a training step of the textbook's ranks, event by event, at each stage.

No frame is drawn by hand. The textbook (reference/parallel/zero.py) trains a small GPT for a step, with one sample on
each of four ranks. After every event each element that a rank holds is compared with that of one process.
"""
from dataclasses import replace
from weakref import ref

import numpy as np

from reference.config import ModelConfig
from reference.parallel.model_states import model_states
from reference.parallel.zero import ZeroTrainer
from reference.params import leaves
from shardlab.demos.tiny_gpt import OPTIMIZER, SEED, tiny_gpt
from shardlab.notebook.sliders.page import Sliders
from shardlab.report.charts import MEMORY

RANKS = 4
MODEL = replace(tiny_gpt(3), vocab_size=4, position_embedding_type="rope")    # RANKS divides all units of the model
SAMPLES = (np.arange(RANKS)[:, None] + np.arange(7)) % 4                      # all tokens are in each of them
BYTES = model_states(1, 1)                                                    # of an element: 2, 2 and K = 12

# An element is not held, or as before the step, or as after it, or a gradient of the rank's own sample.
ABSENT, BEFORE, AFTER, OWN = range(4)

PICTURE = """<svg viewBox="0 0 1000 300" width="100%" style="min-width:36em" role="img" aria-label="what ranks hold"
font-family="system-ui,sans-serif" font-size="14"><style>.zero0{{fill:#F0F0F0}} .zero1{{opacity:.35}}
.zero3{{fill:url(#own)}}</style><pattern id="own" width="5" height="5" patternUnits="userSpaceOnUse"><path d="M0 5L5 0"
stroke="{gradients}" stroke-width="2"/></pattern>{drawn}<text x="325" y="292">pale: as before the step; full: as
after it; hatched: of the rank's own sample; grey: not held</text></svg>"""


def play_zero(stage: int = 3) -> Sliders:
    """Show a step of ZeRO as a player, at any stage. Where no script may run, it is a list of the events."""
    steps = [[(f"{event}. A rank holds {held:,.0f} bytes and has sent {sent:,.0f}.", cells)
              for event, held, sent, cells in play_step(each)] for each in range(4)]
    words = [f"<br>Stage {each}: {said}" for each, step in enumerate(steps) for said, _ in step]
    return Sliders("zero", {"stage": range(4), "frame": range(max(map(len, steps)))}, {"stage": stage},
                   lambda: {"steps": steps, "picture": draw_ranks()}, "\n".join(words))


def draw_ranks() -> str:
    """Return SVG: a column for each rank, a row for each unit, and a cell for each quarter of a unit and kind of array,
    as wide as its elements have bytes. A digit of a frame takes the place of the @ of each cell.
    """
    units = list(ZeroPlayer(0, MODEL).layout.bucket_of)       # last layer first
    drawn = [f'<text y="{245 - 40 * row}">{unit}</text>' for row, unit in enumerate(units)]
    for rank in range(RANKS):
        left = 140 + 215 * rank
        drawn.append(f'<text x="{left}" y="14">rank {rank}</text>')
        for kind, size in BYTES._asdict().items():
            drawn += [f'<rect class="zero@" x="{left}" y="{224 - 40 * (cell // RANKS) + 8.5 * (cell % RANKS)}" '
                      f'width="{12 * size}" height="8" fill="{MEMORY[kind]}"/>' for cell in range(RANKS * len(units))]
            left += 12 * size + 2
    drawn += [f'<text x="{115 * i}" y="292"><tspan fill="{MEMORY[kind]}">■</tspan> {kind}</text>'
              for i, kind in enumerate(BYTES._fields)]
    return PICTURE.format(drawn="".join(drawn), **MEMORY)


def play_step(stage: int, model: ModelConfig = MODEL) -> list[tuple[str, float, float, str]]:
    """Return the frames of a step of one microbatch: an event; the bytes that a rank holds then, and has sent in rings;
    and a digit for each rank, kind of array, unit of the model and quarter of it, one of the four above. Raises
    UserError unless the stage is 0 to 3.
    """
    player = ZeroPlayer(stage, model)
    player.show("Before the step")
    player.step(SAMPLES[:, :-1], SAMPLES[:, 1:], 1)
    return player.frames


class ZeroPlayer(ZeroTrainer):
    """The textbook's trainer, which notes a frame after each event of its first step. Every unit is a bucket."""

    def __init__(self, stage: int, model: ModelConfig):
        super().__init__(model, OPTIMIZER, SEED, "float64", RANKS, stage, bucket_size=1)
        one = ZeroTrainer(model, OPTIMIZER, SEED, "float64", 1, 0, bucket_size=1)
        self.before, self.after = [flat.copy() for flat in one.ranks[0][:3]], one.ranks[0]
        one.step(SAMPLES[:, :-1], SAMPLES[:, 1:], RANKS)
        self.frames: list = []
        self.arrived = ""               # the unit that the backward has come to
        self.materialized: dict = {}    # weak references to gathered parameters, by unit

    def whole(self, unit):
        found = super().whole(unit)
        if found[0] is not None:
            if self.stage == 3:
                self.materialized[unit] = ref(next(leaves(found[0]))[1].base)
                self.show(f"Gather the parameters of {unit}")
            if not self.arrived:
                self.show(f"Forward of {unit}")
        return found

    def backward(self, *arguments):
        self.arrived = "loss"
        for self.arrived, trees in super().backward(*arguments):
            yield self.arrived, trees
            self.show_kept()            # when the next unit is asked for, this one's gradients have been kept

    def keep(self, gradients):
        super().keep(gradients)
        self.show_kept()                # the last one's

    def show_kept(self):
        done = "Reduce-scatter the gradients" if self.stage > 1 else "Backward"
        self.show(f"{done} of {self.arrived}")

    def reduce_scatter(self, flats):
        if self.stage > 1:
            self.show(f"Backward of {self.arrived}", {self.arrived: flats})
        return super().reduce_scatter(flats)

    def reduce(self):
        super().reduce()
        self.show("Reduce-scatter the gradients" if self.stage else "All-reduce the gradients")

    def update(self):
        norm = super().update()
        self.show("Update the parameters whose optimizer states a rank holds")
        return norm

    def publish(self):
        super().publish()
        self.show("All-gather the parameters")

    def show(self, event: str, gradients=()) -> None:
        """Note an event, and what the ranks hold after it. `gradients` are the ranks' whole ones, by unit."""
        whole = {unit: [flat] * RANKS for unit, one in self.materialized.items() if (flat := one()) is not None}
        states = [self.states(rank, kind, dict(more)) for rank in range(RANKS)
                  for kind, more in enumerate((whole, gradients, ()))]
        held = sum(size * np.count_nonzero(state) for size, state in zip(BYTES, states))
        cells = [state[bucket.slice].reshape(RANKS, -1).max(1) for state in states for bucket in self.layout.buckets]
        self.frames.append((event, held, BYTES.gradients * self.elements_sent(), "".join(map(str, np.ravel(cells)))))

    def states(self, rank: int, kind: int, more: dict) -> np.ndarray:
        """Return the state [size] of each parameter (kind 0), gradient (1) or moment (2) on a rank, which holds `more`
        for a while.
        """
        flat, layout = self.ranks[rank][:3][kind], self.layout
        found = flat if len(flat) == layout.size else np.full(layout.size, np.nan)
        for piece in layout.pieces(rank) if found is not flat else ():
            found[piece.in_buffer] = flat[piece.in_shard]
        for unit, flats in more.items():
            found[layout.bucket_of[unit].slice] = flats[rank]
        same = np.isclose(found, self.after[kind], rtol=1e-9, atol=1e-14)
        return np.select([np.isnan(found), found == self.before[kind], same], [ABSENT, BEFORE, AFTER], OWN)
