"""A mesh of ranks, with an array in a list for each, and how a program is played on it, forward and backward."""
from collections.abc import Iterable, Mapping

import numpy as np

from reference.comm import collectives
from reference.errors import UserError
from reference.named.program import CONSTANT, Change, Largest, Named, Program
from reference.named.types import INVARIANT, change_of, dual


class Mesh:
    """All ranks of a mesh in one process; mpi_impl/comm/mesh.py has one of them.

    `messages` tells of each collective: the operation, the array's name, the axis of the mesh, and the elements, as the
    machine's ledger counts them: those of the whole array.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes: Mapping[str, int] = sizes
        self.messages: list[tuple[str, str, str, int]] = []
        self.ranks = [dict(zip(sizes, index)) for index in np.ndindex(*sizes.values())]

    def collective(self, operation, xs, m, *arguments):
        """Do a collective of reference/comm/collectives.py among the ranks that differ only in their place on m."""
        groups, ys = np.arange(len(xs)).reshape(*self.sizes.values()), list(xs)
        for group in np.moveaxis(groups, list(self.sizes).index(m), -1).reshape(-1, self.sizes[m]):
            for i, y in zip(group, getattr(collectives, operation)([xs[i] for i in group], *arguments)):
                ys[i] = y
        return ys

    def send(self, operation, elements, xs, name, m, *arguments):
        """Do a collective, and tell of it."""
        self.messages.append((operation, name, m, elements))
        return self.collective(operation, xs, m, *arguments)

    def change(self, xs, named, m, before, after):
        """Change the type, on m, of each rank's piece of an array."""
        what, n, places = change_of(before, after), self.sizes[m], [rank[m] for rank in self.ranks]
        cuts = [named.axes.index(kind) for kind in (before, after) if kind in named.axes]
        if what == "sum":
            return self.send("all_reduce", xs[0].size, xs, named.name, m)
        if what == "gather":
            return self.send("all_gather", n * xs[0].size, xs, named.name, m, *cuts)
        if what == "scatter":
            return self.send("reduce_scatter", xs[0].size, xs, named.name, m, *cuts)
        if what == "exchange":
            parts = [np.split(x, n, cuts[1]) for x in xs]
            return [np.concatenate(ys, cuts[0]) for ys in self.send("all_to_all", xs[0].size, parts, named.name, m)]
        if what == "take":
            return [np.split(x, n, *cuts)[i] for x, i in zip(xs, places)]
        if what == "place":
            return [np.concatenate([x if i == j else np.zeros_like(x) for j in range(n)], *cuts)
                    for x, i in zip(xs, places)]
        return xs if what == "keep" else [np.zeros_like(x) if i else x for x, i in zip(xs, places)]       # "first"

    def deal(self, whole, named: Named):
        """Return each rank's piece of a whole array."""
        xs = [whole for _ in self.ranks]
        for m, kind in named.types.items():
            if kind in named.axes:
                xs = self.change(xs, named, m, INVARIANT, kind)
        return xs

    # ---- programs -------------------------------------------------------------------------------------------------

    def forward(self, program: Program, values: Mapping[Named, np.ndarray]):
        """Compute all arrays of a program from whole ones; return each rank's, by Named, and the caches.

        Raises UserError for an array of another shape.
        """
        for named, whole in values.items():
            if whole.shape != (shape := tuple(program.sizes[axis] for axis in named.axes)):
                raise UserError(f"{named} is {list(whole.shape)}, but must be {list(shape)}.")
        arrays, caches = {named: self.deal(whole, named) for named, whole in values.items()}, []
        for operation, operands, result in program.steps:
            xs, cache = [arrays[x] for x in operands], None
            if isinstance(operation, Change):
                arrays[result] = self.change(xs[0], result, *operation)
            elif isinstance(operation, Largest):
                arrays[result] = [x.max(operation.dimension) for x in xs[0]]
                for m in (m for m, kind in operands[0].types.items() if kind == operation.axis):
                    ys = arrays[result]
                    arrays[result] = self.send("all_reduce", ys[0].size, ys, result.name, m, np.maximum)
            else:
                arrays[result], cache = zip(*[operation.forward(*one) for one in zip(*xs)])
            caches.append(cache)
        return arrays, caches

    def backward(self, program: Program, caches, gradients: dict):
        """Add to each rank's gradients, of results at first, those of all arrays, by Named; return them."""
        for (operation, operands, result), cache in zip(reversed(program.steps), reversed(caches)):
            if result not in gradients or result.role == CONSTANT:
                continue
            given: Iterable
            if isinstance(operation, Change):
                m, before, after = operation
                given = [self.change(gradients[result], result, m, dual(after), dual(before))]
            else:
                given = zip(*[operation.backward(*one) for one in zip(gradients[result], cache)])
            for x, dxs in zip(operands, given):
                if x.role != CONSTANT:
                    gradients[x] = [dx + old for dx, old in zip(dxs, gradients[x])] if x in gradients else list(dxs)
        return gradients
