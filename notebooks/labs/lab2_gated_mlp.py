# %% [markdown]
# # Lab 2. A gated MLP, sharded by columns and rows
#
# Megatron-LM shards the MLP of a transformer so that the ranks add up once forward and once backward ([Shoeybi et al.
# 2019](https://arxiv.org/abs/1909.08053), section 3). Newer models have another MLP, with three matrices and a product
# of two branches. In this lab you shard that one, with its biases, for any inner size and any number of ranks; write
# *f* and *g*; and then replace them by sequence parallelism.
#
# **You need**: walkthroughs 1 and 2, and for the last task what walkthrough 5 says about sequence parallelism.
# **Time**: about five hours. **Points**: 60.
#
# Labs work as lab 1 explains: cells that begin with `%%answer` are yours, checks run them on separate ranks, and the
# checks that give the points also try other sizes and numbers of ranks. An answer may use functions of other answers,
# but nothing from the locked cells or this project's packages.

# %%
# %load_ext grading
import numpy as np

from grading import each, run

# %% [markdown]
# ## The layer
#
# The input is $X$, of shape $[b, s, h]$: $b$ samples of $s$ positions, $h$ numbers for each. With an inner size $F$ the
# layer is (Shazeer 2020, *GLU Variants Improve Transformer*, [arXiv 2002.05202](https://arxiv.org/abs/2002.05202),
# section 2, there called SwiGLU and without biases)
#
# $$Y = \big(\mathrm{SiLU}(X G + \gamma) \odot (X U + \mu)\big)\, D + \delta, \qquad
# \mathrm{SiLU}(z) = \frac{z}{1 + e^{-z}}.$$
#
# $G$ is the *gate*, $U$ goes *up* to $F$ columns, $D$ goes *down* to $h$ again, and $\odot$ multiplies element by
# element. As in Megatron-LM, $G$ and $U$ are stored as **one** matrix, $G$ left and $U$ right, so that one product
# computes both branches. A layer's parameters are a dict:
#
# | key | shape | what |
# |---|---|---|
# | `"GU"` | $[h, 2F]$ | $G$ in the first $F$ columns, $U$ in the last $F$ |
# | `"bias_GU"` | $[2F]$ | $\gamma$, then $\mu$ |
# | `"D"` | $[F, h]$ | |
# | `"bias_D"` | $[h]$ | $\delta$ |
#
# This is the whole layer with its backward, on one process. Your ranks must agree with it. With $a = \mathrm{SiLU}(z)$
# and $\sigma = 1 / (1 + e^{-z})$, the slope of SiLU is $\sigma\,(1 + z\,(1 - \sigma))$.

# %% locked="whole"
import numpy as np

from grading import check_data, each, expect, expect_dicts, expect_equal, expect_values, passed, run


def silu(z):
    """Return SiLU and its slope. tanh, unlike exp, does not overflow."""
    sigma = (1 + np.tanh(z / 2)) / 2
    return z * sigma, sigma * (1 + z * (1 - sigma))


def flat(x):
    """Reshape [b, s, n] to [b s, n], also for n = 0."""
    b, s, n = x.shape
    return x.reshape(b * s, n)


def whole_mlp(x, p, dy):
    """Return y, dx, and the gradients, a dict like p. x: [b, s, h]; dy: the upstream gradient [b, s, h]."""
    gate, up = np.split(x @ p["GU"] + p["bias_GU"], 2, -1)                      # [b, s, F] each
    act, slope = silu(gate)
    y = (act * up) @ p["D"] + p["bias_D"]                                       # [b, s, h]
    dprod = dy @ p["D"].T                                                       # forward: y = (act * up) @ D + bias_D
    dgu = np.concatenate([dprod * up * slope, dprod * act], -1)                 # [b, s, 2F]
    grads = {"GU": flat(x).T @ flat(dgu), "bias_GU": flat(dgu).sum(0),
             "D": flat(act * up).T @ flat(dy), "bias_D": flat(dy).sum(0)}
    return y, dgu @ p["GU"].T, grads


# %% locked="tools"
def layer(random, h, F):
    """Draw random parameters."""
    return {"GU": random.normal(size=(h, 2 * F)), "bias_GU": random.normal(size=2 * F),
            "D": random.normal(size=(F, h)), "bias_D": random.normal(size=h)}


def shards_of(p, n):
    """Return every rank's shard, if n divides F. (The checks that give the points have another function for any n.)"""
    h, width = len(p["GU"]), len(p["D"]) // n
    GU, bias, D = p["GU"].reshape(h, 2, n, width), p["bias_GU"].reshape(2, n, width), p["D"].reshape(n, width, -1)
    return [{"GU": GU[:, :, rank].reshape(h, 2 * width), "bias_GU": bias[:, rank].reshape(2 * width), "D": D[rank],
             "bias_D": p["bias_D"]} for rank in range(n)]


def inputs(random, b, s, h):
    """Draw a random x and a random upstream gradient."""
    return random.normal(size=(2, b, s, h))


# %% [markdown]
# ## 1. Splitting the parameters, and joining them again
#
# Every rank takes some of the $F$ inner columns, from the first product to the last: its columns of $G$, **the same**
# columns of $U$, and the rows of $D$ that read them. Then it can do SiLU and the product of the branches alone. The
# columns are split as by `np.array_split`: if $F$ does not divide, the first ranks have one more. $\delta$ belongs to
# no column, so every rank holds all of it. `group.rank` is a rank's number, `group.size` the number of ranks.
#
# A rank's shard is a dict with the same keys, with $F_r$ for $F$, where $F_r$ is the number of its columns: `"GU"` is
# $[h, 2 F_r]$, again gate left and up right. Some rank may have no columns at all.
#
# `join` is the inverse: from all ranks' shards, in rank order, the whole parameters, as a checkpoint stores them.

# %% answer="shard"
# %%answer shard
import numpy as np


def shard(group, whole):
    """Return this rank's shard, a dict. whole: the dict of all parameters."""
    ### BEGIN SOLUTION
    G, U = np.array_split(whole["GU"], 2, axis=1)
    gamma, mu = np.array_split(whole["bias_GU"], 2)
    G, U, gamma, mu, D = (np.array_split(one, group.size, axis)[group.rank]
                          for one, axis in ((G, 1), (U, 1), (gamma, 0), (mu, 0), (whole["D"], 0)))
    return {"GU": np.hstack([G, U]), "bias_GU": np.hstack([gamma, mu]), "D": D, "bias_D": whole["bias_D"]}
    ### END SOLUTION


# %% [markdown]
# To see what your code does, run it on numbers that you can read:

# %%
example = {"GU": np.array([[0.0, 1, 2, 3, 10, 11, 12, 13]]), "bias_GU": np.arange(8.0), "D": np.arange(4.0)[:, None],
           "bias_D": np.zeros(1)}
for found in run(2, "shard", example).results:
    print(found)

# %% check="check_shard" points=5
# Sharding: a rank has the same columns of G and U, and their rows of D
### BEGIN HIDDEN TESTS
def ragged_shards_of(p, n):
    """Return every rank's shard for any n, column by column."""
    F = len(p["D"])
    return [{"GU": p["GU"][:, [*mine, *(F + mine)]], "bias_GU": p["bias_GU"][[*mine, *(F + mine)]],
             "D": p["D"][mine], "bias_D": p["bias_D"]} for mine in np.array_split(np.arange(F), n)]


shards_of = ragged_shards_of
### END HIDDEN TESTS


def check_shard(n, h, F):
    p = layer(check_data("shard"), h, F)
    expect_dicts(run(n, "shard", p, allow=()).results, shards_of(p, n), "the shard",
                 "the left half of GU is G, the right half is U: a rank needs column j of both, or of neither.")


for n in (2, 4):
    check_shard(n, h=3, F=8)
passed("shard on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, F in ((1, 3), (3, 8), (8, 13), (5, 3)):
    check_shard(n, h=2, F=F)
### END HIDDEN TESTS

# %% answer="join"
# %%answer join
import numpy as np


def join(shards):
    """Return the dict of all parameters. shards: a list of all ranks' dicts, in rank order."""
    ### BEGIN SOLUTION
    def branches(key):
        halves = [np.split(one[key], 2, axis=-1) for one in shards]
        return np.concatenate([gate for gate, _ in halves] + [up for _, up in halves], axis=-1)

    return {"GU": branches("GU"), "bias_GU": branches("bias_GU"), "D": np.vstack([one["D"] for one in shards]),
            "bias_D": shards[0]["bias_D"]}
    ### END SOLUTION


# %% check="check_join" points=5
# Joining: the whole parameters again
def check_join(n, h, F):
    p = layer(check_data("join"), h, F)
    expect_dicts(run(None, "join", shards_of(p, n)).results, [p], "the joined parameters",
                 "all of G stands left of all of U. And does bias_D have to be joined?")


for n in (2, 4):
    check_join(n, h=3, F=8)
passed("join on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, F in ((3, 8), (5, 3)):
    check_join(n, h=2, F=F)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. f and g
#
# The part of a layer in which every rank computes something different is a *region*. At its edges there are two
# operators (Shoeybi et al. 2019, section 3, figure 3). Outside the region all ranks hold the same arrays.
#
# | | forward | backward |
# |---|---|---|
# | *f*, where $X$ enters | what does every rank need of $X$? | every rank has a part of $\partial L / \partial X$ |
# | *g*, where $Y$ leaves | every rank has a partial sum of $Y$ | what is a partial sum's gradient, if $Y$'s is given? |
#
# Each of the four is one line. Two of them send nothing. For sums over all ranks there is `group.all_reduce(x)`: it
# returns the sum of all ranks' `x`, on every rank.

# %% answer="f_and_g"
# %%answer f_and_g
def f(group, x):
    """Return the input of this rank's part of the region. x is identical on all ranks."""
    ### BEGIN SOLUTION
    return x
    ### END SOLUTION


def f_backward(group, dx):
    """Return the gradient of x, identical on all ranks. dx is the part of it from this rank's part of the region."""
    ### BEGIN SOLUTION
    return group.all_reduce(dx)
    ### END SOLUTION


def g(group, y):
    """Return the sum, identical on all ranks. y is this rank's partial sum."""
    ### BEGIN SOLUTION
    return group.all_reduce(y)
    ### END SOLUTION


def g_backward(group, dy):
    """Return the gradient of this rank's partial sum. dy is the gradient of the sum, identical on all ranks."""
    ### BEGIN SOLUTION
    return dy
    ### END SOLUTION


# %% check="check_f_and_g" points=6
# f and g: two send nothing, two add up
def check_silent(n, name):
    x, _ = inputs(check_data(name), 2, 3, 4)
    outcome = run(n, name, x, allow=(), hint=f"all ranks have the same array already. What would {name} add up?")
    expect_equal(outcome.results, [x] * n, f"what {name} returned", tolerance=0)


def check_sum(n, name):
    xs = list(check_data(name).normal(size=(n, 2, 3, 4)))
    outcome = run(n, name, each(xs), allow=("all_reduce",))
    expect_equal(outcome.results, [sum(xs)] * n, f"what {name} returned", "each rank has only a part of it.")


def check_f_and_g(n):
    for name in ("f", "g_backward"):
        check_silent(n, name)
    for name in ("g", "f_backward"):
        check_sum(n, name)


for n in (2, 4):
    check_f_and_g(n)
passed("f and g on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_f_and_g(5)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Between f and g
#
# Inside the region a rank needs no other rank. `inside` takes all of $X$, as it has entered, and the rank's shard, and
# returns the rank's partial sum of $Y$, without $\delta$:
#
# $$\big(\mathrm{SiLU}(X G_r + \gamma_r) \odot (X U_r + \mu_r)\big)\, D_r .$$
#
# The sum over the ranks is $Y - \delta$. It also returns `kept`, the values that its backward will need. You choose
# them: arrays, or tuples, lists and dicts of arrays, since the check passes them from one run to the next. The backward
# gets $X$ and the shard again, so they need not be included.
#
# `inside_backward` takes the gradient of the partial sum, and returns this rank's part of $\partial L / \partial X$ and
# the gradients of `"GU"`, `"bias_GU"` and `"D"`, in the shapes of the shard's. It does not return that of `"bias_D"`.
#
# Elements of $X$ may be as large as 10,000, and the result must still be finite. $e^{10000}$ is not.

# %% answer="inside"
# %%answer inside
import numpy as np


def inside(x, shard):
    """Return this rank's partial sum [b, s, h] without bias_D, and kept. x: [b, s, h]."""
    ### BEGIN SOLUTION
    z = x @ shard["GU"] + shard["bias_GU"]                  # [b, s, h] @ [h, 2 F_r] -> [b, s, 2 F_r]
    width = len(shard["D"])
    z, u = z[..., :width], z[..., width:]
    sigma = 0.5 + 0.5 * np.tanh(0.5 * z)
    return (z * sigma * u) @ shard["D"], (z, u, sigma)
    ### END SOLUTION


def inside_backward(dy, x, shard, kept):
    """Return this rank's part of dx [b, s, h], and a dict of gradients. dy: the gradient of the partial sum."""
    ### BEGIN SOLUTION
    z, u, sigma = kept
    a = z * sigma
    da = dy @ shard["D"].T                                  # [b, s, F_r], the gradient of a * u
    dz = np.concatenate([da * u * (sigma + a * (1 - sigma)), da * a], axis=-1)
    grads = {"GU": np.einsum("bsh,bsf->hf", x, dz), "bias_GU": dz.sum((0, 1)),
             "D": np.einsum("bsf,bsh->fh", a * u, dy)}
    return dz @ shard["GU"].T, grads
    ### END SOLUTION


# %% check="check_inside" points=6
# Between f and g: the ranks' partial sums add up to Y without its bias
def inside_case(rank, n, F, scale=1.0):
    """Return an input, a rank's shard and the right result: that of a whole layer of its columns, without bias_D."""
    random = check_data("inside")
    (x, dy), mine = inputs(random, 2, 3, 4), shards_of(layer(random, 4, F), n)[rank]
    return scale * x, dy, mine, whole_mlp(scale * x, {**mine, "bias_D": np.zeros(4)}, dy)


def check_inside(rank, n, F, scale=1.0):
    x, _, mine, (right, _, _) = inside_case(rank, n, F, scale)
    found, _ = expect_values(run(None, "inside", x, mine).results, ("partial sum", "kept"))
    expect_equal(found, [right], f"the partial sum of rank {rank} of {n}",
                 "gate left, up right; each with its bias; and bias_D is not added here.")


for rank, n in ((0, 2), (3, 4)):
    check_inside(rank, n, F=8)
passed("inside on ranks of 2 and 4")
### BEGIN HIDDEN TESTS
for rank, n, F in ((0, 1, 5), (0, 3, 8), (2, 3, 8), (4, 5, 3)):
    check_inside(rank, n, F)
check_inside(1, 2, 5, scale=1e4)
### END HIDDEN TESTS

# %% check="check_inside_backward" points=8
# Between f and g, backward: a rank's part of dX, and the gradients of its shard
def check_inside_backward(rank, n, F):
    x, dy, mine, (_, dx, grads) = inside_case(rank, n, F)
    _, kept = expect_values(run(None, "inside", x, mine).results, ("partial sum", "kept"))
    backward = run(None, "inside_backward", dy, x, mine, kept[0])
    found, gradients = expect_values(backward.results, ("dx", "gradients"))
    right = {key: grads[key] for key in ("GU", "bias_GU", "D")}
    expect_dicts(gradients, [right], f"the gradient of rank {rank} of {n}",
                 "take the forward apart line by line, from its last line to its first.")
    expect_equal(found, [dx], f"dx of rank {rank} of {n}", "x went into the gate and into the up branch.")


for rank, n in ((0, 2), (3, 4)):
    check_inside_backward(rank, n, F=8)
passed("inside_backward on ranks of 2 and 4")
### BEGIN HIDDEN TESTS
for rank, n, F in ((0, 1, 5), (2, 3, 8), (4, 5, 3)):
    check_inside_backward(rank, n, F)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The layer on ranks
#
# Put it together. $X$, $Y$ and their gradients are identical on all ranks. $\delta$ is in the sum **once**. Every rank
# holds all of $\delta$, so every rank needs its whole gradient. Where does that come from, and does any rank have to
# send it?
#
# `mlp_forward` returns `y` and a cache; the check passes the cache to `mlp_backward`, which returns `dx` and the
# gradients of the shard, a dict with all four keys.
#
# How much may be sent? An all-reduce of $N$ elements on $p$ ranks costs each $2 N (p-1)/p$ (lab 1). **One** all-reduce
# of $b s h$ elements forward, **one** backward, nothing else. There are two branches, but $X$ enters once.

# %% answer="mlp"
# %%answer mlp
def mlp_forward(group, x, shard):
    """Return y [b, s, h] and a cache. x [b, s, h] and y are identical on all ranks; the shard is this rank's."""
    ### BEGIN SOLUTION
    partial, kept = inside(f(group, x), shard)
    return g(group, partial) + shard["bias_D"], (x, kept)
    ### END SOLUTION


def mlp_backward(group, dy, shard, cache):
    """Return dx [b, s, h] and the gradients of this rank's shard. dy [b, s, h] and dx are identical on all ranks."""
    ### BEGIN SOLUTION
    x, kept = cache
    dx, grads = inside_backward(g_backward(group, dy), x, shard, kept)
    return f_backward(group, dx), {**grads, "bias_D": dy.sum(axis=(0, 1))}
    ### END SOLUTION


# %% check="check_mlp" points=10
# The layer on ranks: Y, dX and the gradients of every shard are those of the whole layer
REDUCE = ("all_reduce",)


def mlp_on_ranks(n, b, s, h, F):
    """Check forward and backward. Return the elements that each rank has sent in each of them."""
    random = check_data("mlp")
    p, (x, dy) = layer(random, h, F), inputs(random, b, s, h)
    shards, (y, dx, grads) = shards_of(p, n), whole_mlp(x, p, dy)
    forward = run(n, "mlp_forward", x, each(shards), allow=REDUCE,
                  hint="every rank must come to the all-reduce, also one that has nothing to add.")
    ys, caches = expect_values(forward.results, ("y", "cache"))
    expect_equal(ys, [y] * n, "y", "which terms are partial sums, and which are not? bias_D must be in the sum once.")
    backward = run(n, "mlp_backward", dy, each(shards), each(caches), allow=REDUCE)
    dxs, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_equal(dxs, [dx] * n, "dx", "every rank has a part of it: which operator stands where x entered?")
    expect_dicts(mine, shards_of(grads, n), "the gradient",
                 "dy is identical on all ranks. So which gradients are complete on a rank already?")
    return forward.sent, backward.sent


for n in (2, 4):
    mlp_on_ranks(n, 2, 3, 4, F=8)
passed("mlp on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, F in ((1, 3), (8, 13), (5, 3)):
    mlp_on_ranks(n, 1, 3, 5, F)
### END HIDDEN TESTS

# %% check="check_mlp_cost" points=5
# The layer on ranks: one all-reduce of b s h elements forward, and one backward
def check_mlp_cost(n, b, s, h, F):
    enough = 2 * b * s * h * (n - 1) // n
    for way, sent in zip(("forward", "backward"), mlp_on_ranks(n, b, s, h, F)):
        expect(max(sent) <= enough, f"{way}, a rank has sent {max(sent):,} elements; one all-reduce of b s h = "
               f"{b * s * h} is {enough:,}.", "what can be added up on the rank before the ranks add up?")


check_mlp_cost(4, 2, 3, 4, F=8)
passed("one all-reduce each way")
### BEGIN HIDDEN TESTS
for n, F in ((3, 7), (8, 11)):
    check_mlp_cost(n, 2, 1, 5, F)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Sequence parallelism
#
# An all-reduce is a reduce-scatter and an all-gather. Between the two, every rank has its part of the sum only.
# Korthikanti et al. 2022 ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198), section 4.2.2, figure 5) stay in this
# state between one region and the next: outside, a rank holds the $s_r$ positions of $X$ and $Y$ that `np.array_split`
# gives it along the axis of $s$. Forward, an all-gather replaces *f*, and a reduce-scatter replaces *g*. What replaces
# them backward?
#
# | call | what it does |
# |---|---|
# | `group.all_gather(x, axis)` | all ranks' `x`, joined in rank order along `axis`; their lengths along it may differ |
# | `group.reduce_scatter(x, axis)` | this rank's part of the sum of all `x` along `axis`, as by `np.array_split` |
#
# Two things are different now:
#
# - No rank may **keep** all of $X$ for the backward, or no memory is saved. A rank keeps its own positions of $X$, and
#   gathers $X$ again in the backward. In the cache there may be no more than the rank's $b\, s_r\, h$ elements of $X$,
#   and four arrays of $b\, s\, F_r$.
# - $\delta$, which is replicated and used outside the region, is applied only to the rank's own positions. The gradient
#   that you return for it is again that of **all** positions, on every rank.
#
# Forward, a rank may send $2\, b s h (p-1)/p$ elements. Backward, it may send 1.5 times as many, and $2h$ more for
# gradients that are still incomplete.

# %% answer="sequence"
# %%answer sequence
def sequence_forward(group, x, shard):
    """Return y [b, s_r, h] of this rank's positions, and a cache. x: [b, s_r, h], of the same positions."""
    ### BEGIN SOLUTION
    partial, kept = inside(group.all_gather(x, axis=1), shard)
    return group.reduce_scatter(partial, axis=1) + shard["bias_D"], (x, kept)
    ### END SOLUTION


def sequence_backward(group, dy, shard, cache):
    """Return dx [b, s_r, h] of this rank's positions, and the gradients of its shard. dy: [b, s_r, h]."""
    ### BEGIN SOLUTION
    x, kept = cache
    dpartial = group.all_gather(dy, axis=1)
    dx, grads = inside_backward(dpartial, group.all_gather(x, axis=1), shard, kept)
    return group.reduce_scatter(dx, axis=1), {**grads, "bias_D": dpartial.sum(axis=(0, 1))}
    ### END SOLUTION


# %% check="check_sequence" points=10
# Sequence parallelism: each rank's positions of Y and dX, and the gradients of its shard
GATHER = ("all_gather", "reduce_scatter", "all_reduce")


def sequence_on_ranks(n, b, s, h, F):
    """Check forward and backward. Return the elements that each rank has sent in each of them, and the caches."""
    random = check_data("sequence")
    p, (x, dy) = layer(random, h, F), inputs(random, b, s, h)
    shards, (y, dx, grads) = shards_of(p, n), whole_mlp(x, p, dy)
    xs, dys, ys, dxs = (np.array_split(one, n, axis=1) for one in (x, dy, y, dx))
    forward = run(n, "sequence_forward", each(xs), each(shards), allow=GATHER)
    found, caches = expect_values(forward.results, ("y", "cache"))
    expect_equal(found, ys, "its positions of y", "gather positions, compute, scatter the sum. The bias comes last.")
    backward = run(n, "sequence_backward", each(dys), each(shards), each(caches), allow=GATHER)
    found, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_equal(found, dxs, "its positions of dx", "the adjoint of an all-gather is a reduce-scatter, and vice versa.")
    expect_dicts(mine, shards_of(grads, n), "the gradient",
                 "a gradient is a sum over all positions, not only over the rank's own.")
    return forward.sent, backward.sent, caches


for n in (2, 4):
    sequence_on_ranks(n, 2, 4, 3, F=8)
passed("sequence parallel on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, s, F in ((1, 2, 3), (3, 4, 5), (5, 3, 7)):
    sequence_on_ranks(n, 2, s, 3, F)
### END HIDDEN TESTS

# %% check="check_sequence_cost" points=5
# Sequence parallelism: X is not kept whole, and no more is sent than needed
def elements(cache):
    """Count the numbers in lists, tuples and dicts of arrays."""
    inner = list(cache.values()) if isinstance(cache, dict) else cache
    return sum(map(elements, inner)) if isinstance(inner, list | tuple) else np.size(inner)


def check_sequence_cost(n, b, s, h, F):
    forward, backward, caches = sequence_on_ranks(n, b, s, h, F)
    for rank, cache in enumerate(caches):
        positions, width = (len(np.array_split(np.arange(all_of), n)[rank]) for all_of in (s, F))
        may = b * positions * h + 4 * b * s * width
        expect(elements(cache) <= may, f"rank {rank} keeps {elements(cache):,} elements for the backward; {may:,} are "
               "enough.", "keep the part of x that you were given, not the x that you have gathered.")
    for way, sent, gathers, more in (("forward", forward, 2, 0), ("backward", backward, 3, 2 * h)):
        enough = gathers * b * s * h * (n - 1) // n + more
        expect(max(sent) <= enough, f"{way}, a rank has sent {max(sent):,} elements; {enough:,} are enough.",
               "gather x once, and scatter one sum, not one for each branch.")


check_sequence_cost(4, 2, 4, 16, F=8)
passed("sequence parallelism keeps and sends no more than needed")
### BEGIN HIDDEN TESTS
for n, s, F in ((3, 5, 5), (8, 8, 8)):
    check_sequence_cost(n, 1, s, 20, F)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - With $F = 11008$ and $p = 3$ one rank has a column more than the others. What does that cost? And $F = 8$, $p = 7$?
# - Someone loads a checkpoint with $G$ and $U$ in one matrix and splits it as if it were one. Each rank of two then
#   computes $\mathrm{SiLU}$ of what? No shape is wrong. How would you notice?
# - Gathering $X$ again makes the backward send 1.5 times as much. What can a rank compute while that gather is under
#   way? (Korthikanti et al. say it in section 4.2.2.)
