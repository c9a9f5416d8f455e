"""The rules of the types of named arrays, each a theorem on exact numbers: what is accepted is right, with its
gradients, and what is refused is right with no type at all.
"""
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reference.errors import UserError
from reference.exact.array import random_array
from reference.named.functions import Function, Product, Sum
from reference.named.mesh import Mesh
from reference.named.program import ACTIVATION, WEIGHT, Named, Program
from reference.named.types import INVARIANT, PARTIAL, REPLICATED, dual, type_of_result
from reference.ops import softmax, softmax_backward

KINDS = INVARIANT, REPLICATED, PARTIAL
SQUARES = Function(lambda x: (x * x, x), lambda dy, x: 2 * dy * x)
SOFTMAX = Function(lambda x: (softmax(x),) * 2, softmax_backward)
ALONG = "function along k"
OPERATIONS = {      # the kind of operation, what a rank computes, the operands' axes, the result's
    "matrix product": ("product", Product(("i", "k"), ("k", "j"), ("i", "j")), ("ik", "kj"), "ij"),
    "product of elements": ("product", Product(("i", "k"), ("i", "k"), ("i", "k")), ("ik", "ik"), "ik"),
    "product with a gain": ("product", Product(("i", "k"), ("k",), ("i", "k")), ("ik", "k"), "ik"),
    "outer product": ("product", Product(("i",), ("j",), ("i", "j")), ("i", "j"), "ij"),
    "sum": ("sum", Sum(("i", "k"), ("i", "k"), 1), ("ik", "ik"), "ik"),
    "sum with a bias": ("sum", Sum(("i", "k"), ("k",), 1), ("ik", "k"), "ik"),
    "difference": ("sum", Sum(("i", "k"), ("i",), -1), ("ik", "i"), "ik"),
    "function": ("function", SQUARES, ("ik",), "ik"),
    "function along k": (ALONG, SOFTMAX, ("ik",), "ik"),
}


def ranks_arrays(whole, axes, kind, n, name):
    """Return arrays of n ranks that are, with this type, the whole one."""
    if kind == PARTIAL:
        terms = [random_array(whole.shape, name, i) for i in range(1, n)]
        return [whole - sum(terms) if terms else whole, *terms]
    return np.split(whole, n, axes.index(kind)) if kind in axes else [whole] * n


def are(arrays, axes, kind, whole):
    """Report whether n ranks' arrays are, with this type, the whole one."""
    if kind in axes:
        return same(np.concatenate(arrays, axes.index(kind)), whole)
    return same(sum(arrays[1:], arrays[0]), whole) if kind == PARTIAL else all(same(one, whole) for one in arrays)


def same(x, y):
    return x.shape == y.shape and bool((x == y).all())


def is_right(operation, axes, out, kinds, result, n, size):
    """Report whether an operation on operands of these types has a result of this type, and right gradients."""
    shapes = [tuple(n * size for _ in of) for of in axes]
    wholes = [random_array(shape, "operand", i) for i, shape in enumerate(shapes)]
    expected, cache = operation.forward(*wholes)
    dz = random_array(expected.shape, "upstream")
    parts = [ranks_arrays(x, of, kind, n, i) for i, (x, of, kind) in enumerate(zip(wholes, axes, kinds))]
    dzs = ranks_arrays(dz, out, dual(result), n, "upstream parts")
    try:
        zs, caches = zip(*[operation.forward(*one) for one in zip(*parts)])
        if not are(zs, out, result, expected):
            return False
        given = zip(*[operation.backward(*one) for one in zip(dzs, caches)])
        return all(are(mine, of, dual(kind), whole)
                   for mine, of, kind, whole in zip(given, axes, kinds, operation.backward(dz, cache)))
    except (ValueError, IndexError):      # shapes that do not fit
        return False


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=3)
@given(n=st.integers(2, 3), size=st.integers(1, 2))
def test_a_rule_accepts_what_is_right_and_nothing_else(name, n, size):
    """For operands of all types, a type that is right is the rule's, and where none is the rule refuses."""
    operation, function, axes, out = OPERATIONS[name]
    of_rule = [tuple(axis for axis in of if operation != ALONG or axis != "k") for of in axes]
    for kinds in product(*(KINDS + tuple(of) for of in axes)):
        right = [result for result in KINDS + tuple(out) if is_right(function, axes, out, kinds, result, n, size)]
        found = type_of_result(operation, list(kinds), of_rule, tuple(out))
        assert right == ([] if found is None else [found]), f"{kinds}: the rule says {found}, but {right} is right"


@settings(max_examples=5)
@given(n=st.integers(1, 4))
def test_every_change_keeps_the_array_and_its_gradient(n):
    """The gradient goes from the dual of the second type to the dual of the first, by the same table."""
    for before, after in permutations(KINDS + ("i", "k"), 2):
        whole, mesh, named = random_array((n, 2 * n), "x"), Mesh({"t": n}), Named("x", ("i", "k"), {}, WEIGHT)
        for first, then in (before, after), (dual(after), dual(before)):
            arrays = ranks_arrays(whole, "ik", first, n, "x")
            assert are(mesh.change(arrays, named, "t", first, then), "ik", then, whole)


# ---- programs that are not derived ----------------------------------------------------------------------------------


def written_mlp(*left_out):
    """Write the MLP as Megatron does, with f and g as changes, but for those left out."""
    p = Program({"t": 2}, {"f": "t"}, dict(b=2, s=2, h=2, f=4), strict=True)
    x, w_in, w_out, bias = (p.array(name, axes, role) for name, axes, role in (
        ("x", "b s h", ACTIVATION), ("w_in", "h f", WEIGHT), ("w_out", "f h", WEIGHT), ("b_out", "h", WEIGHT)))
    if "f" not in left_out:
        x = p.change(x, "t", REPLICATED)
    y = p.product(p.function(SQUARES, p.product(x, w_in, "b s f")), w_out, "b s h")
    if "g" not in left_out:
        y = p.change(y, "t", INVARIANT)
    return p, x, y, bias


def test_a_strict_program_with_f_and_g_is_the_derived_one():
    strict, _, y, bias = written_mlp()
    strict.sum(y, bias)
    derived = Program({"t": 2}, {"f": "t"}, dict(b=2, s=2, h=2, f=4))
    x, *weights = (derived.array(*one) for one in (("x", "b s h", ACTIVATION), ("w_in", "h f", WEIGHT),
                                                   ("w_out", "f h", WEIGHT), ("b_out", "h", WEIGHT)))
    y = derived.product(derived.function(SQUARES, derived.product(x, weights[0], "b s f")), weights[1], "b s h")
    derived.sum(y, weights[2])
    assert str(strict) == str(derived) == """\
x [b s h] on t: invariant -> replicated (keep, backward sum)
product [b s h] on t: partial -> invariant (sum, backward keep)"""


REFUSED = {     # what is left out, what is written then, and the sentence
    "f is missing": ("f", lambda p, x, y, bias: None, r"axis t, a product of x \[b s h\] \(invariant\) and "
                     r"w_in \[h f\] \(cut along f\): each rank would compute another part .* Change it to replicated"),
    "g is missing before the bias": ("g", lambda p, x, y, bias: p.sum(y, bias),
                                     r"a sum of product .* \(partial\) and b_out .* \(invariant\): what is not partial "
                                     "would be added once by every rank. Change what is partial to invariant first"),
    "g is missing before a function": ("g", lambda p, x, y, bias: p.function(SQUARES, y),
                                       r"a function of product .* \(partial\): the results are not the terms"),
    "partial times partial": ("g", lambda p, x, y, bias: p.product(y, y, "b s h"),
                              r"a product of .* \(partial\) and .* \(partial\): the results are not the terms"),
    "the largest of a partial sum": ("g", lambda p, x, y, bias: p.largest(y, "h"),
                                     r"a largest element of .* \(partial\)"),
    "a function along what is cut": (
        "", lambda p, x, y, bias: p.function(SQUARES, p.array("w", "h f", WEIGHT), along="f"),
        r"a function of .* \(cut along f\): a rank lacks elements .* Change what is cut to replicated"),
    "an uneven cut": ("", lambda *_: Program({"t": 2}, {"f": "t"}, {"f": 3}),
                      "cuts f, with 3 elements, .* share evenly"),
    "no such axis of the mesh": ("", lambda *_: Program({"t": 2}, {"f": "d"}, {"f": 4}), "must have d"),
    "an axis without a size": ("", lambda p, x, y, bias: p.array("w", "h q"), "No size is given for q, but for b, s"),
    "a product that loses an axis": ("", lambda p, x, y, bias: p.product(x, bias, "b h"),
                                     r"\[h\] cannot have the axes b h: s must be in both operands, or in one"),
    "a sum in another order": ("", lambda p, x, y, bias: p.sum(bias, x), "it must have some of its axes"),
    "a function of two arrays with gradients": ("", lambda p, x, y, bias: p.function(SQUARES, x, y),
                                                "all but the first must be constants"),
    "a change to what is no type": ("", lambda p, x, y, bias: p.change(x, "t", "V"),
                                    "cannot become V on t: choose invariant, replicated, partial, or one of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_program_is_refused_while_it_is_written(name):
    left_out, write, sentence = REFUSED[name]
    with pytest.raises(UserError, match=sentence):
        write(*written_mlp(left_out))


def test_an_array_of_another_size_is_refused_before_anything_is_computed():
    p = Program({"t": 2}, {"f": "t"}, dict(h=2, f=4))
    with pytest.raises(UserError, match=r"w \[h f\] is \[2, 3\], but must be \[2, 4\]"):
        Mesh(p.mesh).forward(p, {p.array("w", "h f", WEIGHT): np.ones((2, 3))})
