# %% [markdown]
# # 14. What is a proof?
#
# Again and again we have compared sharded with unsharded, and printed "off by less than 1e-12: True". That is good
# evidence. But this project's README speaks of a *proof* that the two are equal. Is that one? And what can hide below
# 1e-12?
#
# **You will** plant two bugs that tests with floats do not see; find out why two different polynomials hardly ever
# meet; write numbers without rounding in twenty lines; prove a split for *every* activation function, known or unknown;
# and prove a whole layer, forward and backward, on real ranks, with the chance that the proof is wrong.
#
# **You need** walkthroughs *Splitting matrices* and *A block on real ranks*, polynomials from school, and remainders:
# 17 modulo 5 is 2. About 60 minutes.

# %%
# %load_ext shardlab.notebook
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.polynomials import draw_chances, draw_differences, draw_meetings
from shardlab.notebook.predictions import reveal
from reference import ops
from reference.comm.regions import TENSOR_PARALLEL
from reference.config import ModelConfig
from reference.layers.mlp import mlp_forward, mlp_tensors, sharded_mlp_forward
from reference.params import leaves, split, tree_map, with_names

t, b, s, h = 4, 1, 4, 8
c = ModelConfig(num_layers=1, hidden_size=h, num_attention_heads=4, vocab_size=1, max_position_embeddings=s,
                hidden_dropout=0.2, attention_dropout=0.2, layernorm_epsilon=1e-12)
random = np.random.default_rng(11)

# %% [markdown]
# ## Equal to 1e-11
#
# The MLP of walkthrough *Splitting matrices*, whole and on four ranks (in one process, with lists). `bug` multiplies
# the bias that each rank adds after the sum. With 1 there is no bug:

# %%
mlp = mlp_tensors(c)

def on_four_ranks(x, p, bug=1):
    shards = [replace(shard, b_out=bug * shard.b_out) for shard in split(p, mlp, t)]
    ys, _ = sharded_mlp_forward([x] * t, shards, c, TENSOR_PARALLEL)
    return ys[0]

def off(found, expected):
    """Return the largest difference, relative to the largest element."""
    return np.abs(found - expected).max() / np.abs(expected).max()

x, p = random.normal(size=(b, s, h)), tree_map(lambda tensor: random.normal(size=tensor.shape), mlp)
y, _ = mlp_forward(x, p, c)
print("off by less than 1e-11:", off(on_four_ranks(x, p), y) < 1e-11)
print("equal, to the last bit:", np.array_equal(on_four_ranks(x, p), y))

# %% [markdown]
# The code is right, and the results are not equal. Four ranks add up the same terms in another order, and with floats
# the order of a sum matters:
#
# **Predict.** Three floats are added up in all six orders, from left to right. A sum of *two* floats does not depend on
# their order. How many different results can there be, at most?

# %%
guess = ...                # results

# %% tags=["hide-output"]
from itertools import permutations

print(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1)
results = max(len({x + y + z for x, y, z in permutations(three)}) for three in random.normal(size=(10_000, 3)).tolist())
reveal(guess, results, "different results, at most, of 10,000 times three random floats")

terms = random.normal(size=1000)
sums = {np.add.accumulate(random.permutation(terms))[-1] for _ in range(1000)}
print(f"1,000 floats in 1,000 orders: {len(sums)} different results")

# %% [markdown]
# So a test with floats needs a tolerance. Everything that is smaller than the tolerance passes. Suppose that somebody
# tried something out late at night and did not take it back:

# %%
print("bias times 1 + 2^-50, off by less than 1e-11:", off(on_four_ranks(x, p, 1 + 2**-50), y) < 1e-11)

# %% [markdown]
# The test is silent. A smaller tolerance does not help: this bug is as small as the rounding itself.
#
# "Who cares about $2^{-50}$?" Nobody. But the size of a bug *in a test* is not its size in training. BERT's layer norm
# divides by $\sqrt{\mathrm{variance} + 10^{-12}}$. Suppose that we mistype it as $10^{-13}$. The test draws rows with a
# variance near 1. A year later, a row comes by whose numbers are nearly equal:

# %%
def off_by_the_typo(x):
    right, wrong = (ops.layer_norm(x, np.ones(h), np.zeros(h), epsilon)[0] for epsilon in (1e-12, 1e-13))
    return off(wrong, right)

print("numbers as in the test: off by less than 1e-11:", off_by_the_typo(random.normal(size=h)) < 1e-11)
print(f"numbers nearly equal:   off by {off_by_the_typo(5 + 1e-6 * (-1.0)**np.arange(h)):.0%}")

# %% [markdown]
# The test was silent because it did not look where the bug is, and no test can look everywhere. We want to compare the
# two *formulas*: one test that speaks for all numbers.
#
# ## Two polynomials hardly ever meet
#
# Let us begin with formulas that consist of $+$, $-$ and $\times$: polynomials. Take two of degree $D$ at most. They
# are equal where their difference is 0. The difference is a polynomial, too, and one of degree $D$ has at most $D$
# zeros, unless it is 0 everywhere. So:
#
# > Two polynomials of degree $D$ are the same, or they agree at no more than $D$ points.
#
# There is nothing in between. Two functions that agree at $D + 1$ points, and are such polynomials, agree everywhere.
# If we choose *one* point at random, among very many, then different polynomials will almost certainly differ there.
# One look is enough!
#
# With real numbers this is of little use: to differ may mean to differ by $10^{-20}$, and we are back at the tolerance.
# We need numbers without "nearly". There are such numbers: 0, 1, ..., $P - 1$ for a prime $P$, where every result is
# replaced by its remainder modulo $P$. Nothing is rounded, and the sentence about zeros remains true. Here are a
# straight line and a cubic modulo 101, at all 101 points:
#
# **Predict.** At how many of the 101 points can they agree, at most?

# %%
guess = ...                # points

# %% tags=["hide-output"]
P = 101

def values(coefficients):
    """Return the values of a polynomial at 0, 1, ..., P - 1. The constant comes first."""
    return [sum(a * x**i for i, a in enumerate(coefficients)) % P for x in range(P)]

line, cubic = values([17, 40]), values([52, 64, 58, 1])
assert sum(later < earlier for earlier, later in zip(line, line[1:])) == 39
reveal(guess, sum(y == other for y, other in zip(line, cubic)), "points at which they agree")
draw_meetings(line, cubic, ("17 + 40 x", "52 + 64 x + 58 x² + x³"),
              "a straight line and a cubic, modulo 101")

# %% [markdown]
# (The blue points *are* a straight line. It leaves the picture at the top and comes in again below, 39 times. Blue and
# orange points that are neighbours mean nothing: one pair of numbers is no more equal than another. That is the beauty
# of it.)
#
# The two meet 3 times, and could not meet more often. With a larger $P$ there are more points, but no more meetings. So
# the chance to be deceived is at most $D / P$. Do we believe that? For each $P$ we draw 300 pairs of cubics, and for
# each pair count all points where they agree. The largest count:

# %%
primes = [11, 31, 101, 307, 1009, 3001]

def most_meetings(P, pairs=300):
    """Return the largest number of points at which a pair agrees: at which its difference is 0."""
    x, difference = np.arange(P), 0
    for coefficient in random.integers(1, P, size=(4, pairs, 1)):
        difference = (difference * x + coefficient) % P         # Horner's rule
    return (difference == 0).sum(1).max()

most = [most_meetings(P) for P in primes]
print("most meetings of two cubics:", *most)

# %%
six_of_49 = 1 / 13_983_816
draw_chances(3, {P: found / P for P, found in zip(primes, most)},
             {"$2^{61} - 1$": 2**61 - 1, "$2^{127} - 1$": 2**127 - 1},
             {"six right in a lottery of 49": six_of_49, "... and again next week": six_of_49**2,
              "six right, five weeks in a row": six_of_49**5}, "how likely it is that two different cubics agree")

# %% [markdown]
# $2^{61} - 1$ and $2^{127} - 1$ are primes. With the latter, you will sooner win the jackpot five weeks in a row than
# take two different cubics for the same. (If it happens to you all the same, buy a ticket.)
#
# Polynomials of *many* variables may meet at very many points: $x_1$ and $x_2$ do wherever $x_1 = x_2$. But the chance
# remains: if all variables are random, it is at most $D / P$. $D$ is now the largest number of variables that are
# multiplied with one another in a term ([Schwartz 1980](https://doi.org/10.1145/322217.322225), [Zippel
# 1979](https://doi.org/10.1007/3-540-09519-5_73)). How many variables there are does not matter, and that is the key: a
# layer has as many as inputs and weights.
#
# ## The field in twenty lines
#
# $+$, $-$ and $\times$ are easy. And we can divide: modulo a prime each number but 0 has exactly one inverse, and
# Python knows it, `pow(a, -1, P)`. A float is a fraction of whole numbers, $a / 2^k$, so it is one of our numbers, too.

# %%
class Number:
    """A number modulo P."""

    def __init__(self, x):
        above, below = x.as_integer_ratio()          # of 3 these are 3 and 1, of 0.75 they are 3 and 4
        self.rest = above * pow(below, -1, P) % P

    def __add__(self, other):
        return Number(self.rest + other.rest)

    def __sub__(self, other):
        return Number(self.rest - other.rest)

    def __mul__(self, other):
        return Number(self.rest * other.rest)

    def __truediv__(self, other):
        return Number(self.rest * pow(other.rest, -1, P))

    def __eq__(self, other):
        return self.rest == other.rest

# %%
half = Number(0.5)
print("modulo 101, 1/2 is", half.rest, "and 1/2 + 1/2 is", (half + half).rest)

# %% [markdown]
# Now with a prime that is large enough for us. NumPy adds and multiplies whatever we put into its arrays, even these:

# %%
from random import Random

P, dice = 2**127 - 1, Random(11)

def draw(*shape):
    """Draw numbers modulo P, all equally likely."""
    return np.array([Number(dice.randrange(P)) for _ in range(np.prod(shape))]).reshape(shape)

X, A, B = draw(6, h), draw(h, 4 * h), draw(4 * h, h)
Y = X @ A
by_columns = np.concatenate([X @ a for a in np.split(A, t, axis=1)], axis=1)
by_rows = np.sum([x @ a for x, a in zip(np.split(X, t, axis=1), np.split(A, t, axis=0))], axis=0)
print("by columns, equal:", (by_columns == Y).all())
print("by rows, equal:   ", (by_rows == Y).all())

# %% [markdown]
# No tolerance. `==` means equal, and one random draw has shown it for *all* matrices of this shape, but for a chance of
# $2 / P$ (the degree is 2, $X$ times $A$). The order of a sum is of no importance any more, and the bug of the late
# night is as visible as any other:

# %%
terms = draw(1000)
sums = {np.add.reduce(random.permutation(terms)).rest for _ in range(100)}
print("1,000 numbers, added up in 100 orders:", len(sums), "sum")

bias = draw(4 * h)
print("bias times 1 + 2^-50:", (Y + bias * Number(1 + 2**-50) != Y + bias).sum(), "of", Y.size, "elements differ")

# %% [markdown]
# One thing takes some getting used to:

# %%
one, two, three, ten = (Number(n) for n in (1, 2, 3, 10))
print("1/10 + 2/10 = 3/10:", one / ten + two / ten == three / ten)
print("0.1 + 0.2 = 0.3:   ", Number(0.1) + Number(0.2) == Number(0.3))
assert (0.1).as_integer_ratio() == (3602879701896397, 2**55)

# %% [markdown]
# The second is not a mistake. There is no float 0.1: if you write it, you get the nearest fraction whose denominator is
# a power of 2, 3602879701896397 / $2^{55}$. A program that says 0.1 means that number, and the field takes the program
# at its word.
#
# ## Functions that are no polynomials
#
# An MLP has GeLU between its products, attention has exp, a layer norm has a root. What is the GeLU of a number modulo
# $P$? There is none. But do we need it? The split by columns was right *whatever* the function is. So let us take a
# **random function**: for each new argument it rolls dice; for an argument that it has seen it returns the same as
# then. A hash function does that without remembering anything, and so it does the same on every rank:
#
# **Predict.** The result has 48 elements. In how many will rows first, the trap of walkthrough *Splitting matrices*,
# differ?

# %%
guess = ...                # elements

# %% tags=["hide-output"]
from hashlib import sha256

def random_value(x):
    return Number(int(sha256(str(x.rest).encode()).hexdigest(), 16))

f = np.frompyfunc(random_value, 1, 1)       # for arrays, element by element

right = f(X @ A) @ B
columns_first = np.sum([f(X @ a) @ b for a, b in zip(np.split(A, t, axis=1), np.split(B, t, axis=0))], axis=0)
rows_first = np.sum([f(x @ a) @ B for x, a in zip(np.split(X, t, axis=1), np.split(A, t, axis=0))], axis=0)
print("columns first:", (columns_first != right).sum(), "of", right.size, "elements differ")
print("rows first:   ", (rows_first != right).sum(), "of", right.size, "elements differ")
assert right.size == 48
reveal(guess, (rows_first != right).sum(), "of 48 elements differ with rows first")

# %% [markdown]
# Nobody has told this cell what GeLU is. It has proved the split for all activation functions, those that somebody will
# invent next week included. Why is that allowed? The values of $f$ at different arguments are independent random
# numbers, so they are nothing but *more variables* of our polynomial. If two computations ask for $f$ of the same
# formula, they get the same variable. If they ask for it of different formulas, they get different ones, and the
# results differ. That is how the trap of walkthrough *Splitting matrices*, rows first, was caught.
#
# ## Softmax in tiles, and one law
#
# There is a price. A random function obeys no laws. Code that is right *because of* a law of exp will look wrong.
#
# Is there such code? Softmax divides $e^{x_i - m}$ by their sum, where $m$ is the largest $x_i$. Kernels such as
# FlashAttention go over a row in tiles. They do not know the largest yet, so they take the largest so far. When a
# larger one comes, they multiply what they have by $e^{m_\mathrm{old} - m_\mathrm{new}}$. That is right because of
#
# $$e^{a - b} \cdot e^{b - c} = e^{a - c}.$$
#
# So this one law must hold. It does if the exponential of a *difference* is a quotient, $E(a) / E(b)$ with a random
# function $E$:

# %%
def exp_of_difference(a, b):
    return f(a) / f(b)

u, v, w = draw(3)
print("random exp:    ", f(u - v) * f(v - w) == f(u - w))
print("exp with a law:", exp_of_difference(u, v) * exp_of_difference(v, w) == exp_of_difference(u, w))

# %% [markdown]
# `reference/exact/` has all this, for arrays. An `ExactArray` behaves like a NumPy array of float64, and knows a bound
# of its degree. A difference in it remembers its two terms, until the next operation, so that `np.exp` can obey the
# law. Nothing else is assumed about exp. Softmax in one go and in tiles, written for floats and run on both:

# %%
from reference.exact.array import random_array

def in_one_go(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()

def in_tiles(x, n):
    largest, total = -np.inf, 0.0
    for tile in np.split(x, len(x) // n):
        new = np.maximum(largest, tile.max())
        total = total * np.exp(largest - new) + np.exp(tile - new).sum()
        largest = new
    return np.exp(x - largest) / total

row, exact_row = random.normal(size=12), random_array((12,), "a row")
for n in 4, 1:
    print(f"{12 // n:2} tiles: floats off by less than 1e-12: {off(in_tiles(row, n), in_one_go(row)) < 1e-12};",
          f"exact numbers equal: {(in_tiles(exact_row, n) == in_one_go(exact_row)).all()}")

# %% [markdown]
# And which of two numbers modulo $P$ is the larger one? Neither. `np.maximum` goes by a random order. That is good
# enough, since a softmax is the same whatever one subtracts. (Floats subtract the largest so that nothing overflows.
# Here nothing can.) Only $-\infty$, with which attention masks the future, is really below all others, and its
# exponential is really 0.
#
# ## A whole layer
#
# Now the code that this project is about, unchanged: the textbook's block, with norms, attention, dropout, MLP, forward
# and backward. All weights, the input, and the gradient that comes from above are random numbers modulo $P$:

# %%
from reference.random.dropout import Dropout
from reference.exact.degree import TALLY, Tally
from reference.layer_context import LayerContext
from reference.layers.block import block_backward, block_forward, block_tensors

tensors, context = block_tensors(c), LayerContext(Dropout(c, seed=1, step=0, layer=0))
whole = tree_map(lambda named: random_array(named.leaf.shape, named.name), with_names(tensors))
x, dy = random_array((1, s, h), "x"), random_array((1, s, h), "dy")

TALLY.evaluations = TALLY.degree = 0        # it counts what is computed from here on
y, cache = block_forward(x, whole, c, context)
dx, grads = block_backward(dy, whole, cache, c)

variables = x.size + dy.size + sum(tensor.size for _, tensor in leaves(whole))
print(f"{variables} variables, and {TALLY.evaluations} values of random functions")
print(f"polynomials of degree {TALLY.degree:,} at most, in the numerators and denominators")

# %% [markdown]
# Nobody would want to write these formulas down, and we need not: we only compare them at a point. The other side of
# the equation is the machine, on four real processes. Each takes its shard; what it sends goes through the same `group`
# as always:

# %%
ranks["c"], ranks["x"], ranks["dy"], ranks["whole"] = c, x, dy, whole

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.random.dropout import Dropout
from reference.exact.degree import TALLY
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.params import split, tree_map

tensors = block_tensors(c)

def layer(x, dy, whole, c=c, place=rank):
    """Run this rank's shard of the block, forward and backward; or the shard of a rank in another place."""
    region, p = TensorParallelRegion(group), split(whole, tensors, size)[place]
    region.rank = place
    y, cache = block_forward(x, p, c, region, LayerContext(Dropout(c, seed=1, step=0, layer=0)))
    grads = tree_map(np.zeros_like, p)
    dx = block_backward(dy, p, cache, c, grads, ImmediateSink(), region)
    return y, dx, grads

TALLY.evaluations = TALLY.degree = 0
y, dx, grads = layer(x, dy, whole)
print("gradients of W of Q, K and V", grads.attention.w_qkv.shape)

# %%
def by_name(y, dx, grads):
    """Return a rank's results."""
    return {"y": y, "dx": dx} | {f"gradient of {name}": grad for name, grad in leaves(grads)}

expected = [by_name(y, dx, shard) for shard in split(grads, tensors, t)]
found = [by_name(*results) for results in zip(ranks["y"], ranks["dx"], ranks["grads"])]
for name in expected[0]:
    differ = sum((mine[name] != right[name]).sum() for mine, right in zip(found, expected))
    print(f"{name:46} on 4 ranks: {differ} of {sum(mine[name].size for mine in found)} elements differ")

# %% [markdown]
# Every element of every tensor is equal. How likely is it that this is a coincidence? For polynomials the bound was
# $D/P$. Here it is larger, for two reasons. A layer divides, so its results are fractions. Two different fractions,
# with polynomials of degree $M$, differ by a fraction whose numerator has degree $2M$. And the arguments of two of $T$
# values of random functions could be equal by coincidence. There are $T(T-1)/2$ pairs of values, so the chance is at
# most
#
# $$\left(1 + \frac{T (T - 1)}{2}\right) \frac{2M}{P}.$$
#
# Every sum, product and quotient bounds the degree of its result; `reference/exact/degree.py` explains how. The tallies
# of one process and of four ranks together:

# %%
tallies = [TALLY, *ranks["TALLY"]]
together = Tally(sum(one.evaluations for one in tallies), max(one.degree for one in tallies))
below = f"1e{np.ceil(np.log10(together.chance_of_error())):.0f}"
print(f"proved: {len(expected[0])} tensors of a layer are the same formulas on {t} ranks as in one process;",
      f"chance of error below {below}")

# %% [markdown]
# It took less time than it takes to read this. And it is not about one input, as the test with floats was. It is about
# all inputs, all weights, whatever function the root is, and whatever function exp is that obeys the law.
#
# ## A proof that cannot fail proves nothing
#
# Does it find bugs? We run the layer on the ranks in five ways, on floats and on exact numbers. The first two are
# right: in the second the ranks have changed places. In the last the bias is added *before* the sum, and so four times:

# %%
ranks["floats"] = floats = [*random.normal(size=(2, 1, s, h)), tree_map(lambda tensor: random.normal(size=tensor.shape),
                                                                       tensors)]
ranks["exact"] = [x, dy, whole]

# %%
# %%ranks 4
from dataclasses import replace

def with_bias(whole, factor):
    return replace(whole, mlp=replace(whole.mlp, b_out=factor * whole.mlp.b_out))

def in_five_ways(x, dy, whole):
    """Return this rank's y for each way."""
    runs = {"no bug": layer(x, dy, whole),
            "no bug, the ranks changed places": layer(x, dy, whole, place=(rank + 1) % size),
            "bias times 1 + 2^-50": layer(x, dy, with_bias(whole, 1 + 2**-50)),
            "epsilon 1e-13, not 1e-12": layer(x, dy, whole, replace(c, layernorm_epsilon=1e-13)),
            "bias added before the sum": layer(x, dy, with_bias(whole, size))}
    return {name: y for name, (y, _, _) in runs.items()}

in_floats, in_exact = in_five_ways(*floats), in_five_ways(*exact)

# %%
y_floats = block_forward(floats[0], floats[2], c, context)[0]
found = {name: (off(mine, y_floats), (ranks["in_exact"][0][name] != y).sum())
         for name, mine in ranks["in_floats"][0].items()}
for name, (difference, differ) in found.items():
    print(f"{name:32}  floats: {'silent' if difference < 1e-11 else 'CAUGHT'}   exact:",
          f"{'CAUGHT' if differ else 'silent'}, {differ:2} of {y.size} elements differ")
draw_differences({name: (difference, differ > 0) for name, (difference, differ) in found.items()}, 1e-11)

# %% [markdown]
# Look at the second row and at the third. With floats, right code in another order and a real bug are about equally far
# off. No tolerance, however clever, accepts the one and rejects the other. Exact numbers tell them apart. (Why not all
# 32 elements? Dropout has removed it from the others.)
#
# ## What is not proved
#
# A good proof says what it does not say.
#
# - **Rounding.** The formulas are equal; the floats are not. Whether float16 overflows, whether a small update is lost
#   (walkthrough *Precision*), whether a sum loses its digits: nothing of this exists modulo $P$. So the tests with
#   floats remain.
# - **Other shapes.** This was $h = 8$ on 4 ranks. The tests of this project draw many shapes and topologies, but not
#   all, and certainly not $h = 12{,}288$.
# - **Branches that were not taken.** ReLU, a maximum, the clipping of gradients: a comparison has an outcome, by the
#   random order, and the proof is of that outcome.
# - **Other code.** The compiled kernels, the GPU's, and the sums inside MPI cannot do exact numbers. Here the ranks
#   used the textbook's kernels, and the group added up by itself. The fast ones are compared with floats.
# - **The hash.** We believe that a hash function behaves like a random one. If you find a pair of formulas for which it
#   does not, you have broken a standard of cryptography. Tell more people than your teacher.
# - **Laws.** Code that needs another law than that of exp, say $\log e^x = x$, is reported as different. That is a
#   false alarm. It is never a false proof.
# - **A textbook that is wrong in the same way.** If both sides forget the root of $d$ in attention, both are the same
#   formula, and it is proved. Are the gradients derivatives at all? Is it the model of the paper? Other tests have to
#   ask that: central differences, and the logits of published models.
# - **The rest**, which is the chance. Should it be too large for you, draw again: the second draw is independent, so
#   the chances are multiplied.
#
# Is that still a proof? A mathematician would want a chance of 0. But a proof of 100 pages is read by three tired
# referees, and the chance that all three miss a gap is not 1e-29.
#
# ## What to take away
#
# | | floats | exact numbers |
# |---|---|---|
# | "equal" means | closer than a tolerance | equal |
# | another order of a sum | is another result | is the same result |
# | a bug of 1 part in $2^{50}$ | is silent | is caught |
# | one draw speaks about | this input | all inputs, up to a chance that is stated |
# | exp, GeLU, roots | are what they are | are any functions, with one law for exp |
# | rounding, overflow | are seen | do not exist |
#
# - Different polynomials of degree $D$ agree at a random point with a chance of at most $D / P$, with however many
#   variables.
# - A bug that a test does not see is not necessarily small. It may only be elsewhere.
# - Plant bugs. A test that has never failed has not shown that it can.
#
# ## Try it
#
# 1. Set `P` to 101 in the cell that draws $X$, $A$ and $B$, and run it and the one with `rows_first`. Is the trap still
#    caught? How likely is it that one *element* does not show it? (Then set `P` back.)
#
# <details><summary>Answer</summary>
#
# It is caught: one element that differs is enough. About one element in 101 agrees by coincidence, so of 48 sometimes
# none, sometimes one or two. Do not rely on the others: a bug may touch a single element, and then one test in 101
# misses it.
#
# </details>
#
# 2. $x^{101}$ and $x$ are different polynomials. At how many points do they agree modulo 101? (`values` and
#    `draw_meetings` show it.) Why is that no contradiction to the sentence about $D$ points?
#
# <details><summary>Answer</summary>
#
# At all 101 points: that is Fermat's little theorem. They may agree at $D = 101$ points, and there are no more. The
# bound $D / P$ is 1, so it promises nothing. That is why $P$ has to be much larger than every degree.
#
# </details>
#
# 3. Is $\sin^2 x + \cos^2 x = 1$? Ask a `random_array`. Is the answer a proof, or a false alarm?
#
# <details><summary>Answer</summary>
#
# `(np.sin(x)**2 + np.cos(x)**2 == 1).any()` is False. It is a false alarm: sine and cosine are two random functions
# here, and know nothing of each other. What would you change in `reference/exact/` so that they do? (The law of exp
# shows how: choose values that obey it.)
#
# </details>
#
# 4. Set `activation="relu"` in `c`, and run everything again. What does the comparison `x > 0` mean modulo $P$, and
#    what exactly is proved then?
#
# <details><summary>Answer</summary>
#
# The numbers have a random order, the same on all ranks, and `x > 0` asks for the places of $x$ and 0 in it. Both sides
# of the equation take the same branches, and with these branches they are the same formulas. Another seed takes other
# branches.
#
# </details>
#
# 5. Prove sequence parallelism: on the ranks use `SequenceParallelRegion(group)`, and positions `x[:, rank:rank + 1]`
#    and `dy[:, rank:rank + 1]`. Which gradients differ, and why is that right? (Walkthrough *Sequence parallelism* has
#    the answer.)
#
# <details><summary>Answer</summary>
#
# Those of the replicated tensors: the gains and biases of the norms, and the biases after *g*. Each rank has seen one
# position, and holds a partial sum. After an all-reduce of each they are equal. Exact numbers do not say "nearly" even
# where a sum is nearly complete.
#
# </details>
#
# 6. Harder: turn the tables. Find a bug that floats cannot miss and exact numbers cannot see, by changing only the
#    factor in `with_bias`. What does it tell you about the sentence "they are the same formulas"?
#
# <details><summary>Answer</summary>
#
# The factor `P + 1`, with the project's prime: `from reference.exact.degree import P`. It is 1 modulo $P$; with floats
# it makes a bias of $10^{38}$. What we prove is that formulas are the same *modulo P*: their coefficients may differ by
# multiples of $P$. No sane program contains such a number. A proof with a second prime would notice. So would a test
# with floats, and that is the reason why this project has both.
#
# </details>
#
# A whole run is proved by one command, with the options of training:
#
# ```bash
# .venv/bin/shardlab run -n 8 prove --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
#     --pipeline-schedule zb-h1 --zero-stage 2
# ```
#
# [What is proved, and what is not](../docs/proof.md) tells you how. The method is that of a verifier of GPU kernels,
# Mirage ([Wu et al. 2025](https://arxiv.org/abs/2405.05751), section 5). The labs let you build the
# pieces yourself.
#
# Next: [15. Long sequences: positions dealt out to ranks](15_long_sequences.ipynb).
