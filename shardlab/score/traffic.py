"""bytes: let a rank send the fewest bytes in a step.

The model is two blocks between an embedding and a loss: 4 samples of 8 positions, 8 features, 4 heads, 96 tokens. The
ranks are a cube of 2 x 2 x 2, whose directions are u, v and w. A layout for each of the parts embedding, attention, mlp
and loss maps named axes to directions; docs/named_axes.md has the axes, and what a layout derives. A part begins and
ends with x [b s h] as its own layout says, and each of a part's norms has the part's layout.

The score is what a rank sends, forward and backward, each collective as a ring, 2 bytes a number. A rank may hold
40,000 bytes: 16 for each of its weights, 2 for each number that it computes. All are counted while ranks in one process
play the program on exact numbers: the loss and all gradients must be those of a single rank.
"""
from collections.abc import Mapping

import numpy as np

from reference.comm.ring import RING
from reference.errors import UserError
from reference.exact.array import random_array
from reference.named import layers
from reference.named.mesh import Mesh
from reference.named.program import CONSTANT, WEIGHT, Named, Program
from reference.named.types import INVARIANT
from shardlab.score.entry import Entry

UNIT, LEAST = "bytes", 6_448
CUBE = dict(u=2, v=2, w=2)
SIZES = dict(b=4, s=8, z=8, h=8, f=32, g=4, r=1, d=2, n=2, V=96)
LIMIT = 40_000                      # bytes that a rank may hold
OF_WEIGHT, OF_NUMBER = 16, 2        # bytes: with its gradient and Adam's states; and in 16 bits
PARTS = {"embedding": dict(word="V h", position="s h"),
         "attention": dict(weight="h", bias="h", w_q="h g r d", b_q="g r d", w_kv="h n g d", b_kv="n g d",
                           w_out="g r d h", b_out="h"),
         "mlp": dict(weight="h", bias="h", w_in="h f", b_in="f", w_out="f h", b_out="h"),
         "loss": dict(word="V h")}

Layouts = Mapping[str, Mapping[str, str]]


def score(entry: Entry) -> int:
    """Return the bytes that a rank sends. Raises UserError for a layout that is not one, or holds too much."""
    if entry.layout.keys() != PARTS.keys():
        raise UserError(f"The layout is of {', '.join(entry.layout) or 'nothing'}, but must be one for each of "
                        f"{', '.join(PARTS)}: write a table [layout.{next(iter(PARTS))}], even an empty one.")
    ranks, sent, held, found = play(entry.layout, CUBE)
    if held > LIMIT:
        raise UserError(f"A rank holds {held:,} bytes, but may hold {LIMIT:,}. Shard more, or along other axes.")
    alone = play({}, dict.fromkeys(CUBE, 1))[3]
    for name, (x, pieces) in found.items():
        if any((piece != mine).any() for piece, mine in zip(pieces, ranks.deal(alone[name][1][0], x))):
            raise UserError(f"Not proved equal: {name} is another formula than on one rank.")
    return sent


def play(layouts: Layouts, mesh: Mapping[str, int]) -> tuple[Mesh, int, int, dict]:
    """Play the program forward and backward. Return the mesh, the bytes that a rank sends and holds, and by name the
    losses and the gradients of weights, each with the ranks' pieces.
    """
    ranks, (p, losses) = Mesh(mesh), write(layouts, mesh)
    results = {step.result for step in p.steps}
    given = {x: value_of(x) for _, operands, _ in p.steps for x in operands if x not in results}
    arrays, caches = ranks.forward(p, given)
    gradients = ranks.backward(p, caches, {losses: ranks.deal(random_array([SIZES["b"], SIZES["s"]], "dy"), losses)})
    weights = [x for x in given if x.role == WEIGHT]
    kept = {id(xs[0]): xs[0].size for x, xs in arrays.items() if x.role != CONSTANT}     # what is shared counts once
    held = OF_NUMBER * sum(kept.values()) + (OF_WEIGHT - OF_NUMBER) * sum(arrays[x][0].size for x in weights)
    sent = OF_NUMBER * sum(RING[operation](size, mesh[m]) for operation, _, m, size in ranks.messages)
    found = {x.name: (x, gradients[x]) for x in weights} | {"the loss": (losses, arrays[losses])}
    return ranks, round(sent), held, found


def value_of(x: Named):
    """Return numbers for an array from outside: random ones for a weight, and a 1 among zeros for each token."""
    shape = [SIZES[axis] for axis in x.axes]
    if x.role == WEIGHT:
        return random_array(shape, x.name)
    if x.axes == ("b", "s", "V"):
        return np.eye(SIZES["V"])[np.random.default_rng(len(x.name)).integers(SIZES["V"], size=shape[:2])]
    return np.tril(np.ones(shape)) if x.axes == ("s", "z") else np.ones(shape)


# ---- the program ----------------------------------------------------------------------------------------------------


def write(layouts: Layouts, mesh: Mapping[str, int]) -> tuple[Program, Named]:
    """Write the program; return it, and the losses [b s]. Raises UserError for a layout that it cannot have."""
    p = Program(mesh, {}, SIZES)

    def begin(part: str, number: int = 0) -> dict[str, Named]:
        p.layout = Program(mesh, layouts.get(part, {}), SIZES).layout           # which checks it
        return {name: p.array(f"{name} of {part} {number}", of, WEIGHT) for name, of in PARTS[part].items()}

    x = layers.embedding(p, p.array("tokens", "b s V", CONSTANT), begin("embedding"))
    past = p.array("past", "s z", CONSTANT)
    for number in range(2):
        for part in ("attention", "mlp"):
            x, w = p.rest(x), begin(part, number)
            x = move(p, x)
            y = layers.layer_norm(p, x, w)
            x = p.sum(x, layers.attention(p, y, w, past) if part == "attention" else layers.mlp(p, y, w))
    x, w = p.rest(x), begin("loss")
    constants = p.array("targets", "b s V", CONSTANT), p.array("ones", "V", CONSTANT)
    return p, p.rest(layers.loss(p, move(p, x), w["word"], *constants))


def move(p: Program, x: Named) -> Named:
    """Change x from one part's layout to the next one's. An axis that changes its direction is gathered in between."""
    wanted = p.at_rest(x.axes)
    for m, kind in x.types.items():
        if kind != wanted[m] and kind in wanted.values():
            x = p.change(x, m, INVARIANT)
    return p.rest(x)
