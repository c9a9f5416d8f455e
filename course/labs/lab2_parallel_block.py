# %% [markdown]
# # Lab 2. The parallel block, with half the all-reduces
#
# Megatron-LM shards a transformer's layer so that the ranks add up twice forward, once after the attention and once
# after the MLP, and twice backward ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3). Some models
# (GPT-J, PaLM) have another layer, whose attention and MLP read the same input, and whose results are added. In this
# lab you shard that one, for any number of heads, any inner size and any number of ranks, with one sum forward and one
# backward; write *f* and *g*; and count what is sent.
#
# **You need**: walkthroughs *Splitting matrices* to *Attention heads*. **Time**: about five hours. **Points**: 60, and
# 10 for words.
#
# Labs work as lab 1 explains: cells that begin with `%%answer` are yours, checks run them on separate ranks, and the
# checks that give the points also try other sizes and numbers of ranks. An answer may use functions of other answers,
# but nothing from the locked cells or this project's packages.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% [markdown]
# ## The layer
#
# The input is $X$, of shape $[b, s, h]$: $b$ samples of $s$ positions, $h$ numbers for each. A layer of GPT-2 is
# *serial*: the MLP reads what the attention has written. In the *parallel block* both read one norm (Chowdhery et al.
# 2022, *PaLM*, [arXiv 2204.02311](https://arxiv.org/abs/2204.02311), section 2):
#
# $$Y = X + \mathrm{Attention}(N) + \mathrm{MLP}(N) + \beta, \qquad N = \mathrm{LayerNorm}(X) .$$
#
# The attention is causal, with $a$ heads of size $d$. The MLP has the inner size $F$, and its activation is the squared
# ReLU, $\max(u, 0)^2$ (So et al. 2021, [arXiv 2109.08668](https://arxiv.org/abs/2109.08668)). There is one bias
# $\beta$ for both.
#
# As both read $N$, their first matrices are stored as **one**, so that one product computes both; and as both are added
# up, so are their last ones: a sum of two products is one product of longer rows. A layer's parameters are a dict:
#
# | key | shape | what |
# |---|---|---|
# | `"gain"`, `"shift"` | $[h]$ | the norm's |
# | `"W_in"` | $[h, 3ad + F]$ | $Q$, $K$ and $V$, each $ad$ columns, head after head; then $U$, *up* to $F$ columns |
# | `"W_out"` | $[ad + F, h]$ | $ad$ rows, head after head, that read the attention; then $F$ rows that read the MLP |
# | `"bias"` | $[h]$ | $\beta$ |
#
# The checks compare your ranks with the whole layer and its backward, computed on one process. The function is not
# shown, since it would be the answer to section 3. Its results are stored for the cases that you see.

# %% locked="whole"
import numpy as np

from course.grading import (check_data, each, expect_dicts, expect_equal, expect_near, expect_sent, expect_values,
                            passed, run, stored)

whole_inside, whole_block = (stored("lab2_parallel_block", name) for name in ("whole_inside", "whole_block"))

# %% locked="tools"
HEAD = 2        # d, the size of a head


def layer(random, h, a, F):
    """Draw random parameters."""
    return {"gain": random.normal(size=h), "shift": random.normal(size=h),
            "W_in": random.normal(size=(h, 3 * a * HEAD + F)), "W_out": random.normal(size=(a * HEAD + F, h)),
            "bias": random.normal(size=h)}


def shards_of(p, n):
    """Return every rank's shard, if n divides a and F. (The checks that give the points have one for any n.)"""
    h, width = len(p["W_in"]), (p["W_in"].shape[1] - len(p["W_out"])) // 2
    mine, columns = width // n, (len(p["W_out"]) - width) // n          # of a rank: a_r d and F_r
    qkv, up = p["W_in"][:, :3 * width].reshape(h, 3, n, mine), p["W_in"][:, 3 * width:].reshape(h, n, columns)
    o, down = p["W_out"][:width].reshape(n, mine, h), p["W_out"][width:].reshape(n, columns, h)
    return [{**p, "W_in": np.hstack([qkv[:, :, rank].reshape(h, -1), up[:, rank]]),
             "W_out": np.vstack([o[rank], down[rank]])} for rank in range(n)]


def inputs(random, b, s, h):
    """Draw a random x and a random upstream gradient."""
    return random.normal(size=(2, b, s, h))


# %% [markdown]
# ## 1. Splitting the parameters, and joining them again
#
# Every rank takes some of the heads, from their columns of $Q$, $K$ and $V$ to the rows of $W_{out}$ that read them;
# and some of the MLP's $F$ columns, with their rows of $W_{out}$. Then it can do the softmax and the activation alone.
# Heads, and columns, are split as by `np.array_split`: if $a$ or $F$ does not divide, the first ranks have one more.
# The norm's parameters and $\beta$ belong to no head or column, so every rank holds all of them. `group.rank` is a
# rank's number, `group.size` the number of ranks.
#
# A rank's shard is a dict with the same keys, and the same order inside of each matrix: `"W_in"` is
# $[h, 3 a_r d + F_r]$, with its columns of $Q$, of $K$, of $V$, of $U$; and `"W_out"` is $[a_r d + F_r, h]$. Some rank
# may have no heads, or no columns, or neither. (From a shard's shapes you can compute $a_r d$ and $F_r$.)
#
# `join` is the inverse: from all ranks' shards, in rank order, the whole parameters, as a checkpoint stores them.

# %% answer="shard"
# %%answer shard
import numpy as np


def shard(group, whole, d):
    """Return this rank's shard, a dict. whole: the dict of all parameters; d: the size of a head."""
    ### BEGIN SOLUTION
    def mine(one, axis, size=1):
        parts = np.array_split(np.arange(one.shape[axis] // size), group.size)[group.rank]
        return one.take((parts[:, None] * size + np.arange(size)).ravel(), axis)

    width = (whole["W_in"].shape[1] - len(whole["W_out"])) // 2
    Q, K, V, U = np.split(whole["W_in"], [width, 2 * width, 3 * width], axis=1)
    O, D = np.split(whole["W_out"], [width])
    return {**whole, "W_in": np.hstack([*(mine(one, 1, d) for one in (Q, K, V)), mine(U, 1)]),
            "W_out": np.vstack([mine(O, 0, d), mine(D, 0)])}
    ### END SOLUTION


# %% [markdown]
# To see what your code does, run it on numbers that you can read, here with $h = 1$, two heads of size 2, and $F = 4$:

# %%
example = {"gain": np.ones(1), "shift": np.zeros(1), "bias": np.zeros(1),
           "W_in": np.array([[10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33, 1, 2, 3, 4]]),
           "W_out": np.array([[40], [41], [42], [43], [1], [2], [3], [4]])}
for found in run(2, "shard", example, 2).results:
    print(found["W_in"], found["W_out"].ravel())

# %% check="check_shard" points=5
# Sharding: a rank has the same heads of Q, K and V, the same columns of U, and the rows that read them
### BEGIN HIDDEN TESTS
from reference.ops import attention_core, attention_core_backward, layer_norm, layer_norm_backward


def whole_inside(x, W_in, W_out, dy, d):
    """Return attention(x) + mlp(x), dx, and the gradients of W_in and W_out. dy: the upstream gradient [b, s, h]."""
    width = (W_in.shape[1] - len(W_out)) // 2                                   # a d
    *qkv, u = np.split(x @ W_in, [width, 2 * width, 3 * width], -1)             # [b, s, a d] each, and [b, s, F]
    heads = [one.reshape(*x.shape[:2], width // d, d) for one in qkv]
    attended, kept = attention_core(*heads, causal=True) if width else (heads[0], None)
    read = np.concatenate([attended.reshape(qkv[0].shape), np.maximum(u, 0) ** 2], -1)
    dread = dy @ W_out.T                                                        # forward: y = read @ W_out
    dattended = dread[..., :width].reshape(attended.shape)
    dqkv = attention_core_backward(dattended, kept) if width else heads
    du = dread[..., width:] * (2 * np.maximum(u, 0))
    dz = np.concatenate([*(one.reshape(qkv[0].shape) for one in dqkv), du], -1)
    grads = {"W_in": np.einsum("bsh,bsn->hn", x, dz), "W_out": np.einsum("bsn,bsh->nh", read, dy)}
    return read @ W_out, dz @ W_in.T, grads


def whole_block(x, p, dy, d):
    """Return y, dx, and the gradients, a dict like p. x: [b, s, h]; dy: the upstream gradient [b, s, h]."""
    n, kept = layer_norm(x, p["gain"], p["shift"], 1e-5)
    both, dn, grads = whole_inside(n, p["W_in"], p["W_out"], dy, d)
    dx, dgain, dshift = layer_norm_backward(dn, p["gain"], kept)
    grads |= {"gain": dgain, "shift": dshift, "bias": dy.sum((0, 1))}
    return x + both + p["bias"], dy + dx, grads


def ragged_shards_of(p, n):
    """Return every rank's shard for any n, column by column."""
    width, shards = (p["W_in"].shape[1] - len(p["W_out"])) // 2, []
    for rank in range(n):
        heads = np.array_split(np.arange(width).reshape(-1, HEAD), n)[rank].ravel()
        columns = np.array_split(np.arange(len(p["W_out"]) - width), n)[rank]
        every = [*heads, *(heads + width), *(heads + 2 * width), *(columns + 3 * width)]
        rows = [*heads, *(columns + width)]
        shards.append({**p, "W_in": p["W_in"][:, np.array(every, int)], "W_out": p["W_out"][np.array(rows, int)]})
    return shards


shards_of = ragged_shards_of
### END HIDDEN TESTS


def check_shard(n, h, a, F):
    p = layer(check_data("shard"), h, a, F)
    expect_dicts(run(n, "shard", p, HEAD, allow=()).results, shards_of(p, n), "the shard",
                 "W_in is four matrices side by side, and W_out two, one upon the other: split each of them, those of "
                 "the attention by heads.")


for n in (2, 4):
    check_shard(n, h=3, a=4, F=8)
passed("shard on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, a, F in ((1, 1, 3), (3, 4, 8), (8, 9, 13), (5, 3, 4)):
    check_shard(n, h=2, a=a, F=F)
### END HIDDEN TESTS

# %% answer="join"
# %%answer join
import numpy as np


def join(shards):
    """Return the dict of all parameters. shards: a list of all ranks' dicts, in rank order."""
    ### BEGIN SOLUTION
    widths = [(one["W_in"].shape[1] - len(one["W_out"])) // 2 for one in shards]
    columns = [np.split(one["W_in"], [w, 2 * w, 3 * w], axis=1) for one, w in zip(shards, widths)]
    rows = [np.split(one["W_out"], [w]) for one, w in zip(shards, widths)]
    return {**shards[0], "W_in": np.hstack([np.hstack(parts) for parts in zip(*columns)]),
            "W_out": np.vstack([np.vstack(parts) for parts in zip(*rows)])}
    ### END SOLUTION


# %% check="check_join" points=5
# Joining: the whole parameters again
def check_join(n, h, a, F):
    p = layer(check_data("join"), h, a, F)
    expect_dicts(run(None, "join", shards_of(p, n)).results, [p], "the joined parameters",
                 "all of Q stands left of all of K. And does what every rank holds have to be joined?")


for n in (2, 4):
    check_join(n, h=3, a=4, F=8)
passed("join on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, a, F in ((3, 4, 8), (5, 3, 4)):
    check_join(n, h=2, a=a, F=F)
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


# %% check="check_f" points=4
# f and its backward: one sends nothing, the other adds up
def check_silent(n, name):
    x, _ = inputs(check_data(name), 2, 3, 4)
    outcome = run(n, name, x, allow=(), hint=f"all ranks have the same array already. What would {name} add up?")
    expect_equal(outcome.results, [x] * n, f"what {name} returned", tolerance=0)


def check_sum(n, name):
    xs = list(check_data(name).normal(size=(n, 2, 3, 4)))
    outcome = run(n, name, each(xs), allow=("all_reduce",))
    expect_equal(outcome.results, [sum(xs)] * n, f"what {name} returned", "each rank has only a part of it.")
    enough = 2 * xs[0].size * (n - 1) // n
    expect_sent(outcome, enough, enough, f"{name} of {xs[0].size} elements",
                "one all-reduce.")


for n in (2, 4):
    check_silent(n, "f")
    check_sum(n, "f_backward")
passed("f on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_silent(5, "f")
check_sum(5, "f_backward")
### END HIDDEN TESTS

# %% check="check_g" points=4
# g and its backward: one adds up, the other sends nothing
for n in (2, 4):
    check_sum(n, "g")
    check_silent(n, "g_backward")
passed("g on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_sum(5, "g")
check_silent(5, "g_backward")
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Between f and g
#
# Inside the region a rank needs no other rank. `inside` takes all of $N$, as it has entered, and the rank's shard, and
# returns the rank's partial sum of $\mathrm{Attention}(N) + \mathrm{MLP}(N)$: that of its heads and columns, without
# $\beta$ and without $X$. The softmax of the heads is given in the cell, forward and backward.
#
# `inside` also returns `kept`, the values that its backward will need. You choose them: arrays, or tuples, lists and
# dicts of arrays, since the check passes them from one run to the next. The backward gets $N$ and the shard again, so
# they need not be included.
#
# `inside_backward` takes the gradient of the partial sum, and returns this rank's part of $\partial L / \partial N$ and
# the gradients of `"W_in"` and `"W_out"`, in the shapes of the shard's, and no others.

# %% answer="inside"
# %%answer inside
import numpy as np


def attend(q, k, v, d):
    """Return the heads' causal attention [b, s, a_r d], and kept (given). q, k, v: [b, s, a_r d]."""
    b, s, width = q.shape
    q, k, v = (one.reshape(b, s, width // d, d).swapaxes(1, 2) for one in (q, k, v))
    scores = np.where(np.tri(s, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs = probs / probs.sum(-1, keepdims=True)
    return (probs @ v).swapaxes(1, 2).reshape(b, s, width), (q, k, v, probs)


def attend_backward(dmixed, kept):
    """Return dq, dk, dv [b, s, a_r d] (given). dmixed [b, s, a_r d]: the gradient of what attend has returned."""
    q, k, v, probs = kept
    dmixed, shape = dmixed.reshape(*q.swapaxes(1, 2).shape).swapaxes(1, 2), dmixed.shape
    dprobs = dmixed @ v.swapaxes(2, 3)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) / np.sqrt(q.shape[3])
    gradients = dscores @ k, dscores.swapaxes(2, 3) @ q, probs.swapaxes(2, 3) @ dmixed
    return [one.swapaxes(1, 2).reshape(shape) for one in gradients]


def inside(n, shard, d):
    """Return this rank's partial sum [b, s, h] without bias, and kept. n: [b, s, h]; d: the size of a head."""
    ### BEGIN SOLUTION
    width = (shard["W_in"].shape[1] - len(shard["W_out"])) // 2
    q, k, v, u = np.split(n @ shard["W_in"], [width, 2 * width, 3 * width], axis=-1)
    mixed, heads = attend(q, k, v, d)
    return np.concatenate([mixed, np.maximum(u, 0) ** 2], axis=-1) @ shard["W_out"], (mixed, u, heads)
    ### END SOLUTION


def inside_backward(dy, n, shard, kept):
    """Return this rank's part of dn [b, s, h], and a dict of gradients. dy: the gradient of the partial sum."""
    ### BEGIN SOLUTION
    mixed, u, heads = kept
    dmixed, dact = np.split(dy @ shard["W_out"].T, [mixed.shape[-1]], axis=-1)
    dz = np.concatenate([*attend_backward(dmixed, heads), dact * (2 * np.maximum(u, 0))], axis=-1)
    both = np.concatenate([mixed, np.maximum(u, 0) ** 2], axis=-1)
    return dz @ shard["W_in"].T, {"W_in": np.einsum("bsh,bsn->hn", n, dz), "W_out": np.einsum("bsn,bsh->nh", both, dy)}
    ### END SOLUTION


# %% check="check_inside" points=8
# Between f and g: the ranks' partial sums add up to attention and MLP
def inside_case(rank, n, a, F, h=4):
    """Return an input, a rank's shard and the right result: that of a whole layer of its heads and columns."""
    random = check_data("inside")
    (x, dy), mine = inputs(random, 2, 3, h) * 4 / h, shards_of(layer(random, h, a, F), n)[rank]
    return x, dy, mine, whole_inside(x, mine["W_in"], mine["W_out"], dy, HEAD)


def check_inside(rank, n, a, F):
    x, _, mine, (right, _, _) = inside_case(rank, n, a, F)
    found, _ = expect_values(run(None, "inside", x, mine, HEAD).results, ("partial sum", "kept"))
    expect_equal(found, [right], f"the partial sum of rank {rank} of {n}",
                 "Q, K, V, U from left to right. The bias and x are not added here, and n is normalized already.")


for rank, n, a, F in ((0, 2, 4, 8), (3, 4, 4, 8), (1, 2, 0, 8), (1, 2, 4, 0)):
    check_inside(rank, n, a, F)
passed("inside on ranks of 2 and 4, one without heads, and one without columns")
### BEGIN HIDDEN TESTS
for rank, n, a, F in ((0, 1, 3, 5), (0, 3, 4, 8), (2, 3, 4, 8), (2, 4, 2, 9), (4, 5, 3, 4)):
    check_inside(rank, n, a, F)
### END HIDDEN TESTS

# %% check="check_inside_backward" points=10
# Between f and g, backward: a rank's part of dN, and the gradients of its shard
def check_inside_backward(rank, n, a, F, *size):
    x, dy, mine, (_, dx, grads) = inside_case(rank, n, a, F, *size)
    _, kept = expect_values(run(None, "inside", x, mine, HEAD).results, ("partial sum", "kept"))
    backward = run(None, "inside_backward", dy, x, mine, kept[0], limit=10.0, hint="a backward takes as long as two "
                   "forwards, and not as one for each parameter.")
    found, gradients = expect_values(backward.results, ("dn", "gradients"))
    expect_dicts(gradients, [grads], f"rank {rank} of {n}: the gradient",
                 "take the forward apart line by line, from its last line to its first.")
    expect_equal(found, [dx], f"dn of rank {rank} of {n}", "n went into Q, K, V and U.")


for rank, n, a, F in ((0, 2, 4, 8), (3, 4, 4, 8), (1, 2, 0, 8), (1, 2, 4, 0)):
    check_inside_backward(rank, n, a, F)
passed("inside_backward on ranks of 2 and 4, one without heads, and one without columns")
### BEGIN HIDDEN TESTS
for rank, n, a, F in ((0, 1, 3, 5), (2, 3, 4, 8), (2, 4, 2, 9), (4, 5, 3, 4)):
    check_inside_backward(rank, n, a, F)
check_inside_backward(0, 1, 32, 256, 128)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. The layer on ranks
#
# Put it together. $X$, $Y$ and their gradients are identical on all ranks. $X$ and $\beta$ are in the sum **once**.
# Every rank holds the norm's parameters and $\beta$ whole, so every rank needs their whole gradients. Where do these
# come from, and does any rank have to send them? That depends on where you put *f*: before the norm, or behind it.
#
# The norm is given. `block_forward` returns `y` and a cache; the check passes the cache to `block_backward`, which
# returns `dx` and the gradients of the shard, a dict with all five keys.
#
# How much may be sent? An all-reduce of $N$ elements on $p$ ranks costs each $2 N (p-1)/p$ (lab 1). **One** all-reduce
# of $b s h$ elements forward, **one** backward, nothing else. There are two branches, but only one region.

# %% answer="block"
# %%answer block
import numpy as np


def norm_forward(x, gain, shift):
    """Return the norm of x over its last axis, and kept (given)."""
    centered = x - x.mean(-1, keepdims=True)
    std = np.sqrt((centered ** 2).mean(-1, keepdims=True) + 1e-5)
    return centered / std * gain + shift, (centered / std, std)


def norm_backward(dn, gain, kept):
    """Return dx, and the gradients of gain and shift that belong to these positions (given). dn: like x."""
    unit, std = kept
    dunit = dn * gain
    dx = (dunit - dunit.mean(-1, keepdims=True) - unit * (dunit * unit).mean(-1, keepdims=True)) / std
    return dx, (dn * unit).sum((0, 1)), dn.sum((0, 1))


def block_forward(group, x, shard, d):
    """Return y [b, s, h] and a cache. x [b, s, h] and y are identical on all ranks; the shard is this rank's."""
    ### BEGIN SOLUTION
    n, unit = norm_forward(x, shard["gain"], shard["shift"])
    partial, kept = inside(f(group, n), shard, d)
    return x + g(group, partial) + shard["bias"], (n, unit, kept)
    ### END SOLUTION


def block_backward(group, dy, shard, cache):
    """Return dx [b, s, h] and the gradients of this rank's shard. dy [b, s, h] and dx are identical on all ranks."""
    ### BEGIN SOLUTION
    n, unit, kept = cache
    dn, grads = inside_backward(g_backward(group, dy), n, shard, kept)
    dx, dgain, dshift = norm_backward(f_backward(group, dn), shard["gain"], unit)
    return dy + dx, {**grads, "gain": dgain, "shift": dshift, "bias": dy.sum(axis=(0, 1))}
    ### END SOLUTION


# %% check="check_block_forward" points=6
# The layer on ranks, forward: Y is that of the whole layer
REDUCE = ("all_reduce",)


def block_on_ranks(n, b, s, h, a, F):
    """Run the forward. Return its outcome, all ranks' y and caches, and a function that runs the backward."""
    random = check_data("block")
    p, (x, dy) = layer(random, h, a, F), inputs(random, b, s, h)
    shards, (y, dx, grads) = shards_of(p, n), whole_block(x, p, dy, HEAD)
    forward = run(n, "block_forward", x, each(shards), HEAD, allow=REDUCE,
                  elements=x.size, hint="every rank must come to the all-reduce, also one that has nothing to add.")
    ys, caches = expect_values(forward.results, ("y", "cache"))
    return forward, (ys, y), lambda: (run(n, "block_backward", dy, each(shards), each(caches), allow=REDUCE,
                                          elements=x.size), shards_of(grads, n), dx)


def check_block_forward(n, b, s, h, a, F):
    _, (ys, y), _ = block_on_ranks(n, b, s, h, a, F)
    expect_equal(ys, [y] * n, "y",
                 "which terms are partial sums, and which are not? x and bias must be in the sum once.")


for n in (2, 4):
    check_block_forward(n, 2, 3, 4, a=4, F=8)
passed("block_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, a, F in ((1, 2, 3), (8, 3, 13), (5, 4, 3)):
    check_block_forward(n, 1, 2, 5, a, F)
### END HIDDEN TESTS

# %% check="check_block_backward" points=7
# The layer on ranks, backward: dX and the gradients of every shard are those of the whole layer
def check_block_backward(run_backward):
    backward, grads, dx = run_backward()
    dxs, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_dicts(mine, grads, "the gradient",
                 "the norm and the bias are outside the region: what is identical on all ranks there, and complete?")
    expect_equal(dxs, [dx] * len(dxs), "dx", "every rank has a part of dn; and x has gone past the region, too.")


for n in (2, 4):
    check_block_backward(block_on_ranks(n, 2, 3, 4, a=4, F=8)[-1])
passed("block_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, a, F in ((1, 2, 3), (8, 3, 13), (5, 4, 3)):
    check_block_backward(block_on_ranks(n, 1, 2, 5, a, F)[-1])
### END HIDDEN TESTS

# %% check="check_block_cost" points=6
# The layer on ranks: one all-reduce of b s h elements forward, and one backward
def check_block_cost(n, b, s, h, a, F):
    enough = 2 * b * s * h * (n - 1) // n
    forward, (ys, y), run_backward = block_on_ranks(n, b, s, h, a, F)
    backward, _, dx = run_backward()
    expect_near(ys, [y] * n, "y")
    expect_near(expect_values(backward.results, ("dx", "gradients"))[0], [dx] * n, "dx")
    for way, outcome in (("forward", forward), ("backward", backward)):
        expect_sent(outcome, enough, enough, f"the {way} (one all-reduce of b s h = {b * s * h})",
                    "what can be added up on the rank before the ranks add up?")


check_block_cost(4, 2, 3, 4, a=4, F=8)
passed("one all-reduce each way")
### BEGIN HIDDEN TESTS
for n, a, F in ((3, 4, 7), (8, 9, 11)):
    check_block_cost(n, 2, 1, 5, a, F)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Half of what?
#
# How many elements does a rank send for one layer, forward and backward together? `sent` says it for both blocks, the
# parallel one of this lab and the serial one of GPT-2,
#
# $$Z = X + \mathrm{Attention}(\mathrm{LayerNorm}_1(X)) + \beta_1, \qquad
# Y = Z + \mathrm{MLP}(\mathrm{LayerNorm}_2(Z)) + \beta_2 ,$$
#
# with *f* and *g* around each branch, where *f* stands behind the norm, as in section 4, or `early`, before it. Some
# gradients of the norm are then incomplete, too, and one more all-reduce for each norm adds them up. $p$ divides $h$.
# The next cell prints what your own ranks have sent, forward and backward.

# %%
forward, *_, run_backward = block_on_ranks(4, 2, 4, 8, a=4, F=8)
print(forward.sent, run_backward()[0].sent)

# %% answer="sent"
# %%answer sent
def sent(parallel, early, b, s, h, p):
    """Return the elements that a rank sends for one layer. parallel, early: bools; p: the number of ranks."""
    ### BEGIN SOLUTION
    regions = 1 if parallel else 2
    elements = 2 * b * s * h + (2 * h if early else 0)
    return regions * 2 * elements * (p - 1) // p
    ### END SOLUTION


# %% check="check_sent" points=5
# Counting: what a rank sends for a parallel and for a serial block
def check_sent(parallel, early, b, s, h, p, right):
    found = run(None, "sent", parallel, early, b, s, h, p).results
    block = f"a {'parallel' if parallel else 'serial'} block with f {'before' if early else 'behind'} the norm"
    expect_equal(found, [right], f"what a rank of {p} sends for {block}, b = {b}, s = {s}, h = {h},",
                 "how many regions are there, and which sums has each of them, forward and backward?", 0)


check_sent(True, False, 2, 4, 8, 4, 192)
check_sent(False, False, 2, 4, 8, 4, 384)
passed("one region's all-reduces, and two regions'")
### BEGIN HIDDEN TESTS
for p in (1, 2, 4):
    late, early = 4 * 64, 4 * 64 + 4 * 8                # of b s h = 64 and h = 8
    check_sent(True, False, 2, 4, 8, p, late * (p - 1) // p)
    check_sent(True, True, 2, 4, 8, p, early * (p - 1) // p)
    check_sent(False, True, 2, 4, 8, p, 2 * early * (p - 1) // p)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - Half the all-reduces, and the same loss? A parallel block is another function than a serial one: the MLP does not
#   see what the attention has found in the same layer. What do the authors of PaLM say about small and large models?
# - With $a = 40$ and $p = 16$ some ranks have three heads and others two. What does that cost? Could those with two
#   heads take more columns of the MLP?
# - Suppose that *f* stands before the norm. The norm's backward then works on a part of $dN$ on each rank. Is $dX$
#   still right? Which gradients are not, and how would you notice after 1,000 steps?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Two branches, attention and MLP, leave the region, but one all-reduce forward and one backward
# are enough. Explain why, with the words *partial sum*, *replicated* and *adjoint*. Name one change of the layer (not
# of the code) that would make a second all-reduce necessary.

# %% [markdown] writing="one_sum_is_enough" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). A colleague adds $\beta$ on every rank, before the sum. Which checks of this lab would still
# pass if $\beta$ were 0, or on one rank? Describe the smallest test that finds it: how many ranks, which sizes, which
# numbers, and what it compares. Explain why a smaller one would miss it.

# %% [markdown] writing="a_test_that_sees" points=5
# YOUR ANSWER HERE
