"""The four types of an array on one axis of a mesh, the ways from one to another, and what operations ask of them.

On an axis of n ranks an array has one of these types. The gradient of an array has the *dual* type:

    type         the n ranks' arrays                           the array itself        dual
    invariant    are equal                                     any of them             invariant
    replicated   are equal                                     any of them             partial
    partial      are the terms of a sum                        the sum                 replicated
    "f"          are pieces, cut along the array's axis f      the pieces in a row     "f"

All ranks compute the same with an invariant array. With a replicated one each computes its own part of the work, so its
gradient is a partial sum. f (Shoeybi et al. 2019) makes the second of the first: it sends nothing forward, and sums
backward. (The package spmd_types has the same four; the rules here are proved, in tests.)
"""

INVARIANT, REPLICATED, PARTIAL, PIECES = "invariant", "replicated", "partial", "pieces"
DUAL = {INVARIANT: INVARIANT, REPLICATED: PARTIAL, PARTIAL: REPLICATED}

# What each rank does on the way from one type to another. Backward, the gradient goes from the dual of the second to
# the dual of the first: that way is in the table, too.
CHANGES = {
    (INVARIANT, REPLICATED): "keep",     # f; backward sum
    (PARTIAL, INVARIANT): "sum",         # g; backward keep
    (PARTIAL, REPLICATED): "sum",        # g, then f; backward the same
    (PIECES, REPLICATED): "gather",      # into a region of sequence parallelism; backward scatter
    (PARTIAL, PIECES): "scatter",        # out of it; backward gather
    (PIECES, PIECES): "exchange",        # from one axis to another: an all-to-all; backward the same
    (PIECES, INVARIANT): "gather",       # backward take
    (INVARIANT, PIECES): "take",         # backward gather
    (REPLICATED, PIECES): "take",        # backward place
    (PIECES, PARTIAL): "place",          # backward take
    (REPLICATED, INVARIANT): "keep",     # backward first
    (INVARIANT, PARTIAL): "first",       # backward keep
    (REPLICATED, PARTIAL): "first",      # backward the same
}


def dual(kind: str) -> str:
    """Return the type of the gradient of an array of this type."""
    return DUAL.get(kind, kind)


def change_of(before: str, after: str) -> str:
    """Return what each rank does to change a type into another."""
    return CHANGES[before if before in DUAL else PIECES, after if after in DUAL else PIECES]


def type_of_result(operation: str, kinds: list[str], axes: list[tuple], out: tuple) -> str | None:
    """Return the type of the result of an operation on operands of these types and axes; None if no type is right.

    `operation` is "product", linear in each operand; "sum", linear in all together; "function", which is not linear; or
    "largest element", which has no gradient. A type is right if the result is, and the gradients of all operands are.
    """
    cuts, partial = set(kinds) - set(DUAL), kinds.count(PARTIAL)
    if cuts:
        cut = min(cuts)
        if any(kind != (cut if cut in of else REPLICATED) for kind, of in zip(kinds, axes)):
            return None
        return cut if cut in out else {"product": PARTIAL, "largest element": INVARIANT}.get(operation)
    if len(set(kinds)) == 1 and (not partial or operation == "sum"):
        return kinds[0]
    return PARTIAL if operation == "product" and partial == 1 and INVARIANT not in kinds else None


def refusal(operation: str, arrays: list, m: str) -> str:
    """Say why an operation has no type on the mesh's axis m, and what mends it. arrays are the operands, as Named."""
    kinds = [x.types[m] for x in arrays]
    cuts = set(kinds) - set(DUAL)
    if PARTIAL in kinds and operation == "sum":
        why = f"what is not {PARTIAL} would be added once by every rank. Change what is {PARTIAL} to {INVARIANT} first"
    elif PARTIAL in kinds:
        why = f"the results are not the terms of the whole one. Change what is {PARTIAL} to {INVARIANT} first"
    elif INVARIANT in kinds and (len(arrays) > 1 and len(cuts) < 2):
        why = (f"each rank would compute another part of the gradient of what is {INVARIANT}, and nobody would add "
               f"them up. Change it to {REPLICATED}, or to pieces, first")
    else:
        why = f"a rank lacks elements that belong together. Change what is cut to {REPLICATED} first"
    operands = " and ".join(f"{x} ({described(x.types[m])})" for x in arrays)
    return f"On the mesh's axis {m}, a {operation} of {operands}: {why}."


def described(kind: str) -> str:
    return kind if kind in DUAL else f"cut along {kind}"
