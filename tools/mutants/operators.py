"""The mistakes that people make in distributed training, as small changes of the source: the operators of mutation.

A mutant replaces one expression or statement of a function's body. Messages, names of reasons, types and defaults stay.
"""
import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

# A call that communicates, and gives back something of the kind of its first argument.
COMMUNICATION = set("""all_reduce all_gather reduce_scatter broadcast scatter gather enter leave enter_backward
    leave_backward enter_again keep total""".split())
COPIES = {"array", "ascontiguousarray", "deepcopy", "empty_like"}       # with one argument: the alias is the argument
WAITS = set("wait wait_all release free close barrier flush fence join prefetch".split())
ORDERLESS = {"isinstance", "issubclass", "hasattr", "zip", "print", "gcd", "dict", "maximum", "minimum",
             "array_equal", "max", "min"}   # no mistake, or a crash at best
OF_AXES = set("sum max min mean split array_split stack concatenate swapaxes moveaxis take cumsum argmax roll".split())
OTHER_AXIS = {0: 1, -1: -2, -2: -1}         # for any other, the one before
OTHER_GROUP = {"tensor": "data", "data": "tensor", "pipeline": "data", "model": "tensor", "embedding": "pipeline",
               "world": "model"}
INSTRUMENTS = {"ledger", "trace", "watchdog"}       # all groups of a rank have the same
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
         ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
         ast.Add: ast.Sub, ast.Sub: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitXor: ast.BitOr,
         ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}
SCALES, ORDERED = ast.Mult | ast.Div | ast.FloorDiv | ast.Mod, ast.Sub | ast.Div | ast.FloorDiv | ast.MatMult | ast.Mod
Change = tuple[str, ast.AST]        # an operator's name, and what it puts in the place of a node


class Mutant(NamedTuple):
    """A change of one place in a file."""

    path: str           # from the root of the repository
    function: str       # that it stands in, or the class and its method
    line: int
    operator: str
    before: str         # the first line of the statement that it changes, as ast.unparse writes it
    after: str
    ordinal: int        # among mutants that read the same
    statement: int      # the line on which the innermost statement around it begins

    @property
    def name(self) -> str:
        """Return what stays when other lines of the file change."""
        again = f" (#{self.ordinal + 1})" if self.ordinal else ""
        return f"{self.path} | {self.function} | {self.before} -> {self.after}{again}"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


def mutants(path: str, operators: Callable[["Place"], Iterable[tuple]] | None = None) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines; with other operators than `changes` if given."""
    return sorted((mutant for mutant, _ in mutated_trees(path, operators or changes)),
                  key=lambda mutant: (mutant.line, mutant.operator))


def mutated(mutant: Mutant) -> tuple[str, str]:
    """Return the source of the mutant's file, as ast.unparse writes it, without the mutant and with it."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    return ast.unparse(tree), next(ast.unparse(changed) for found, changed in mutated_trees(mutant.path, changes)
                                   if found == mutant)


def mutated_trees(path: str, operators: Callable[["Place"], Iterable[tuple]]) -> Iterator[tuple[Mutant, ast.Module]]:
    """Yield each mutant, with the tree of the file, which has it until the next one is asked for."""
    tree, seen = ast.parse((ROOT / path).read_text(encoding="utf-8")), Counter[tuple[str, str, str]]()
    for function, definition in functions(tree):
        for place in places_in(definition, definition):
            for operator, *new in operators(place):
                before = first_lines(place.nodes[:len(new)] if isinstance(new[0], ast.stmt) else [place.statement])
                with place.changed(new):
                    after = first_lines(new if isinstance(new[0], ast.stmt) else [place.statement])
                    if before != after:
                        yield Mutant(path, function, place.nodes[0].lineno, operator, before, after,
                                     seen[function, before, after], place.statement.lineno), tree
                        seen[function, before, after] += 1


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield a module's functions and its classes' methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def first_lines(statements: list) -> str:
    return "; ".join(ast.unparse(statement).strip().partition("\n")[0] for statement in statements)


class Place(NamedTuple):
    """A node, in a field of another one or in a list of them, and the innermost statement around it."""

    holder: Any         # a node, or a list
    key: Any            # the field's name, or the index
    nodes: list         # the node; a statement also with the one after it
    statement: Any

    @contextmanager
    def changed(self, new: list) -> Iterator[None]:
        """Put other nodes in the places of the first ones, for the duration of the `with` block."""
        self.put(new)
        try:
            yield
        finally:
            self.put(self.nodes[:len(new)])

    def put(self, nodes: list) -> None:
        if isinstance(self.holder, list):
            self.holder[self.key:self.key + len(nodes)] = nodes
        else:
            setattr(self.holder, self.key, nodes[0])


def places_in(node: ast.AST, statement: ast.AST) -> Iterator[Place]:
    """Yield the places below a node at which something may change."""
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            holder, items = (value, list(enumerate(value))) if isinstance(value, list) else (node, [(field, value)])
            for i, (key, child) in enumerate(items):
                if isinstance(child, ast.AST) and not stays(child, node):
                    inner = child if isinstance(child, ast.stmt | ast.match_case) else statement
                    yield Place(holder, key, [child, *(one for _, one in items[i + 1:i + 2])], inner)
                    yield from places_in(child, inner)


def stays(node: ast.AST, parent: ast.AST) -> bool:
    """Report whether a node is a message, a default, a pause, an instrument, zip's `strict` or a shape's -1."""
    return (isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments) or called(node) == "sleep" or
            isinstance(node, ast.Attribute) and node.attr in INSTRUMENTS or
            isinstance(node, ast.keyword) and node.arg == "strict" or
            called(parent) == "reshape" and ast.unparse(node) == "-1")


def called(node: ast.AST) -> str:
    """Return the name of the function or method that a node calls, or nothing."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# ---- the operators --------------------------------------------------------------------------------------------------


def changes(place: Place) -> Iterator[tuple]:
    """Yield the name of each operator that changes a place, with what it puts there."""
    node, *following = place.nodes
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield "condition", but(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.stmt):
        yield from changes_of_statement(node, following)
    else:
        yield from changes_of_expression(node)


def changes_of_statement(node: ast.stmt, following: list) -> Iterator[tuple]:
    """Leave out a call or an update, or wait after the next statement; assign in place of an update; share an array."""
    match node:
        case ast.Expr(ast.Call()):
            yield "drop call", ast.Pass()
            if called(node.value) in WAITS and following and not isinstance(following[0], ast.Return | ast.Raise):
                yield "wait too late", *following, node
        case ast.AugAssign(target, op, value):
            yield "drop update", ast.Pass()
            yield "+= to =", assignment(target, value)
            if isinstance(target, ast.Name) and isinstance(op, ast.Add):
                yield "alias", assignment(target, ast.BinOp(target, op, value))
        case ast.Assign([ast.Subscript(array, where), *_], value):
            yield "drop update", ast.Pass()
            if isinstance(array, ast.Name) and ast.unparse(where) == "...":
                yield "alias", assignment(array, value)


def changes_of_expression(node: ast.AST) -> Iterator[tuple]:
    """Take another operator, number, bound, group or axis, or leave one out."""
    match node:
        case ast.BoolOp(op, values):
            yield "condition", ast.BoolOp(OTHER[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "condition", operand
        case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
            yield "sign", operand
        case ast.Compare(left, [op], [right]):
            yield "comparison", ast.Compare(left, [OTHER[type(op)]()], [right])
        case ast.BinOp(left, op, right) if not (is_text(left) or is_text(right)):
            if isinstance(op, SCALES):
                yield "rescale", left
            if isinstance(op, ORDERED) and ast.unparse(left) != ast.unparse(right):
                yield "swap operands", ast.BinOp(right, op, left)
            if type(op) in OTHER:
                yield "sign", ast.BinOp(left, OTHER[type(op)](), right)
        case ast.Constant(bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "off by one", ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield "constant", ast.Constant(2 * value or 1.0)
        case ast.Slice(lower, upper):
            for field, bound in (("lower", lower), ("upper", upper)):
                if bound and not isinstance(bound, ast.Constant):
                    yield "off by one", but(node, **{field: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
        case ast.Attribute(owner, name) if name in OTHER_GROUP and last_name(owner) in ("topology", "place", "at"):
            yield "group", but(node, attr=OTHER_GROUP[name])
        case ast.keyword("axis", value):
            yield from (("axis", but(node, value=axis)) for axis in other_axes(value))
        case ast.Call():
            yield from changes_of_call(node, called(node))


def changes_of_call(node: ast.Call, name: str) -> Iterator[Change]:
    """Leave out a communication, a copy or a cast; exchange the first two arguments; take the other extreme."""
    method = isinstance(node.func, ast.Attribute)
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    if name in COMMUNICATION and plain:
        yield "drop communication", plain[0]
    if name in COPIES and len(plain) == 1 and not node.keywords:
        yield "alias", plain[0]
    if method and name == "copy" and not node.args:
        yield "alias", node.func.value
    if method and name == "astype":
        yield "drop cast", node.func.value
    if name == "sorted" and plain:
        yield "drop call", plain[0]
    if len(plain) == len(node.args) >= 2 and name not in ORDERLESS:
        first, second, *others = plain
        if ast.unparse(first) != ast.unparse(second) and is_string(first) == is_string(second):
            yield "swap arguments", but(node, args=[second, first, *others])
    if name in ("max", "min") and not method:
        yield "comparison", but(node, func=ast.Name("min" if name == "max" else "max"))
    if name == "range" and not isinstance(stop := node.args[:2][-1], ast.Constant):
        less = ast.BinOp(stop, ast.Sub(), ast.Constant(1))
        yield "off by one", but(node, args=[less if argument is stop else argument for argument in node.args])
    for one in node.args if name in OF_AXES else ():
        for axis in other_axes(one):
            yield "axis", but(node, args=[axis if argument is one else argument for argument in node.args])


def other_axes(node: ast.expr) -> list[ast.expr]:
    """Return the axis that is put in the place of one, if the node is one."""
    try:
        axis = ast.literal_eval(node)
    except (ValueError, TypeError):
        return []
    return [ast.Constant(OTHER_AXIS.get(axis, axis - 1))] if type(axis) is int else []


def assignment(target: ast.expr, value: ast.expr) -> ast.Assign:
    return ast.Assign([target], value, lineno=0)


def but(node: Any, **fields: Any) -> Any:
    """Return a node with other values of these fields."""
    return ast.copy_location(type(node)(**dict(ast.iter_fields(node)) | fields), node)


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_text(node: ast.AST) -> bool:
    """Report whether a node is no number to compute with, but a text or a list."""
    return (isinstance(node, ast.JoinedStr | ast.List) or
            isinstance(node, ast.Constant) and not isinstance(node.value, int | float))
