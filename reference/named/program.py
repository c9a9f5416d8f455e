"""Programs on arrays with named axes: written once, on whole arrays, and sharded by a layout.

A layout maps named axes to axes of a mesh: {"f": "t"} cuts every array that has an axis f along it, over the ranks of
t. While a program is written, each of its arrays gets a type on each axis of the mesh (types.py). Where operands do not
go together the program changes one: these changes are f and g, all-gathers and reduce-scatters, and nobody has written
them. A *strict* program refuses instead. Nothing is computed before the program is whole (mesh.py plays it).

What is changed follows four rules. Weights stay as they are. A partial sum waits until something but a sum, or the
layer's end, needs it, and is then cut as the layout says. Of arrays cut along different axes a weight's cut stays, else
the first one's; the others are gathered. What has no cut is cut with the others if it can be, else replicated.
"""
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reference.errors import UserError
from reference.named.functions import Function, Product, Sum
from reference.named.types import (DUAL, INVARIANT, PARTIAL, REPLICATED, change_of, described, dual, refusal,
                                   type_of_result)

WEIGHT, ACTIVATION, CONSTANT = range(3)     # in the order of who stays; a constant has no gradient


@dataclass(frozen=True, eq=False)
class Named:
    """An array of a program: its axes, and its type on each axis of the mesh. It has no numbers before it is played."""

    name: str
    axes: tuple[str, ...]
    types: Mapping[str, str]
    role: int

    def __str__(self):
        return f"{self.name} [{' '.join(self.axes)}]"


class Change(NamedTuple):
    """A change of type on the mesh's axis m."""

    m: str
    before: str
    after: str

    def __str__(self):
        forward, backward = change_of(self.before, self.after), change_of(dual(self.after), dual(self.before))
        return f"on {self.m}: {described(self.before)} -> {described(self.after)} ({forward}, backward {backward})"


class Largest(NamedTuple):
    """The largest elements along a dimension, that of a named axis; over all ranks, if it is cut."""

    dimension: int
    axis: str


class Step(NamedTuple):
    """A step of a program. What the ranks compute alone is in functions.py; Change and Largest need the mesh."""

    operation: Any
    operands: list[Named]
    result: Named


@dataclass
class Program:
    """A program that is being written. Raises UserError, before anything is computed, for what does not go together."""

    mesh: Mapping[str, int]         # ranks on each axis of the mesh
    layout: Mapping[str, str]       # from named axes to axes of the mesh
    sizes: Mapping[str, int]        # of named axes
    strict: bool = False
    steps: list[Step] = field(default_factory=list)
    changed: dict[Any, Named] = field(default_factory=dict)

    def __post_init__(self):
        self.check_axes(self.layout)
        for axis, m in self.layout.items():
            if m not in self.mesh or self.sizes[axis] % self.mesh[m]:
                raise UserError(f"The layout cuts {axis}, with {self.sizes[axis]} elements, on the mesh's axis "
                                f"{m}. The mesh has {dict(self.mesh)}: it must have {m}, whose ranks share evenly.")

    def __str__(self):
        return "\n".join(f"{x} {change}" for change, (x, *_), _ in self.steps if isinstance(change, Change))

    def check_axes(self, axes) -> None:
        """Raise UserError for axes without a size."""
        if unknown := [axis for axis in axes if axis not in self.sizes]:
            raise UserError(f"No size is given for {' and '.join(unknown)}, but for {', '.join(self.sizes)}.")

    def array(self, name: str, axes: str, role: int = ACTIVATION) -> Named:
        """Declare an array from outside, cut as the layout says. Constants are whole on every rank."""
        self.check_axes(axes.split())
        whole = dict.fromkeys(self.mesh, INVARIANT)
        return Named(name, tuple(axes.split()), whole if role == CONSTANT else self.at_rest(axes.split()), role)

    def at_rest(self, axes) -> dict[str, str]:
        """Return the types that the layout gives to an array with these axes."""
        return {m: next((axis for axis in axes if self.layout.get(axis) == m), INVARIANT) for m in self.mesh}

    # ---- operations -----------------------------------------------------------------------------------------------

    def product(self, x: Named, y: Named, out: str) -> Named:
        """Multiply, and sum over the axes that both have and `out` lacks."""
        in_x, in_y, names = set(x.axes), set(y.axes), set(out.split())
        if wrong := (in_x ^ in_y) - names | names - in_x - in_y:
            raise UserError(f"A product of {x} and {y} cannot have the axes {out}: {' and '.join(sorted(wrong))} must "
                            "be in both operands, or in one and in the product.")
        return self.step("product", Product(x.axes, y.axes, tuple(out.split())), [x, y], out)

    def sum(self, x: Named, y: Named, sign: int = 1) -> Named:
        """Add y, or subtract it. It may lack axes of x, and has the others in the same order."""
        if [axis for axis in x.axes if axis in y.axes] != list(y.axes):
            raise UserError(f"{y} cannot be added to {x}: it must have some of its axes, in the same order.")
        return self.step("sum", Sum(x.axes, y.axes, sign), [x, y], " ".join(x.axes))

    def function(self, function: Function, *xs: Named, along: str = "", out: str = "") -> Named:
        """Apply a function to each element, or along an axis, which must be whole. It must not ask for sizes, which are
        a rank's own.
        """
        if any(x.role != CONSTANT for x in xs[1:]):
            raise UserError("A function gives its first operand a gradient, and no other: of "
                            f"{' and '.join(map(str, xs))} all but the first must be constants.")
        return self.step("function", function, list(xs), out or " ".join(xs[0].axes), along)

    def largest(self, x: Named, axis: str) -> Named:
        """Return the largest elements along an axis, cut or not, as a constant."""
        out = " ".join(a for a in x.axes if a != axis)
        return self.step("largest element", Largest(x.axes.index(axis), axis), [x], out, role=CONSTANT)

    def change(self, x: Named, m: str, after: str) -> Named:
        """Change a type on the mesh's axis m. What was changed once is not changed again."""
        if m not in self.mesh or after not in (*DUAL, *x.axes):
            raise UserError(f"{x} cannot become {after} on {m}: choose {', '.join(DUAL)}, or one of its own axes, on "
                            f"{' or '.join(self.mesh)}.")
        if x.types[m] != after and (x, m, after) not in self.changed:
            self.changed[x, m, after] = Named(x.name, x.axes, {**x.types, m: after}, x.role)
            self.steps.append(Step(Change(m, x.types[m], after), [x], self.changed[x, m, after]))
        return self.changed.get((x, m, after), x)

    def rest(self, x: Named) -> Named:
        """End a layer: add up what is partial, and cut it as the layout says."""
        for m, kind in self.at_rest(x.axes).items():
            x = self.change(x, m, kind)
        return x

    # ---- types ----------------------------------------------------------------------------------------------------

    def step(self, operation: str, function, xs: list[Named], out: str, along: str = "", role: int = WEIGHT) -> Named:
        """Write an operation, after the changes that its operands need, and return its result."""
        types, axes, names = {}, [tuple(axis for axis in x.axes if axis != along) for x in xs], tuple(out.split())
        for m in self.mesh:
            if not self.strict:
                xs = [self.change(x, m, kind) for x, kind in zip(xs, self.wanted(operation, xs, axes, m))]
            kind = type_of_result(operation, [x.types[m] for x in xs], axes, names)
            if kind is None:
                raise UserError(refusal(operation, xs, m))
            types[m] = kind
        result = Named(operation, names, types, max(ACTIVATION, role, min(x.role for x in xs)))
        self.steps.append(Step(function, xs, result))
        return result

    def wanted(self, operation: str, xs: list[Named], axes, m: str) -> list[str]:
        """Return the types on m that go together, and are nearest to the operands'."""
        kinds = [x.types[m] for x in xs]
        if operation == "sum" and set(kinds) == {PARTIAL}:
            return kinds
        kinds = [self.at_rest(x.axes)[m] if kind == PARTIAL or x.role == CONSTANT else kind
                 for x, kind in zip(xs, kinds)]
        by_role = sorted(range(len(xs)), key=lambda i: xs[i].role)
        if cut := next((kinds[i] for i in by_role if kinds[i] in axes[i]), None):
            return [cut if cut in of else REPLICATED for of in axes]
        return kinds if set(kinds) == {INVARIANT} else [REPLICATED] * len(xs)
