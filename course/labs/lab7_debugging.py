# %% [markdown]
# # Lab 7. Debugging: right shapes, wrong numbers
#
# The worst bugs of parallel training raise no error. The shapes are right, the loss falls, and the model is not the one
# that you think. Here are five such functions, each a few lines long and each wrong in a way that has happened to
# people. For each you find inputs that *prove* it wrong, say which rule it breaks, and repair it. Then you hunt three
# bugs in the real program, drawn for you alone, by what they have left behind in a run.
#
# **You need**: walkthroughs *Splitting matrices* to *Sequence parallelism* and *ZeRO*, labs 1 to 4, and half an hour
# for the [tour of the trainer](../../docs/tour_of_the_trainer.md). **Time**: about seven hours. **Points**: 60, and 10
# for words.
#
# As in lab 1: cells that begin with `%%answer` are yours, a check runs them in separate processes, and the checks that
# give the points try more than you see. `group` has `all_reduce(x)` (and `all_reduce(x, op="max")`),
# `all_gather(x, axis=0)` and `reduce_scatter(x, axis=0)`. Arrays are split as `np.array_split` splits them: if they do
# not divide, the first ranks have one more.
#
# ## The rules
#
# Nearly all bugs of this kind break one of these. In your answers you refer to them by name:
#
# | name | rule |
# |---|---|
# | `"once"` | A value that is identical on all ranks enters a sum over the ranks once. |
# | `"conjugate"` | *f* and *g* are adjoint: if one direction does nothing, the other direction sums. |
# | `"own part"` | A rank works on its own part, whose beginning follows from the way the whole was split. |
# | `"agree first"` | The ranks agree on a number for all (a maximum, a norm) before they apply a nonlinear function. |
# | `"weights"` | A mean of means is not the mean: weight each with the number of its samples. |
# | `"identical"` | Values that should be identical on all ranks are drawn, computed and updated identically. |
# | `"everyone"` | All ranks call the same collectives, in the same order, no matter what they hold. |

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run, run_given

# %% locked="tools"
import numpy as np

from course.grading import CheckFailed, check_data, each, expect, expect_equal, expect_sent, passed, run, run_given
from course.grading.checks import difference
from course.grading.hunts import KINDS, PATH, expect_file, expect_kind, expect_line

RULES = ("once", "conjugate", "own part", "agree first", "weights", "identical", "everyone")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def split(whole, ranks, axis=-1):
    """Return each rank's shard."""
    return np.array_split(whole, ranks, axis)


def expect_results(outcome, expected, names, case, hint):
    """Check that every rank has returned the expected arrays, one for each name."""
    for rank, found in enumerate(outcome.results):
        expect(isinstance(found, list | tuple) and len(found) == len(names), f"rank {rank}: expected "
               f"{', '.join(names)}; got {type(found).__name__}.", f"return {', '.join(names)}")
    for k, name in enumerate(names):
        expect_equal([found[k] for found in outcome.results], [right[k] for right in expected], f"{case}: {name}", hint)


def is_wrong(outcome, expected):
    """Report whether any rank's result differs from the expected one by more than rounding."""
    return any(difference(mine, np.asarray(right), 1e-6) for found, rights in zip(outcome.results, expected)
               for mine, right in zip(found, rights))


def run_broken(source, ranks, function, args):
    """Run the broken function with the inputs of an answer."""
    try:
        return run_given(source, ranks, function, *args, allow=COLLECTIVES)
    except CheckFailed as failed:
        raise CheckFailed(f"With your inputs the broken function does not return at all. Find inputs for which it "
                          f"returns a wrong result.\n{failed}") from None


def diagnosis(function, **axes):
    """Return a diagnosis, checked: a dict of the number of ranks, arrays with these numbers of axes, and rules."""
    found, = run(None, function).results
    keys = ["ranks", *axes, "breaks"]
    expect(isinstance(found, dict) and set(keys) <= set(found), f"{function}: expected a dict with "
           f"{', '.join(keys)}; got {sorted(found) if isinstance(found, dict) else type(found).__name__}.")
    ranks, breaks = found["ranks"], found["breaks"]
    expect(np.ndim(ranks) == 0 and np.asarray(ranks).dtype.kind in "iu" and 1 <= ranks <= 8,
           f"ranks should be a number from 1 to 8, but is {ranks!r}.")
    expect(isinstance(breaks, list | tuple) and breaks and all(type(rule) is str and rule in RULES for rule in breaks),
           f"breaks should be a list of one or more of {', '.join(RULES)}; it is {breaks!r}.")
    return {**found, "ranks": int(ranks), **{name: numbers(name, found[name], n) for name, n in axes.items()}}


def numbers(name, found, n):
    """Return a small array with n axes. Check that it is one."""
    try:
        found = np.asarray(found)
    except ValueError:
        raise CheckFailed(f"{name} is no array: its rows differ in length.") from None
    expect(found.dtype.kind in "iuf" and found.ndim == n and 0 < found.size <= 400
           and (np.abs(found) <= 1000).all(), f"{name} should be an array of 1 to 400 numbers with {n} axes, none "
           f"larger than 1000; it is one of {found.dtype}, of shape {list(found.shape)}.")
    return found


def draw(random, *shapes):
    """Draw a random array of each shape."""
    return [random.normal(size=shape) for shape in shapes]


def expect_fit(true, what):
    """Check that the sizes of a diagnosis's arrays fit together."""
    expect(true, f"The inputs do not fit together: {what}.")


def expect_breaks(found, *rules):
    """Check that a diagnosis names the rules that are broken, and no others."""
    expect(set(found["breaks"]) == set(rules), f"{', '.join(found['breaks'])}: not what this function breaks, or not "
           "all of it.", "which line would you change? Which rule does it break before the change?")


def linear_diagnosis(function):
    """Return the diagnosis of a linear layer, checked."""
    found = diagnosis(function, x=2, w=2, dy=2)
    x, w, dy = found["x"], found["w"], found["dy"]
    expect_fit(x.shape[1] == w.shape[0], "x [b, h] and w [h, n] should have the same h")
    expect_fit(dy.shape == (x.shape[0], w.shape[1]), "dy should be [b, n]")
    return found


# %% [markdown]
# ## An example: a bias too many
#
# The *row-parallel* product is $Y = X A + b$, with $A$ split by rows and $X$ by columns. Each rank has a partial sum,
# and an all-reduce adds them up. Here is a broken one:

# %% locked="broken_rows"
BROKEN_ROWS = """
def rows(group, x, w, b):
    '''Return y [n, k] on every rank. x: [n, h/t], this rank's columns; w: [h/t, k], its rows; b: [k], whole.'''
    return group.all_reduce(x @ w + b)
"""

# %% [markdown]
# *Inputs that prove it wrong.* With one rank it is right, so take two. With $b = 0$ it is right, too, and biases begin
# as zeros: a test on a freshly initialized model sees nothing. `run_given` runs a text on ranks:

# %%
x, w, b = np.ones((1, 2)), np.ones((2, 1)), np.array([10.0])
print("right:", x @ w + b)
print("ranks:", *run_given(BROKEN_ROWS, 2, "rows", each(np.split(x, 2, 1)), each(np.split(w, 2, 0)), b).results)

# %% [markdown]
# *The rule*: `"once"`. The bias is identical on all ranks, and it enters the sum on each of them. *Repaired*:
# `group.all_reduce(x @ w) + b`.
#
# Five others are yours. Each has two cells to fill in: a *diagnosis*, a function that returns a dict with a number of
# `ranks`, the inputs that prove the function wrong on that number of ranks, and what it `breaks`, a list of rules; and
# the function, *repaired*. Inputs are the *whole* arrays; the check splits them for the ranks. The broken function must
# return a result for them, and it must be wrong. It is a good habit to use random numbers:
# `np.random.default_rng(0).normal(size=(2, 3))`.
#
# ## 1. Wrong below
#
# The *column-parallel* product: $Y = X A$, with $A$ split by columns. All ranks have the same $X$, $[b, h]$, and each
# gets its own columns of $Y$, with which it continues by itself. Its own columns of $dY$ come back. The function should
# return `y`, this rank's columns of $Y$; `dx`, the gradient of $X$, which every rank needs whole; and `dw`, the
# gradient of this rank's columns of $A$. As one process computes it: $dX = dY A^\top$ and $dA = X^\top dY$.

# %% locked="broken_columns"
BROKEN_COLUMNS = """
def columns(group, x, w, dy):
    '''Return y, dx and dw. x: [b, h], whole; w: [h, n/t] and dy: [b, n/t], this rank's columns.'''
    y = x @ w
    dx = dy @ w.T
    dw = x.T @ dy
    return y, dx, dw
"""


def linear(x, w, dy):
    """Return y, dx and dw of one process."""
    return x @ w, dy @ w.T, x.T @ dy


# %% answer="diagnose_columns"
# %%answer diagnose_columns
import numpy as np


def diagnose_columns():
    """Return {"ranks": ..., "x": [b, h], "w": [h, n], "dy": [b, n], "breaks": [...]}."""
    ### BEGIN SOLUTION
    random = np.random.default_rng(0)
    return {"ranks": 2, "x": random.normal(size=(2, 3)), "w": random.normal(size=(3, 4)),
            "dy": random.normal(size=(2, 4)), "breaks": ["conjugate"]}
    ### END SOLUTION


# %% answer="columns"
# %%answer columns
def columns(group, x, w, dy):
    """Return y, dx and dw. x: [b, h], whole; w: [h, n/t] and dy: [b, n/t], this rank's columns."""
    ### BEGIN SOLUTION
    return x @ w, group.all_reduce(dy @ w.T), x.T @ dy
    ### END SOLUTION


# %% check="check_diagnose_columns" points=3
# 1, diagnosis: the inputs prove it wrong
def columns_case(ranks, x, w, dy):
    """Return the arguments of a call, and the right result of every rank."""
    y, dx, dw = linear(x, w, dy)
    expected = list(zip(split(y, ranks), [dx] * ranks, split(dw, ranks)))
    return (x, each(split(w, ranks)), each(split(dy, ranks))), expected


found = linear_diagnosis("diagnose_columns")
args, expected = columns_case(found["ranks"], found["x"], found["w"], found["dy"])
expect(is_wrong(run_broken(BROKEN_COLUMNS, found["ranks"], "columns", args), expected),
       "With your inputs the broken function is right.", "on how many ranks is every rank's dx the whole one?")
passed("columns is wrong with these inputs")
### BEGIN HIDDEN TESTS
expect_breaks(found, "conjugate")
### END HIDDEN TESTS

# %% check="check_columns" points=3
# 1, repaired: y, dx and dw are those of one process
def check_columns(ranks, b, h, n):
    args, expected = columns_case(ranks, *draw(check_data("columns"), (b, h), (h, n), (b, n)))
    expect_results(run(ranks, "columns", *args, allow=COLLECTIVES, elements=b * h), expected, ("y", "dx", "dw"),
                   f"{n} columns",
                   "each rank's columns contribute to dx; to dw of a column only that column's rank contributes.")


check_columns(2, b=2, h=3, n=4)
check_columns(4, b=3, h=2, n=8)
passed("columns on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for ranks, n in ((1, 3), (3, 7), (5, 3), (8, 60)):
    check_columns(ranks, 2, 3, n)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A test that saw nothing
#
# The same product, but each rank needs all of $Y$, so the columns are gathered. The whole $dY$ comes back, the same on
# all ranks, and each takes its own columns. The author of this function had a test: two ranks, random $X$ and $A$, and
# a $dY$ of ones, "so that the loss is the sum of $Y$". It passed.

# %% locked="broken_gathered"
BROKEN_GATHERED = """
def gathered(group, x, w, dy):
    '''Return y [b, n], dx and dw. x: [b, h] and dy: [b, n], whole; w: [h, n/t], this rank's columns.'''
    y = group.all_gather(x @ w, axis=1)
    mine = dy[:, :w.shape[1]]
    dx = group.all_reduce(mine @ w.T)
    dw = x.T @ mine
    return y, dx, dw
"""

# %% [markdown]
# In this diagnosis, also give a second $dY$: `blind`, in which no element is zero, with which the broken function is
# *right*, with the same number of ranks (at least two) and the same `x` and `w` (which have no zeros, either).

# %% answer="diagnose_gathered"
# %%answer diagnose_gathered
import numpy as np


def diagnose_gathered():
    """Return {"ranks": ..., "x": [b, h], "w": [h, n], "dy": [b, n], "blind": [b, n], "breaks": [...]}."""
    ### BEGIN SOLUTION
    random = np.random.default_rng(0)
    return {"ranks": 2, "x": random.normal(size=(2, 3)), "w": random.normal(size=(3, 4)),
            "dy": random.normal(size=(2, 4)), "blind": np.ones((2, 4)), "breaks": ["own part"]}
    ### END SOLUTION


# %% answer="gathered"
# %%answer gathered
import numpy as np


def gathered(group, x, w, dy):
    """Return y [b, n], dx and dw. x: [b, h] and dy: [b, n], whole; w: [h, n/t], this rank's columns."""
    ### BEGIN SOLUTION
    mine = np.array_split(dy, group.size, axis=1)[group.rank]
    return group.all_gather(x @ w, axis=1), group.all_reduce(mine @ w.T), x.T @ mine
    ### END SOLUTION


# %% check="check_diagnose_gathered" points=3
# 2, diagnosis: one dy that shows the bug, and one that does not
def gathered_case(ranks, x, w, dy):
    """Return the arguments of a call, and the right result of every rank."""
    y, dx, dw = linear(x, w, dy)
    return (x, each(split(w, ranks)), dy), [(y, dx, part) for part in split(dw, ranks)]


def gathered_is_wrong(found, dy):
    """Report whether the broken function is wrong with this dy."""
    args, expected = gathered_case(found["ranks"], found["x"], found["w"], dy)
    return is_wrong(run_broken(BROKEN_GATHERED, found["ranks"], "gathered", args), expected)


found = linear_diagnosis("diagnose_gathered")
blind = numbers("blind", found.get("blind"), 2)
expect_fit(blind.shape == found["dy"].shape, "blind should be [b, n], as dy is")
expect(gathered_is_wrong(found, found["dy"]), "With your dy the broken function is right.",
       "which columns of dy does rank 1 take? They should differ from its own.")
expect(found["ranks"] > 1 and all(np.all(a != 0) for a in (found["x"], found["w"], blind)),
       "blind should be blind on at least 2 ranks, and without zeros in x, w and blind.")
expect(not gathered_is_wrong(found, blind), "With your blind dy the broken function is wrong.",
       "with which dy do the first columns look like all others?")
passed("gathered is wrong with dy, and right with blind")
### BEGIN HIDDEN TESTS
expect_breaks(found, "own part")
### END HIDDEN TESTS

# %% check="check_gathered" points=3
# 2, repaired: y, dx and dw are those of one process
def check_gathered(ranks, b, h, n):
    args, expected = gathered_case(ranks, *draw(check_data("gathered"), (b, h), (h, n), (b, n)))
    expect_results(run(ranks, "gathered", *args, allow=COLLECTIVES, elements=b * (h + n)), expected,
                   ("y", "dx", "dw"), f"{n} columns",
                   "where do a rank's columns begin, if those before it have one more than it has?")


check_gathered(2, b=2, h=3, n=4)
check_gathered(4, b=3, h=2, n=8)
passed("gathered on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for ranks, n in ((1, 3), (3, 50), (5, 6), (8, 12)):
    check_gathered(ranks, 2, 40, n)
### END HIDDEN TESTS

# %% [markdown]
# Ones are the worst upstream gradient that there is. Whether a backward takes the right elements of $dY$ (a slice, a
# transpose, a permutation) cannot be seen with them. And some backwards are zero for ones, so that a test compares
# nothing: that of softmax, $p \,(dY - \sum p \, dY)$ with $\sum p = 1$, and that of a layer norm before its gain. With
# a *random* $dY$ all elements count, each differently, and an error anywhere cancels with probability 0. This is why
# all checks of these labs draw theirs.
#
# ## 3. Tokens at the boundary
#
# The table of $V$ tokens' vectors is sharded by rows: each rank has some tokens. To look tokens up, each rank takes the
# rows that it has, leaves zeros for tokens of other ranks, and an all-reduce combines them. (A token that occurs twice
# gets two gradients.) This one works in production, where the vocabulary is padded.

# %% locked="broken_lookup"
BROKEN_LOOKUP = """
import numpy as np

def lookup(group, ids, table, dy, V):
    '''Return y [s, h] and dtable. ids: [s], tokens; table: [V/t, h], of this rank's tokens; dy: [s, h].'''
    first = group.rank * len(table)
    held = (ids >= first) & (ids < first + len(table))
    y = np.zeros(dy.shape)
    y[held] = table[ids[held] - first]
    dtable = np.zeros(table.shape)
    np.add.at(dtable, ids[held] - first, dy[held])
    return group.all_reduce(y), dtable
"""

# %% answer="diagnose_lookup"
# %%answer diagnose_lookup
import numpy as np


def diagnose_lookup():
    """Return {"ranks": ..., "ids": [s], "table": [V, h], "dy": [s, h], "breaks": [...]}."""
    ### BEGIN SOLUTION
    random = np.random.default_rng(0)
    return {"ranks": 2, "ids": np.array([2, 1, 0]), "table": random.normal(size=(3, 2)),
            "dy": random.normal(size=(3, 2)), "breaks": ["own part"]}
    ### END SOLUTION


# %% answer="lookup"
# %%answer lookup
import numpy as np


def lookup(group, ids, table, dy, V):
    """Return y [s, h] and dtable. ids: [s], tokens; table: [V/t, h], of this rank's tokens; dy: [s, h]."""
    ### BEGIN SOLUTION
    first = group.rank * (V // group.size) + min(group.rank, V % group.size)
    held = (ids >= first) & (ids < first + len(table))
    y = np.zeros(dy.shape)
    y[held] = table[ids[held] - first]
    dtable = np.zeros(table.shape)
    np.add.at(dtable, ids[held] - first, dy[held])
    return group.all_reduce(y), dtable
    ### END SOLUTION


# %% check="check_diagnose_lookup" points=3
# 3, diagnosis: the inputs prove it wrong
def lookup_case(ranks, ids, table, dy):
    """Return the arguments of a call, and the right result of every rank."""
    dtable = np.zeros(table.shape)
    np.add.at(dtable, ids, dy)
    return (ids, each(split(table, ranks, 0)), dy, len(table)), [(table[ids], part) for part in split(dtable, ranks, 0)]


found = diagnosis("diagnose_lookup", ids=1, table=2, dy=2)
expect_fit(found["ids"].dtype.kind in "iu" and found["ids"].min() >= 0 and found["ids"].max() < len(found["table"]),
           "ids should be whole numbers, from 0 up to, but not including, the length of the table")
expect_fit(found["dy"].shape == (len(found["ids"]), found["table"].shape[1]), "dy should be [s, h]")
args, expected = lookup_case(found["ranks"], found["ids"], found["table"], found["dy"])
expect(is_wrong(run_broken(BROKEN_LOOKUP, found["ranks"], "lookup", args), expected),
       "With your inputs the broken function is right.", "print `first` and len(table) of every rank, for some V.")
passed("lookup is wrong with these inputs")
### BEGIN HIDDEN TESTS
expect_breaks(found, "own part")
### END HIDDEN TESTS

# %% check="check_lookup" points=3
# 3, repaired: y and the table's gradient are those of one process
def check_lookup(ranks, V, s):
    random = check_data("lookup")
    table, dy = draw(random, (V, 3), (s, 3))
    args, expected = lookup_case(ranks, random.integers(0, V, s), table, dy)
    expect_results(run(ranks, "lookup", *args, allow=COLLECTIVES, elements=dy.size), expected, ("y", "dtable"),
                   f"{V} tokens",
                   "how many tokens have the ranks before this one, all together?")


check_lookup(2, V=6, s=5)
check_lookup(4, V=8, s=9)
passed("lookup on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for ranks, V in ((1, 3), (3, 7), (5, 3), (8, 401), (4, 6)):
    check_lookup(ranks, V, 12)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The loss is nearly right
#
# A cross-entropy that never sees all the logits (Shoeybi et al. 2019, section 3). Each rank has the logits of its own
# tokens, $z$, $[s, V/t]$. For a target token $k$ at each position, and an upstream gradient $dL$ for each position,
#
# $$L = \log \sum_j e^{z_j} - z_k, \qquad dz_j = dL \Bigl( \frac{e^{z_j}}{\sum_i e^{z_i}} - [j = k] \Bigr).$$
#
# So that no exponential overflows, a maximum is subtracted from the logits first, which changes nothing:
# $\log \sum_j e^{z_j - c} - (z_k - c)$ is the same for every $c$. Every rank has at least one token.

# %% locked="broken_loss"
BROKEN_LOSS = """
import numpy as np

def loss(group, logits, targets, dloss, first):
    '''Return loss [s] and dlogits. logits: [s, V/t], of this rank's tokens, which begin with `first`; targets: [s],
    tokens; dloss: [s].'''
    shifted = logits - logits.max(axis=1, keepdims=True)
    e = np.exp(shifted)
    total = group.all_reduce(e.sum(axis=1))
    held = targets[:, None] == first + np.arange(logits.shape[1])
    target = group.all_reduce((shifted * held).sum(axis=1))
    return np.log(total) - target, dloss[:, None] * (e / total[:, None] - held)
"""

# %% [markdown]
# When you repair it: no rank may send more than eight numbers for each position.

# %% answer="diagnose_loss"
# %%answer diagnose_loss
import numpy as np


def diagnose_loss():
    """Return {"ranks": ..., "logits": [s, V], "targets": [s], "dloss": [s], "breaks": [...]}."""
    ### BEGIN SOLUTION
    return {"ranks": 2, "logits": [[0.0, 1.0, 2.0, 3.0]], "targets": [1], "dloss": [1.5], "breaks": ["agree first"]}
    ### END SOLUTION


# %% answer="loss"
# %%answer loss
import numpy as np


def loss(group, logits, targets, dloss, first):
    """Return loss [s] and dlogits. logits: [s, V/t], of this rank's tokens, which begin with `first`; targets: [s],
    tokens; dloss: [s]."""
    ### BEGIN SOLUTION
    shifted = logits - group.all_reduce(logits.max(axis=1), op="max")[:, None]
    e = np.exp(shifted)
    total = group.all_reduce(e.sum(axis=1))
    held = targets[:, None] == first + np.arange(logits.shape[1])
    target = group.all_reduce((shifted * held).sum(axis=1))
    return np.log(total) - target, dloss[:, None] * (e / total[:, None] - held)
    ### END SOLUTION


# %% check="check_diagnose_loss" points=3
# 4, diagnosis: the inputs prove it wrong
def loss_case(ranks, logits, targets, dloss):
    """Return the arguments of a call, and the right result of every rank."""
    shifted = logits - logits.max(1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    one_hot = targets[:, None] == np.arange(logits.shape[1])
    right = np.log(np.exp(shifted).sum(1)) - (shifted * one_hot).sum(1)
    firsts = each([int(part[0]) for part in split(np.arange(logits.shape[1]), ranks)])
    args = each(split(logits, ranks)), targets, dloss, firsts
    return args, [(right, part) for part in split(dloss[:, None] * (p - one_hot), ranks)]


found = diagnosis("diagnose_loss", logits=2, targets=1, dloss=1)
s, V = found["logits"].shape
expect_fit(found["ranks"] <= V, "every rank should have at least one token")
expect_fit(found["targets"].shape == found["dloss"].shape == (s,), "targets and dloss should be [s]")
expect_fit(found["targets"].dtype.kind in "iu" and found["targets"].min() >= 0 and found["targets"].max() < V,
           "targets should be whole numbers, from 0 up to, but not including, V")
expect(np.abs(found["logits"]).max() <= 50, "The logits should not exceed 50: it goes wrong with small ones, too.")
args, expected = loss_case(*(found[name] for name in ("ranks", "logits", "targets", "dloss")))
expect(is_wrong(run_broken(BROKEN_LOSS, found["ranks"], "loss", args), expected),
       "With your inputs the broken function is right.", "what does each rank subtract? When is it the same?")
passed("loss is wrong with these inputs")
### BEGIN HIDDEN TESTS
expect_breaks(found, "agree first")
### END HIDDEN TESTS

# %% check="check_loss" points=3
# 4, repaired: the loss and its gradient are those of one process, and no logits are sent
def check_loss(ranks, V, s, size=3.0):
    random = check_data("loss")
    logits, dloss = draw(random, (s, V), (s,))
    args, expected = loss_case(ranks, size * logits, random.integers(0, V, s), dloss)
    outcome = run(ranks, "loss", *args, allow=COLLECTIVES)
    expect_results(outcome, expected, ("loss", "dlogits"), f"{V} tokens, logits of about {size:g}",
                   "all ranks subtract one and the same number at each position, the largest logit of all ranks.")
    expect_sent(outcome, 2 * 2 * s * (ranks - 1) // ranks, 8 * s, f"{s} positions", "of its logits a rank needs to "
                "send only the maximum, a sum, and at most one logit at each position.")


check_loss(2, V=24, s=3)
check_loss(4, V=48, s=2)
passed("loss on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_loss(1, 5, 3)
check_loss(3, 50, 4)
check_loss(5, 7, 3, size=1e4)
check_loss(8, 83, 2, size=0.01)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. The last batch of the epoch
#
# Data-parallel training: every replica has the gradient of its own samples, averaged over them, and all need the
# average over all samples. When samples run out, some replicas get fewer than others, and some get none. (Their
# gradient is then zero. At least one replica has samples.) This function has two bugs: in some batches it is wrong, in
# others it never ends.

# %% locked="broken_average"
BROKEN_AVERAGE = """
def average(group, gradient, samples):
    '''Return a list of the mean over all ranks' samples. gradient: 1-d, the mean over this rank's samples;
    samples: their number.'''
    if samples == 0:
        return [gradient]
    return [group.all_reduce(gradient) / group.size]
"""

# %% [markdown]
# It returns a list with one array, and so should yours. The diagnosis gives two batches for the same number of ranks:
# `samples`, with which (and `gradients`, a row for each rank) the result is wrong, and `hangs`, with which it never
# ends. Both are lists with a number for each rank. And it names both rules.

# %%
# run_given(BROKEN_AVERAGE, 2, "average", each([np.ones(2), np.ones(2)]), each([..., ...]))

# %% answer="diagnose_average"
# %%answer diagnose_average
def diagnose_average():
    """Return {"ranks": ..., "gradients": [d, N], "samples": [d], "hangs": [d], "breaks": [..., ...]}."""
    ### BEGIN SOLUTION
    return {"ranks": 2, "gradients": [[1.0, 2.0], [3.0, 5.0]], "samples": [1, 3], "hangs": [2, 0],
            "breaks": ["weights", "everyone"]}
    ### END SOLUTION


# %% answer="average"
# %%answer average
import numpy as np


def average(group, gradient, samples):
    """Return a list of the mean over all ranks' samples. gradient: 1-d, the mean over this rank's samples;
    samples: their number."""
    ### BEGIN SOLUTION
    return [group.all_reduce(gradient * samples) / group.all_reduce(np.array(float(samples)))]
    ### END SOLUTION


# %% check="check_diagnose_average" points=3
# 5, diagnosis: a batch with which it is wrong, and one with which it hangs
def average_case(gradients, samples):
    """Return the arguments of a call, and the right result of every rank."""
    right = (gradients * np.asarray(samples)[:, None]).sum(0) / sum(samples)
    return (each(list(gradients)), each([int(n) for n in samples])), [(right,)] * len(samples)


found = diagnosis("diagnose_average", gradients=2, samples=1, hangs=1)
for name in ("samples", "hangs"):
    expect_fit(found[name].dtype.kind in "iu" and found[name].min() >= 0 and found[name].max() > 0,
               f"{name} should be whole numbers, not below 0, and not all 0")
    expect_fit(len(found[name]) == len(found["gradients"]) == found["ranks"], f"gradients and {name} need a row or a "
               "number for each rank")
args, expected = average_case(found["gradients"], found["samples"])
expect(found["samples"].min() > 0, "With your samples the broken function never ends. That is the other bug.")
expect(is_wrong(run_broken(BROKEN_AVERAGE, found["ranks"], "average", args), expected),
       "With your inputs the broken function is right.", "when is the mean of the means the mean?")
expect(found["hangs"].min() == 0, f"With samples {found['hangs'].tolist()} it ends: all ranks come to the all-reduce.")
passed("average is wrong with one batch, and hangs with the other")
### BEGIN HIDDEN TESTS
expect_breaks(found, "weights", "everyone")
### END HIDDEN TESTS

# %% check="check_average" points=3
# 5, repaired: the mean over all samples, and every rank returns
def check_average(samples):
    gradients, = draw(check_data("average"), (len(samples), 4))
    args, expected = average_case(gradients * (np.asarray(samples)[:, None] > 0), samples)
    outcome = run(len(samples), "average", *args, allow=COLLECTIVES)
    expect_results(outcome, expected, ("the mean",), f"samples {samples}",
                   "over all ranks: the sum of the samples' gradients, over the number of samples.")


check_average([2, 2])
check_average([1, 3, 2, 2])
passed("average on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for samples in ([3], [1, 5, 1], [1000, 1, 7, 3, 2], [2, 0, 1], [0, 0, 0, 0, 0, 0, 0, 9]):
    check_average(samples)
### END HIDDEN TESTS

# %% [markdown]
# ## 6. Three bugs of your own
#
# You have got a page with three cases, drawn for you. (Another student may have one of them, but hardly all three.) In
# each case somebody has changed one place of `mpi_impl/` or `reference/`, and trained a small GPT on two or four ranks.
# The run ended as if all were well. The page has what is left of it: the command, what was printed, the lines of the
# ledger that are not those of the right program, and the report of `shardlab.compare` about two recordings, A of the
# right program and B of the wrong one. In the *forward* case an activation is the first tensor that differs; in the
# *backward* case a gradient; in the *step* case something that comes after the backward.
#
# How to hunt:
#
# 1. Run the command yourself, with the right program, and compare the losses and norms. When do they part? (In a
#    terminal, in the folder that contains `LICENSE`; there `python` is `.venv/bin/python`.)
# 2. The comparison names the first wrong tensor, and the last right one. Whatever computes the one from the other is
#    under suspicion. On which ranks is it wrong, and by which factor?
# 3. What does the ledger say? A message that is missing, or one too many, has a reason, and the reason stands in the
#    source. If the ledger is that of the right program, no message is missing.
# 4. Form a hypothesis: *this* line, changed like *that*. Change it in a copy of Shardlab, run the command again, and
#    compare with the page. You have found it when losses, norms and the first differing element are the same.
#
# For practice there are as many other bugs as you like: in a clone of Shardlab, `python -m benchmarks.bug_matrix.hunt
# ANYNAME` plants one in the program itself (see `benchmarks/README.md`). Yours cannot be drawn that way.
#
# Return for each case the `file`, as in `mpi_impl/layers/mlp.py`; the number of a changed `line`, as the right file has
# it; and the `kind` of the bug, the first of these that fits: missing communication, extra communication, wrong group,
# scaling (a factor is wrong or missing), aliasing (an array is used where a copy is needed, or a copy where the array
# itself is), random numbers, scheduling (the right work at a wrong time), state and checkpoint, memory, computation
# (all else). The kind scores only if the line is right. The check here looks only at the form of your answer: your
# notebook does not know your bugs.

# %% locked="case_tools"
def case(name):
    """Return an answer to a case, checked: the file, the line and the kind of a bug."""
    found, = run(None, name).results
    keys = ("file", "line", "kind")
    expect(isinstance(found, dict) and set(keys) <= set(found), f"{name}: expected a dict with {', '.join(keys)}; got "
           f"{sorted(found, key=str) if isinstance(found, dict) else type(found).__name__}.")
    file, line, kind = (found[key] for key in keys)
    expect(type(file) is str and PATH.fullmatch(file), f"{name}: file is {str(file)[:100]!r}, but should be a path "
           "such as 'mpi_impl/layers/mlp.py'.")
    expect(type(line) is int and line > 0, f"{name}: line is {str(line)[:100]!r}, but should be the number of a line.")
    expect(type(kind) is str and kind in KINDS, f"{name}: kind is {str(kind)[:100]!r}, but should be one of "
           f"{', '.join(KINDS)}.")
    return file, line, kind


# %% answer="case_forward"
# %%answer case_forward
def case_forward():
    """Return {"file": ..., "line": ..., "kind": ...}."""
    ### BEGIN SOLUTION
    return {"file": "mpi_impl/comm/regions.py", "line": 33, "kind": "missing communication"}
    ### END SOLUTION


# %% check="check_case_forward_file" points=4
# The forward case: the file
file, _, _ = case("case_forward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_file("forward", file)
### END HIDDEN TESTS

# %% check="check_case_forward_line" points=4
# The forward case: the line
file, line, _ = case("case_forward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_line("forward", file, line)
### END HIDDEN TESTS

# %% check="check_case_forward_kind" points=2
# The forward case: the kind
file, line, kind = case("case_forward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_kind("forward", file, line, kind)
### END HIDDEN TESTS

# %% answer="case_backward"
# %%answer case_backward
def case_backward():
    """Return {"file": ..., "line": ..., "kind": ...}."""
    ### BEGIN SOLUTION
    return {"file": "mpi_impl/layers/mlp.py", "line": 21, "kind": "computation"}
    ### END SOLUTION


# %% check="check_case_backward_file" points=4
# The backward case: the file
file, _, _ = case("case_backward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_file("backward", file)
### END HIDDEN TESTS

# %% check="check_case_backward_line" points=4
# The backward case: the line
file, line, _ = case("case_backward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_line("backward", file, line)
### END HIDDEN TESTS

# %% check="check_case_backward_kind" points=2
# The backward case: the kind
file, line, kind = case("case_backward")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_kind("backward", file, line, kind)
### END HIDDEN TESTS

# %% answer="case_step"
# %%answer case_step
def case_step():
    """Return {"file": ..., "line": ..., "kind": ...}."""
    ### BEGIN SOLUTION
    return {"file": "mpi_impl/training/optimizer.py", "line": 34, "kind": "scaling"}
    ### END SOLUTION


# %% check="check_case_step_file" points=4
# The step case: the file
file, _, _ = case("case_step")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_file("step", file)
### END HIDDEN TESTS

# %% check="check_case_step_line" points=4
# The step case: the line
file, line, _ = case("case_step")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_line("step", file, line)
### END HIDDEN TESTS

# %% check="check_case_step_kind" points=2
# The step case: the kind
file, line, kind = case("case_step")
passed("the form is right")
### BEGIN HIDDEN TESTS
expect_kind("step", file, line, kind)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - Which of the five would you see in the training loss of the first 100 steps? Which would you see only if you trained
#   the same model on another number of ranks?
# - In the repaired functions, what would a rank that draws its own dropout mask for `x` in `columns` break? Which of
#   the rules is it, and which results stay right?
# - Suppose that you have only one test for a sharded layer of your own. Which sizes, how many ranks, which inputs?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Choose one of the bugs and write the report that you would like to receive from a colleague:
# what was run, what was expected and found, the smallest inputs, the rule that is broken, the cause in one sentence,
# the repair, and the test that will keep it out.

# %% [markdown] writing="a_bug_report" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). For each of the five bugs, say whether the loss of a training run would show it, within how
# many steps, and compared with what. Which kind of test would have found all five before the first step? What can
# that test not find?

# %% [markdown] writing="what_a_loss_curve_hides" points=5
# YOUR ANSWER HERE
