# %% [markdown]
# # Lab 3. A latent that all heads share, positions that no rank has all of, and a vocabulary that does not divide
#
# Attention is sharded by heads and the embedding by tokens, and in the simplest case every parameter belongs to one
# head, and all ranks have the same number of tokens. This lab is about other cases. In *latent attention* all heads
# compute their keys and values from one small vector, which every rank computes. So some parameters are replicated in
# the middle of what is sharded, and their gradients must be added up. With *sequence parallelism* each rank has some of
# the positions only, so the norm's gradients must be added up, too. And the vocabulary does not divide.
#
# **You need**: labs 1 and 2, walkthroughs *Splitting matrices* to *Embedding and loss*, and for the fourth task what
# walkthrough *Sequence parallelism* says about sequence parallelism. **Time**: about six hours. **Points**: 60, and 10
# for words.
#
# Labs work as lab 1 explains: cells that begin with `%%answer` are yours, checks run them on separate ranks, and the
# checks that give the points also try other sizes and numbers of ranks. An answer may use functions of other answers,
# but nothing from the locked cells or this project's packages.

# %%
# %load_ext course.grading
import numpy as np

from course.grading import each, run

# %% [markdown]
# ## Latent attention
#
# A model that generates text keeps the keys and values of all earlier tokens, $2ad$ numbers for each token with $a$
# heads of size $d$. *Multi-head latent attention* (DeepSeek-AI 2024, *DeepSeek-V2*,
# [arXiv 2405.04434](https://arxiv.org/abs/2405.04434), section 2.1) keeps a *latent* of $c$ numbers instead, from which
# each head computes its key and its value. A rotation by the position (rope) would not fit between the latent and the
# key, so there is a second key, the *rope key* of $r$ numbers, which all heads share. Here is a simplified form,
# without the paper's norms and without its latent of the queries:
#
# $$\Lambda = X C, \qquad \rho = \mathrm{rope}(X R), \qquad
# q_i = [\,X Q_i',\ \mathrm{rope}(X Q_i'')\,], \qquad k_i = [\,\Lambda K_i,\ \rho\,], \qquad v_i = \Lambda V_i,$$
#
# $$Y = \sum_{i<a} \mathrm{softmax}\left(\frac{q_i\, k_i^T}{\sqrt{d + r}} + \text{causal mask}\right) v_i\, O_i .$$
#
# $X$ is $[b, s, h]$, and $[\ ,\ ]$ joins columns. The parameters are a dict:
#
# | key | shape | |
# |---|---|---|
# | `"C"` | $[h, c]$ | *down* to the latent, of which there is one |
# | `"R"` | $[h, r]$ | to the rope key, of which there is one |
# | `"Q"` | $[h, a, d + r]$ | `Q[:, i]` is head $i$'s: first the $d$ columns of $Q_i'$, then the $r$ of $Q_i''$ |
# | `"K"`, `"V"` | $[c, a, d]$ | *up* from the latent to head $i$'s key and value |
# | `"O"` | $[a, d, h]$ | `O[i]` takes head $i$'s result to the output |
#
# The checks compare your ranks with the whole layer and its backward, computed on one process. The function is not
# shown, since it would be the answer to section 2. Its results are stored for the cases that you see.

# %% locked="whole"
import numpy as np

from course.grading import (check_data, count_kept, each, expect, expect_dicts, expect_equal, expect_sent,
                            expect_values, passed, run, stored)

whole_attention, whole_layer = (stored("lab3_latents_and_tokens", name) for name in ("whole_attention", "whole_layer"))

# %% locked="tools"
BY_HEADS = {"Q": 1, "K": 1, "V": 1, "O": 0}     # the axis of the heads


def layer(random, a, h=4, c=3, r=2, d=2):
    """Draw random parameters."""
    shapes = {"C": (h, c), "R": (h, r), "Q": (h, a, d + r), "K": (c, a, d), "V": (c, a, d), "O": (a, d, h)}
    return {key: random.normal(size=shape) for key, shape in shapes.items()}


def shards_of(p, n):
    """Return every rank's shard, if n divides a. (The checks that give the points have another one for any n.)"""
    pieces = {key: np.split(p[key], n, axis) for key, axis in BY_HEADS.items()}
    return [{**p, **{key: pieces[key][rank] for key in pieces}} for rank in range(n)]


def inputs(random, b, s, h):
    """Draw a random x and a random upstream gradient."""
    return random.normal(size=(2, b, s, h))


# %% [markdown]
# ## 1. Which rank holds what
#
# The heads are split as by `np.array_split`: if $a$ does not divide by the number of ranks, the first ranks have one
# more. With fewer heads than ranks, the last ranks have none. What belongs to no head is replicated: every rank holds
# all of it. `group.rank` is a rank's number, `group.size` the number of ranks.
#
# A rank's shard is a dict with the same keys, with $a_r$ for $a$, where $a_r$ is the number of its heads.

# %% answer="shard"
# %%answer shard
import numpy as np


def shard(group, whole):
    """Return this rank's shard, a dict. whole: the dict of all parameters."""
    ### BEGIN SOLUTION
    return {**whole, **{key: np.array_split(whole[key], group.size, axis)[group.rank]
                        for key, axis in (("Q", 1), ("K", 1), ("V", 1), ("O", 0))}}
    ### END SOLUTION


# %% check="check_shard" points=4
# Sharding: what belongs to a head by heads, and the rest replicated
### BEGIN HIDDEN TESTS
from reference.ops import attention_core, attention_core_backward, layer_norm, layer_norm_backward
from reference.layers.rope import rotary_cos_sin, rotate, rotate_backward


def whole_attention(x, p, dy):
    """Return y, dx, and the gradients, a dict like p. x: [b, s, h]; dy: the upstream gradient [b, s, h]."""
    (r, d), latent = (p["R"].shape[1], p["K"].shape[2]), x @ p["C"]
    angles, q = rotary_cos_sin(x.shape[1], r, x), np.einsum("bsh,han->bsan", x, p["Q"])
    rope_key = rotate((x @ p["R"])[:, :, None], angles)                                 # the same for all heads
    key, value = (np.einsum("bsc,cad->bsad", latent, p[name]) for name in "KV")
    q = np.concatenate([q[..., :d], rotate(q[..., d:], angles)], -1)
    k = np.concatenate([key, np.broadcast_to(rope_key, (*key.shape[:3], r))], -1)
    mixed, kept = attention_core(q, k, value, causal=True) if value.size else (value, None)
    dmixed = np.einsum("bsh,adh->bsad", dy, p["O"])
    dq, dk, dvalue = attention_core_backward(dmixed, kept) if value.size else (q, k, value)
    dq = np.concatenate([dq[..., :d], rotate_backward(dq[..., d:], angles)], -1)
    dkey, drope = dk[..., :d], rotate_backward(dk[..., d:].sum(2, keepdims=True), angles)[:, :, 0]
    dlatent = np.einsum("bsad,cad->bsc", dkey, p["K"]) + np.einsum("bsad,cad->bsc", dvalue, p["V"])
    dx = np.einsum("bsan,han->bsh", dq, p["Q"]) + dlatent @ p["C"].T + drope @ p["R"].T
    grads = {"C": np.einsum("bsh,bsc->hc", x, dlatent), "R": np.einsum("bsh,bsr->hr", x, drope),
             "Q": np.einsum("bsh,bsan->han", x, dq), "K": np.einsum("bsc,bsad->cad", latent, dkey),
             "V": np.einsum("bsc,bsad->cad", latent, dvalue), "O": np.einsum("bsad,bsh->adh", mixed, dy)}
    return np.einsum("bsad,adh->bsh", mixed, p["O"]), dx, grads


def whole_layer(x, p, dy):
    """Return y, dx, and the gradients, a dict like p, of x + attention(norm(x)). x: [b, s, h]; dy: like x."""
    n, kept = layer_norm(x, p["gain"], p["shift"], 1e-5)
    attention, dn, grads = whole_attention(n, p, dy)
    dx, dgain, dshift = layer_norm_backward(dn, p["gain"], kept)
    return x + attention, dy + dx, {**grads, "gain": dgain, "shift": dshift}


def ragged_shards_of(p, n):
    """Return every rank's shard for any a and n."""
    every = np.array_split(np.arange(len(p["O"])), n)
    return [{**p, **{key: p[key].take(mine, axis) for key, axis in BY_HEADS.items()}} for mine in every]


shards_of = ragged_shards_of
### END HIDDEN TESTS


def check_shard(a, n):
    p = layer(check_data("shard"), a)
    expect_dicts(run(n, "shard", p, allow=()).results, shards_of(p, n), "the shard",
                 "which parameters have an axis of heads, and which axis is it? Every rank needs all of the others.")


for n in (2, 4):
    check_shard(4, n)
passed("shard on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for a, n in ((3, 1), (7, 4), (3, 5)):
    check_shard(a, n)
### END HIDDEN TESTS

# %% [markdown]
# $X$, $Y$ and $\partial L / \partial Y$ are identical on all ranks. Suppose that each rank computes, forward and
# backward, what its own heads need and nothing else. Then some gradients are complete on the rank that needs them. The
# others are *partial*: a rank has its own heads' summand only. Which are these?

# %% answer="is_partial"
# %%answer is_partial
def is_partial(key):
    """Return True if a rank's gradient of this parameter is partial. key: that of a parameter, or "x", the input."""
    ### BEGIN SOLUTION
    return key in ("C", "R", "x")
    ### END SOLUTION


# %% check="check_is_partial" points=4
# Which gradients are partial
def check_is_partial(key, right):
    expect_equal(run(None, "is_partial", key).results, [right], f"is_partial({key!r})",
                 "who reads it: one rank's heads only, or the heads of several ranks?", 0)


check_is_partial("x", True)
check_is_partial("O", False)
passed("is_partial of x and of O")
### BEGIN HIDDEN TESTS
for key in "CRQKV":
    check_is_partial(key, key in "CR")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. The heads of one rank
#
# `inside` takes $X$ and a rank's shard, and returns the rank's partial sum of $Y$, that of its own heads. It also
# returns `kept`, the values that its backward will need. You choose them: arrays, or tuples, lists and dicts of arrays,
# since the check passes them from one run to the next. The backward gets $X$ and the shard again, so they need not be
# included.
#
# `inside_backward` takes the gradient of the partial sum, and returns what this rank's heads contribute to
# $\partial L / \partial X$ and to the gradients of its shard, a dict with all six keys.
#
# Rope and the softmax are given at the top of the cell, forward and backward. Rope is a rotation, so its backward turns
# the other way. Positions are numbered from 0.

# %% answer="inside"
# %%answer inside
import numpy as np


def rope(x, way=1):
    """Turn pairs of numbers by an angle that grows with the position (given). x: [..., s, r]; way=-1 turns back."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin, left, right = np.cos(angle), way * np.sin(angle), x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def attend(q, k, v):
    """Return the heads' causal attention [b, a_r, s, d], and kept (given). q, k: [b, a_r, s, d + r]; v like that."""
    scores = np.where(np.tri(q.shape[2], dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]), -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs = probs / probs.sum(-1, keepdims=True)
    return probs @ v, (q, k, v, probs)


def attend_backward(dmixed, kept):
    """Return the gradients of q, k and v (given). dmixed: the gradient of what attend has returned."""
    q, k, v, probs = kept
    dprobs = dmixed @ v.swapaxes(2, 3)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) / np.sqrt(q.shape[3])
    return dscores @ k, dscores.swapaxes(2, 3) @ q, probs.swapaxes(2, 3) @ dmixed


def inside(x, shard):
    """Return this rank's partial sum [b, s, h], and kept. x: [b, s, h]."""
    ### BEGIN SOLUTION
    r, latent = shard["R"].shape[1], x @ shard["C"]
    q = np.einsum("bsh,han->basn", x, shard["Q"])
    q = np.concatenate([q[..., :-r], rope(q[..., -r:])], axis=-1)
    key, value = (np.einsum("bsc,cad->basd", latent, shard[name]) for name in "KV")
    rope_key = np.broadcast_to(rope(x @ shard["R"])[:, None], (*key.shape[:3], r))
    mixed, heads = attend(q, np.concatenate([key, rope_key], axis=-1), value)
    return np.einsum("basd,adh->bsh", mixed, shard["O"]), (latent, mixed, heads)
    ### END SOLUTION


def inside_backward(dy, x, shard, kept):
    """Return what this rank's heads contribute to dx [b, s, h] and to the gradients, a dict. dy: [b, s, h]."""
    ### BEGIN SOLUTION
    r, (latent, mixed, heads) = shard["R"].shape[1], kept
    dq, dk, dv = attend_backward(np.einsum("bsh,adh->basd", dy, shard["O"]), heads)
    dq = np.concatenate([dq[..., :-r], rope(dq[..., -r:], -1)], axis=-1)
    dkey, drope = dk[..., :-r], rope(dk[..., -r:].sum(axis=1), -1)                      # one rope key for all heads
    dlatent = np.einsum("basd,cad->bsc", dkey, shard["K"]) + np.einsum("basd,cad->bsc", dv, shard["V"])
    dx = np.einsum("basn,han->bsh", dq, shard["Q"]) + dlatent @ shard["C"].T + drope @ shard["R"].T
    return dx, {"C": np.einsum("bsh,bsc->hc", x, dlatent), "R": np.einsum("bsh,bsr->hr", x, drope),
                "Q": np.einsum("bsh,basn->han", x, dq), "K": np.einsum("bsc,basd->cad", latent, dkey),
                "V": np.einsum("bsc,basd->cad", latent, dv), "O": np.einsum("basd,bsh->adh", mixed, dy)}
    ### END SOLUTION


# %% check="check_inside" points=7
# One rank's heads: the partial sums add up to Y
def inside_case(rank, n, a, h=4, c=3):
    """Return an input, a rank's shard and the right result: that of a whole layer of its heads."""
    random = check_data("inside")
    (x, dy), mine = inputs(random, 2, 3, h) * 4 / h, shards_of(layer(random, a, h, c, r=4), n)[rank]
    return x, dy, mine, whole_attention(x, mine, dy)


def check_inside(rank, n, a):
    x, _, mine, (right, _, _) = inside_case(rank, n, a)
    found, _ = expect_values(run(None, "inside", x, mine).results, ("partial sum", "kept"))
    expect_equal(found, [right], f"the partial sum of rank {rank} of {n}",
                 "rope turns the last r columns of a query and the rope key, and nothing else.")


for rank, n in ((0, 2), (3, 4)):
    check_inside(rank, n, a=4)
passed("inside on ranks of 2 and 4")
### BEGIN HIDDEN TESTS
for rank, n, a in ((0, 1, 3), (0, 3, 7), (2, 3, 7), (4, 5, 3)):
    check_inside(rank, n, a)
### END HIDDEN TESTS

# %% check="check_inside_backward" points=9
# One rank's heads, backward: their parts of dX and of the gradients
def check_inside_backward(rank, n, a, *sizes):
    x, dy, mine, (_, dx, grads) = inside_case(rank, n, a, *sizes)
    _, kept = expect_values(run(None, "inside", x, mine).results, ("partial sum", "kept"))
    backward = run(None, "inside_backward", dy, x, mine, kept[0], limit=10.0, hint="a backward takes as long as two "
                   "forwards, and not as one for each parameter.")
    found, gradients = expect_values(backward.results, ("dx", "gradients"))
    expect_dicts(gradients, [grads], f"rank {rank} of {n}: the gradient",
                 "the latent goes into keys and values, and all heads share the rope key: add up what comes back.")
    expect_equal(found, [dx], f"dx of rank {rank} of {n}", "x went into the queries, the latent and the rope key.")


for rank, n in ((0, 2), (3, 4)):
    check_inside_backward(rank, n, a=4)
passed("inside_backward on ranks of 2 and 4")
### BEGIN HIDDEN TESTS
for rank, n, a in ((0, 1, 3), (2, 3, 7), (4, 5, 3)):
    check_inside_backward(rank, n, a)
check_inside_backward(0, 1, 64, 128, 64)
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Attention on ranks
#
# `attention_forward` gets $X$, identical on all ranks, and the rank's shard, and returns $Y$, identical on all ranks,
# and a cache, which the check passes to `attention_backward`. That returns $\partial L / \partial X$, identical on all
# ranks, and the gradients of the rank's shard, each of them **whole**: copies of `"C"` and `"R"` that get different
# gradients would not stay copies.
#
# For sums over all ranks there is `group.all_reduce(x)`, which needs all ranks, also those that have no heads. An
# all-reduce of $N$ elements on $p$ ranks costs each $2 N (p-1)/p$ (lab 1). Forward, one of $b s h$ elements is enough.
# Backward, another, and what the partial gradients of parameters need: $h (c + r)$ elements. You could add up the
# gradients of $\Lambda$ and $\rho$ instead, of $b s (c + r)$ elements. But in training $b s$ is larger than $h$, as it
# is in the check of the cost.

# %% answer="attention"
# %%answer attention
import numpy as np


def attention_forward(group, x, shard):
    """Return y [b, s, h] and a cache. x [b, s, h] and y are identical on all ranks; the shard is this rank's."""
    ### BEGIN SOLUTION
    partial, kept = inside(x, shard)
    return group.all_reduce(partial), (x, kept)
    ### END SOLUTION


def attention_backward(group, dy, shard, cache):
    """Return dx [b, s, h] and the gradients of this rank's shard. dy [b, s, h] and dx are identical on all ranks."""
    ### BEGIN SOLUTION
    x, kept = cache
    dx, grads = inside_backward(dy, x, shard, kept)
    both = group.all_reduce(np.hstack([grads["C"], grads["R"]]))
    grads["C"], grads["R"] = np.split(both, [grads["C"].shape[1]], axis=1)
    return group.all_reduce(dx), grads
    ### END SOLUTION


# %% check="check_attention_forward" points=4
# Attention forward: every rank has the whole Y
def on_ranks(n, function, *arguments):
    """Call a function of attention on n ranks, which may use all-reduces."""
    return run(n, function, *arguments, allow=("all_reduce",), elements=arguments[0].size + 20,
               hint="every rank must come to an all-reduce, also one without heads.")


def forward_on_ranks(a, n, s):
    """Run the forward. Return its outcome, each rank's y and cache, and (parameters, x, dy)."""
    random = check_data("attention")
    p, (x, dy) = layer(random, a), inputs(random, 2, s, 4)
    outcome = on_ranks(n, "attention_forward", x, each(shards_of(p, n)))
    return outcome, *expect_values(outcome.results, ("y", "cache")), (p, x, dy)


def check_attention_forward(a, n, s):
    _, ys, _, (p, x, dy) = forward_on_ranks(a, n, s)
    expect_equal(ys, [whole_attention(x, p, dy)[0]] * n, "y", "every rank has the sum of its own heads only.")


for n in (2, 4):
    check_attention_forward(4, n, s=3)
passed("attention_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for a, n in ((3, 1), (15, 4), (3, 5)):
    check_attention_forward(a, n, s=4)
### END HIDDEN TESTS

# %% check="check_attention_backward" points=6
# Attention backward: dX, and the whole gradients of every shard
def backward_on_ranks(a, n, s):
    """Check the backward. Return the outcomes of forward and backward."""
    forward, _, caches, (p, x, dy) = forward_on_ranks(a, n, s)
    shards, (_, dx, grads) = shards_of(p, n), whole_attention(x, p, dy)
    backward = on_ranks(n, "attention_backward", dy, each(shards), each(caches))
    dxs, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_equal(dxs, [dx] * n, "dx", "every rank's heads used all of x.")
    expect_dicts(mine, shards_of(grads, n), "the gradient", "some are partial, and others are complete already.")
    return forward, backward


for n in (2, 4):
    backward_on_ranks(4, n, s=3)
passed("attention_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for a, n in ((4, 1), (15, 3), (3, 5)):
    backward_on_ranks(a, n, s=4)
### END HIDDEN TESTS

# %% check="check_attention_cost" points=3
# Attention: one all-reduce forward; backward one more, and one of the partial gradients
def check_attention_cost(a, n, s):
    forward, backward = backward_on_ranks(a, n, s)
    for way, outcome, more in (("forward", forward, 0), ("backward", backward, 4 * (3 + 2))):
        least, most = (2 * elements * (n - 1) // n for elements in (2 * s * 4, 2 * s * 4 + more))
        expect_sent(outcome, least, most, f"the {way}",
                    "add up on the rank first; and which gradients need no message at all?")


check_attention_cost(4, 4, s=5)
passed("attention sends no more than needed")
### BEGIN HIDDEN TESTS
check_attention_cost(5, 3, s=7)
check_attention_cost(3, 5, s=4)
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Sequence parallelism
#
# An all-reduce is a reduce-scatter and an all-gather. Between the two, every rank has its part of the sum only.
# Korthikanti et al. 2022 ([arXiv 2205.05198](https://arxiv.org/abs/2205.05198), section 4.2.2, figure 5) stay in this
# state between one region and the next: outside, a rank holds the $s_r$ positions that `np.array_split` gives it along
# the axis of $s$. The whole layer is now
#
# $$Y = X + \mathrm{Attention}(N), \qquad N = \mathrm{LayerNorm}(X),$$
#
# with latent attention, and a rank has its positions of $X$, $N$ and $Y$. In lab 2 all ranks had the same $N$, and *f*
# and *g* stood at the edges of the region. Forward, an all-gather replaces *f*, and a reduce-scatter replaces *g*. What
# replaces them backward?
#
# | call | what it does |
# |---|---|
# | `group.all_gather(x, axis)` | all ranks' `x`, joined in rank order along `axis`; their lengths along it may differ |
# | `group.reduce_scatter(x, axis)` | this rank's part of the sum of all `x` along `axis`, as by `np.array_split` |
#
# Two things are different now:
#
# - No rank may **keep** all of $N$ for the backward, or no memory is saved. A rank keeps values of its own positions,
#   and gathers $N$ again in the backward. In the cache there may be no more than $3\, b\, s_r\, h$ elements of the
#   outside, $b\, s\, (c + a_r (5 d + 3 r))$ of the inside, and the probabilities, $b\, a_r s^2$.
# - The norm, which is replicated and used outside the region, is applied to the rank's positions only. The gradients
#   that you return for its parameters are again those of **all** positions, on every rank.
#
# The shard has two keys more, `"gain"` and `"shift"`, both $[h]$. The norm is given. Forward, a rank may send
# $2\, b s h (p-1)/p$ elements. Backward, it may send 1.5 times as many, and $2 h (c + r + 2)$ more for gradients that
# are still incomplete.

# %% answer="sequence"
# %%answer sequence
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


def sequence_forward(group, x, shard):
    """Return y [b, s_r, h] of this rank's positions, and a cache. x: [b, s_r, h], of the same positions."""
    ### BEGIN SOLUTION
    n, unit = norm_forward(x, shard["gain"], shard["shift"])
    partial, kept = inside(group.all_gather(n, axis=1), shard)
    return x + group.reduce_scatter(partial, axis=1), (n, unit, kept)
    ### END SOLUTION


def sequence_backward(group, dy, shard, cache):
    """Return dx [b, s_r, h] of this rank's positions, and the gradients of its shard. dy: [b, s_r, h]."""
    ### BEGIN SOLUTION
    n, unit, kept = cache
    dn, grads = inside_backward(group.all_gather(dy, axis=1), group.all_gather(n, axis=1), shard, kept)
    dx, dgain, dshift = norm_backward(group.reduce_scatter(dn, axis=1), shard["gain"], unit)
    partial = {"C": grads["C"], "R": grads["R"], "gain": dgain[:, None], "shift": dshift[:, None]}
    sums = np.split(group.all_reduce(np.hstack([*partial.values()])),
                    np.cumsum([one.shape[1] for one in partial.values()])[:-1], axis=1)
    summed = {key: one.reshape(shard[key].shape) for key, one in zip(partial, sums)}
    return dy + dx, {**grads, **summed}
    ### END SOLUTION


# %% check="check_sequence_forward" points=4
# Sequence parallelism, forward: each rank's positions of Y
GATHER = ("all_gather", "reduce_scatter", "all_reduce")


def sequence_on_ranks(n, b, s, h, a):
    """Run the forward. Return its outcome, each rank's caches, y, right y, and a function that runs the backward."""
    random = check_data("sequence")
    p, (x, dy) = layer(random, a, h), inputs(random, b, s, h)
    p |= dict(zip(("gain", "shift"), random.normal(size=(2, h)) / np.sqrt(h)))      # no softmax should saturate
    shards, (y, dx, grads) = shards_of(p, n), whole_layer(x, p, dy)
    xs, dys, ys, dxs = (np.array_split(one, n, axis=1) for one in (x, dy, y, dx))
    forward = run(n, "sequence_forward", each(xs), each(shards), allow=GATHER, elements=x.size)
    found, caches = expect_values(forward.results, ("y", "cache"))
    return forward, caches, (found, ys), lambda: (
        run(n, "sequence_backward", each(dys), each(shards), each(caches), allow=GATHER, elements=x.size),
        shards_of(grads, n), dxs)


def check_sequence_forward(n, b, s, h, a):
    """Check the forward. Return its outcome, the caches, and a function that runs the backward."""
    forward, caches, (found, ys), backward = sequence_on_ranks(n, b, s, h, a)
    expect_equal(found, ys, "its positions of y", "gather positions, compute, scatter the sum. x comes last.")
    return forward, caches, backward


for n in (2, 4):
    check_sequence_forward(n, 2, 4, 3, a=4)
passed("sequence_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, s, a in ((1, 2, 1), (3, 4, 16), (5, 3, 3)):
    check_sequence_forward(n, 2, s, 3, a)
### END HIDDEN TESTS

# %% check="check_sequence_backward" points=7
# Sequence parallelism, backward: each rank's positions of dX, and the gradients of its shard
def check_sequence_backward(run_backward):
    """Check the backward. Return its outcome."""
    backward, grads, dxs = run_backward()
    found, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_equal(found, dxs, "its positions of dx", "the adjoint of an all-gather is a reduce-scatter, and vice versa.")
    expect_dicts(mine, grads, "the gradient", "a gradient is a sum over all positions and all heads that read it.")
    return backward


for n in (2, 4):
    check_sequence_backward(sequence_on_ranks(n, 2, 4, 3, a=4)[-1])
passed("sequence_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for n, s, a in ((1, 2, 1), (3, 4, 16), (5, 3, 3)):
    check_sequence_backward(sequence_on_ranks(n, 2, s, 3, a)[-1])
### END HIDDEN TESTS

# %% check="check_sequence_cost" points=3
# Sequence parallelism: N is not kept whole, and no more is sent than needed
def check_sequence_cost(n, b, s, h, a, c=3, r=2, d=2):
    forward, caches, run_backward = check_sequence_forward(n, b, s, h, a)
    for rank, cache in enumerate(caches):
        positions, heads = (len(np.array_split(np.arange(all_of), n)[rank]) for all_of in (s, a))
        may = 3 * b * positions * h + b * s * (c + heads * (5 * d + 3 * r)) + b * heads * s * s
        expect(count_kept(cache) <= may, f"rank {rank} keeps {count_kept(cache):,} elements for the backward; {may:,} "
               "are enough.", "keep what belongs to the positions that you were given, not what you have gathered.")
    least = 2 * b * s * h * (n - 1) // n
    for way, outcome, most in (("forward", forward, least), ("backward", check_sequence_backward(run_backward),
                                                             3 * b * s * h * (n - 1) // n + 2 * h * (c + r + 2))):
        expect_sent(outcome, least, most, f"the {way}", "gather n once, and add up all partial gradients once.")


check_sequence_cost(4, 2, 8, 32, a=4)
passed("sequence parallelism keeps and sends no more than needed")
### BEGIN HIDDEN TESTS
for n, s, a in ((5, 10, 5), (8, 16, 8)):
    check_sequence_cost(n, 1, s, 40, a)
### END HIDDEN TESTS

# %% [markdown]
# ## 5. Tokens
#
# The embedding's table $E$ is $[V, h]$, and a rank holds the rows that `np.array_split` of the $V$ tokens gives it
# (Shoeybi et al. 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053), section 3, pads $V$ until it divides; we
# do not). There may be more ranks than tokens. The input of the model is
#
# $$X = \sqrt h \; E[\text{tokens}]$$
#
# (the factor is that of Vaswani et al. 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762), section 3.4). One
# token, `pad`, fills up short texts. Its row is 0, and it must stay 0: **it gets no gradient**, whatever comes from
# above. Other tokens may occur many times, or never.
#
# `embed_forward` may use one all-reduce of $b s h$ elements. `embed_backward` sends nothing. Beware of NumPy: `E[-1]`
# is the last row, and no error.

# %% answer="embed"
# %%answer embed
import numpy as np


def embed_forward(group, tokens, rows, V, pad):
    """Return x [b, s, h]. tokens [b, s] and x are identical on all ranks; rows [V_r, h] are this rank's."""
    ### BEGIN SOLUTION
    mine = np.array_split(np.arange(V), group.size)[group.rank]
    x = np.zeros((*tokens.shape, rows.shape[1]))
    here = np.isin(tokens, mine)
    if mine.size:
        x[here] = rows[tokens[here] - mine[0]]
    return np.sqrt(rows.shape[1]) * group.all_reduce(x)
    ### END SOLUTION


def embed_backward(group, dx, tokens, V, pad):
    """Return the gradient of this rank's rows [V_r, h]. dx [b, s, h] is identical on all ranks."""
    ### BEGIN SOLUTION
    mine = np.array_split(np.arange(V), group.size)[group.rank]
    drows = np.zeros((len(mine), dx.shape[-1]))
    here = np.isin(tokens, mine) & (tokens != pad)
    np.add.at(drows, tokens[here] - mine[:1], dx[here] * np.sqrt(dx.shape[-1]))
    return drows
    ### END SOLUTION


# %% check="check_embedding" points=4
# Tokens to vectors: the right rows, scaled, in one all-reduce
def table_and_tokens(random, V, b, s, h, pad):
    """Draw a table whose row pad is 0, and tokens: some repeated, pad among them."""
    table, tokens = random.normal(size=(V, h)), random.integers(V, size=(b, s))
    table[pad], tokens[0, 0] = 0, pad
    return table, tokens


def check_embedding(V, n, pad=1, s=5, h=3):
    table, tokens = table_and_tokens(check_data("embedding"), V, 2, s, h, pad)
    rows = [table[mine] for mine in np.array_split(np.arange(V), n)]
    outcome = run(n, "embed_forward", tokens, each(rows), V, pad, allow=("all_reduce",))
    expect_equal(outcome.results, [np.sqrt(h) * table[tokens]] * n, f"x, with {V} tokens on {n} ranks,",
                 "which is the first token of this rank? What does it add for tokens that it does not hold? And does X "
                 "have its factor?")
    least, most = (2 * h * vectors * (n - 1) // n for vectors in ((tokens != pad).sum(), tokens.size))
    expect_sent(outcome, least, most, f"x of {tokens.size} tokens", "one all-reduce of x, and not of the table.")


for n in (2, 4):
    check_embedding(8, n)
passed("embed_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for V, n, pad in ((5, 1, 4), (11, 4, 3), (3, 5, 2)):
    check_embedding(V, n, pad)
### END HIDDEN TESTS

# %% check="check_embedding_backward" points=5
# Tokens to vectors, backward: repeated tokens add up, pad gets nothing, and nothing is sent
def check_embedding_backward(V, n, pad=1, s=7, h=3):
    random = check_data("embedding_backward")
    table, tokens = table_and_tokens(random, V, 2, s, h, pad)
    _, dx = inputs(random, 2, s, h)
    right = np.zeros_like(table)
    for token, gradient in zip(tokens.ravel(), dx.reshape(-1, h)):
        right[token] += (token != pad) * np.sqrt(h) * gradient
    outcome = run(n, "embed_backward", dx, tokens, V, pad, allow=(), hint="dx is identical on all ranks, and complete.")
    expect_equal(outcome.results, np.array_split(right, n), f"the gradient of its rows, with {V} tokens on {n} ranks,",
                 "a token that occurs twice has two summands (rows[ids] += ... takes one); pad has none.")


for n in (2, 4):
    check_embedding_backward(8, n)
passed("embed_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for V, n, pad in ((5, 1, 0), (11, 4, 10), (3, 5, 2)):
    check_embedding_backward(V, n, pad)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - DeepSeek-V2 has $a = 128$ heads with $d = 128$, and $c = 512$, $r = 64$. How many numbers does a rank of $p = 8$
#   keep in each layer for each earlier token when it generates text? How many would it keep if it stored its heads'
#   keys and values instead? And with $p = 128$? What does it cost that every rank holds the whole latent?
# - The paper has a norm between the latent and the up-projections, with a gain of $c$ numbers. Is the gain's gradient
#   partial? Where would an *f* in the middle make it complete, and what would that send?
# - Suppose that nobody adds up the gradients of `"R"`. After one step the copies differ. Why does no shape show it, and
#   no check of $Y$ before that step? What would you compare, and how often?
# - Gathering $N$ again makes the backward send 1.5 times as much. What can a rank compute while that gather is under
#   way? (Korthikanti et al. say it in section 4.2.2.)
# - The gradient of $E$ is the sum of what the embedding and the logits contribute. In a pipeline the first stage has
#   the one and the last stage has the other. What must they do?

# %% [markdown]
# ## In your own words
#
# Ten points are for two answers in words, which a person reads: at most 150 words each, with a reason for every claim.
# Write below each question, where it says YOUR ANSWER HERE. A double click opens the cell.
#
# **First** (5 points). Give a rule with which anybody can decide, without running anything, whether the gradient of a
# parameter is partial on a rank. Apply it to `C`, `O`, the table $E$, and a bias that is added to $Y$ after the sum.
# What happens in a long training if somebody gets one of them wrong?

# %% [markdown] writing="partial_or_whole" points=5
# YOUR ANSWER HERE

# %% [markdown]
# **Second** (5 points). Frameworks pad the vocabulary until it divides; you split it unevenly. Compare the two for $V
# = 50{,}257$ on 8 ranks: rows for each rank, memory, time of the slowest rank, what a checkpoint must know, and what
# the loss must take care of. Which would you choose, and for which reason?

# %% [markdown] writing="rows_that_do_not_divide" points=5
# YOUR ANSWER HERE
