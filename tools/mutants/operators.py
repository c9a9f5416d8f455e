"""The mistakes that people make in distributed training, as small changes of the source: the operators of mutation.

A mutant replaces one expression or statement of a function's body. Messages, names of reasons, types and defaults stay.
"""
import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# A call that communicates, and gives back something of the kind of its first argument.
COMMUNICATION = set("""all_reduce all_gather reduce_scatter broadcast scatter gather enter leave enter_backward
    leave_backward enter_again keep total""".split())
COPIES = {"array", "ascontiguousarray", "deepcopy", "empty_like"}       # with one argument: the alias is the argument
WAITS = set("wait wait_all release free close barrier flush fence join prefetch".split())
ORDERLESS = {"isinstance", "issubclass", "hasattr", "zip", "print", "gcd", "dict", "maximum", "minimum",
             "array_equal"}   # no mistake, or a crash at best
OF_AXES = set("sum max min mean split array_split stack concatenate swapaxes moveaxis take cumsum argmax roll".split())
OTHER_GROUP = {"tensor": "data", "data": "tensor", "pipeline": "data", "model": "tensor", "embedding": "pipeline",
               "world": "model"}
INSTRUMENTS = {"ledger", "trace", "watchdog"}       # all groups of a rank have the same
OTHER_COMPARISON = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
                    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OTHER_OPERATION = {ast.Add: "-", ast.Sub: "+", ast.LShift: ">>", ast.RShift: "<<", ast.BitXor: "|", ast.BitAnd: "|",
                   ast.BitOr: "&"}
SYMBOL = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//", ast.MatMult: "@", ast.Mod: "%"}
ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.ListComp, ast.Dict)


class Mutant(NamedTuple):
    """A change of one place in a file."""

    path: str           # from the root of the repository
    function: str       # that it stands in, or the class and its method
    line: int
    operator: str
    start: int          # bytes
    end: int
    replacement: str
    before: str         # the lines that it changes, with single spaces
    after: str
    ordinal: int = 0    # among mutants that read the same
    statement: int = 0  # the line on which the innermost statement around it begins

    @property
    def name(self) -> str:
        """Return what stays when other lines of the file change."""
        again = f" (#{self.ordinal + 1})" if self.ordinal else ""
        return f"{self.path} | {self.function} | {self.before} -> {self.after}{again}"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


class Change(NamedTuple):
    """A text in place of some adjacent nodes."""

    operator: str
    first: ast.AST
    last: ast.AST
    replacement: str
    statement: int = 0


def mutants(path: str, source: str | None = None) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    source = (ROOT / path).read_text(encoding="utf-8") if source is None else source
    text, found, seen = Text(source), [], Counter[tuple[str, str, str]]()
    for function, body in functions(ast.parse(source)):
        for change in changes(body, text):
            start, end = text.span(change.first)[0], text.span(change.last)[1]
            before, after = text.lines_around(start, end, change.replacement)
            if before != after:
                line = change.first.lineno      # type: ignore[attr-defined]
                found.append(Mutant(path, function, line, change.operator, start, end, change.replacement, before,
                                    after, seen[function, before, after], change.statement))
                seen[function, before, after] += 1
    return sorted(found, key=lambda mutant: (mutant.line, mutant.start, mutant.operator))


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source of the mutant's file, with the mutant in it."""
    data = source.encode()
    return (data[:mutant.start] + mutant.replacement.encode() + data[mutant.end:]).decode()


class Text:
    """A source, in which nodes are found by bytes."""

    def __init__(self, source: str):
        self.data = source.encode()
        self.begin = [0]
        for line in self.data.splitlines(keepends=True):
            self.begin.append(self.begin[-1] + len(line))

    def span(self, node) -> tuple[int, int]:
        return self.begin[node.lineno - 1] + node.col_offset, self.begin[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def operand(self, node: ast.AST) -> str:
        """Return the node's text as an operand of anything."""
        return self.of(node) if isinstance(node, ATOMS) else f"({self.of(node)})"

    def lines_around(self, start: int, end: int, replacement: str) -> tuple[str, str]:
        """Return the lines that are changed, before and after, with single spaces and without comments."""
        first, last = self.data.rfind(b"\n", 0, start) + 1, self.data.find(b"\n", end) % (len(self.data) + 1)
        pieces = [self.data[first:start].decode(), self.data[end:last].decode()]
        whole = (pieces[0] + self.data[start:end].decode() + pieces[1], pieces[0] + replacement + pieces[1])
        before, after = (" ".join(re.sub(r"(^|\s\s)#.*", "", text, flags=re.MULTILINE).split()) for text in whole)
        return before, after


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield the bodies of a module's functions and of its classes' methods, without their docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node.body[ast.get_docstring(node) is not None:]
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def changes(body: list[ast.stmt], text: Text) -> Iterator[Change]:
    """Yield the changes of these statements and of all that is in them."""
    for statement, following in zip(body, [*body[1:], None]):
        if is_wait(statement) and following and not isinstance(following, ast.Return | ast.Raise):
            indent = " " * statement.col_offset
            yield Change("wait too late", statement, following, f"{text.of(following)}\n{indent}{text.of(statement)}",
                         statement.lineno)
    for statement in body:
        for change in changes_below(statement, text):
            yield change if change.statement else change._replace(statement=statement.lineno)


def changes_below(node: ast.AST, text: Text) -> Iterator[Change]:
    """Yield the changes of a node and of its children."""
    if stays(node):
        return
    for operator in OPERATORS.get(type(node), ()):
        yield from operator(node, text)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield from changes(value, text)
        elif name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not (is_call_of(node, "reshape") and text.of(child) == "-1"):
                    yield from changes_below(child, text)


def stays(node: ast.AST) -> bool:
    """Report whether a node is a message, a default, a pause, an instrument or zip's `strict`: no result changes."""
    return (isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments) or is_call_of(node, "sleep") or
            isinstance(node, ast.Attribute) and node.attr in INSTRUMENTS or
            isinstance(node, ast.keyword) and node.arg == "strict")


def called(node: ast.Call) -> str:
    """Return the name of the function or method that is called, or nothing."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and called(node) == name


def is_wait(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in WAITS


# ---- one function for each kind of node -----------------------------------------------------------------------------


def of_expression(node: ast.Expr, text: Text) -> Iterator[Change]:
    if isinstance(node.value, ast.Call):
        yield Change("drop call", node, node, "pass")


def of_call(node: ast.Call, text: Text) -> Iterator[Change]:
    """Leave out a communication, a copy or a cast; exchange the first two arguments; take the other extreme."""
    name = called(node)
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    if name in COMMUNICATION and plain:
        yield Change("drop communication", node, node, text.operand(plain[0]))
    if name in COPIES and len(plain) == 1 and not node.keywords:
        yield Change("alias", node, node, text.operand(plain[0]))
    if name == "copy" and not node.args and isinstance(node.func, ast.Attribute):
        yield Change("alias", node, node, text.operand(node.func.value))
    if name == "astype" and isinstance(node.func, ast.Attribute):
        yield Change("drop cast", node, node, text.operand(node.func.value))
    if name == "sorted" and plain:
        yield Change("drop call", node, node, text.operand(plain[0]))
    if len(plain) == len(node.args) >= 2 and name not in ORDERLESS | {"max", "min"}:
        first, second = node.args[:2]
        if text.of(first) != text.of(second) and is_string(first) == is_string(second):
            yield Change("swap arguments", first, second, f"{text.of(second)}, {text.of(first)}")
    if name in ("max", "min") and isinstance(node.func, ast.Name):
        yield Change("comparison", node.func, node.func, "min" if name == "max" else "max")
    if name == "range" and not isinstance(stop := node.args[min(1, len(node.args) - 1)], ast.Constant):
        yield Change("off by one", stop, stop, f"{text.operand(stop)} - 1")
    if name in OF_AXES:
        for argument in node.args:
            yield from of_axis(argument, text)


def of_keyword(node: ast.keyword, text: Text) -> Iterator[Change]:
    if node.arg == "axis":
        yield from of_axis(node.value, text)


def of_axis(node: ast.expr, text: Text) -> Iterator[Change]:
    try:
        axis = ast.literal_eval(node)
    except (ValueError, TypeError):
        return
    if type(axis) is int:
        yield Change("axis", node, node, str({0: 1, -1: -2, -2: -1}.get(axis, axis - 1)))


def of_augmented(node: ast.AugAssign, text: Text) -> Iterator[Change]:
    """Leave out an update in place, overwrite instead of adding, or bind a new array."""
    target, value = text.of(node.target), text.of(node.value)
    yield Change("drop update", node, node, "pass")
    yield Change("+= to =", node, node, f"{target} = {value}")
    if isinstance(node.target, ast.Name) and type(node.op) is ast.Add:
        yield Change("alias", node, node, f"{target} = {target} + {text.operand(node.value)}")


def of_assignment(node: ast.Assign, text: Text) -> Iterator[Change]:
    target = node.targets[0]
    if isinstance(target, ast.Subscript):
        yield Change("drop update", node, node, "pass")
        if isinstance(target.value, ast.Name) and text.of(target.slice) == "...":
            yield Change("alias", node, node, f"{target.value.id} = {text.of(node.value)}")


def of_operation(node: ast.BinOp, text: Text) -> Iterator[Change]:
    """Leave out a scale, turn a sign, or exchange operands."""
    left, right = text.operand(node.left), text.operand(node.right)
    if any(isinstance(side, ast.JoinedStr | ast.List | ast.Constant) and not is_number(side)
           for side in (node.left, node.right)):
        return
    if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.Mod):
        yield Change("rescale", node, node, left)
    if type(node.op) in SYMBOL and left != right:
        yield Change("swap operands", node, node, f"({right} {SYMBOL[type(node.op)]} {left})")
    if type(node.op) in OTHER_OPERATION:
        yield Change("sign", node, node, f"({left} {OTHER_OPERATION[type(node.op)]} {right})")


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def of_comparison(node: ast.Compare, text: Text) -> Iterator[Change]:
    if len(node.ops) == 1:
        left, symbol, right = node.left, OTHER_COMPARISON[type(node.ops[0])], node.comparators[0]
        yield Change("comparison", node, node, f"{text.operand(left)} {symbol} {text.operand(right)}")


def of_choice(node: ast.BoolOp, text: Text) -> Iterator[Change]:
    symbol = " or " if isinstance(node.op, ast.And) else " and "
    yield Change("condition", node, node, f"({symbol.join(map(text.operand, node.values))})")


def of_negation(node: ast.UnaryOp, text: Text) -> Iterator[Change]:
    """Leave out a `not` or a minus sign."""
    if isinstance(node.op, ast.Not):
        yield Change("condition", node, node, text.operand(node.operand))
    elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield Change("sign", node, node, text.operand(node.operand))


def of_condition(node, text: Text) -> Iterator[Change]:
    if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield Change("condition", node.test, node.test, f"not {text.of(node.test)}")


def of_constant(node: ast.Constant, text: Text) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield Change("constant", node, node, str(not node.value))
    elif isinstance(node.value, int):
        yield Change("off by one", node, node, str(node.value + 1))
    elif isinstance(node.value, float):
        yield Change("constant", node, node, repr(2 * node.value or 1.0))


def of_slice(node: ast.Slice, text: Text) -> Iterator[Change]:
    for bound in (node.lower, node.upper):
        if bound is not None and not isinstance(bound, ast.Constant):
            yield Change("off by one", bound, bound, f"{text.operand(bound)} + 1")


def of_attribute(node: ast.Attribute, text: Text) -> Iterator[Change]:
    owner = text.of(node.value).split(".")[-1]
    if node.attr in OTHER_GROUP and owner in ("topology", "place", "at"):
        yield Change("group", node, node, f"{text.of(node.value)}.{OTHER_GROUP[node.attr]}")


OPERATORS: dict[type, tuple[Callable, ...]] = {
    ast.Expr: (of_expression,), ast.Call: (of_call,), ast.keyword: (of_keyword,), ast.AugAssign: (of_augmented,),
    ast.Assign: (of_assignment,), ast.BinOp: (of_operation,), ast.Compare: (of_comparison,), ast.BoolOp: (of_choice,),
    ast.UnaryOp: (of_negation,), ast.If: (of_condition,), ast.IfExp: (of_condition,), ast.While: (of_condition,),
    ast.Constant: (of_constant,), ast.Slice: (of_slice,), ast.Attribute: (of_attribute,)}
