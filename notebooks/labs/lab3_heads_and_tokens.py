# %% [markdown]
# # Lab 3. Heads that are shared, and a vocabulary that does not divide
#
# Attention is sharded by heads and the embedding by tokens, and in the simplest case all ranks have the same number of
# them, and no two ranks have the same one. This lab is about the other cases. In *grouped-query attention* several
# heads share their keys and values, so some of those are held by several ranks, whose gradients must be added up. And
# the vocabulary does not divide.
#
# **You need**: lab 1, and walkthroughs 1 to 4. **Time**: about six hours. **Points**: 60.
#
# Labs work as lab 1 explains: cells that begin with `%%answer` are yours, checks run them on separate ranks, and the
# checks that give the points also try other sizes and numbers of ranks. An answer may use functions of other answers,
# but nothing from the locked cells or this project's packages.

# %%
# %load_ext grading
import numpy as np

from grading import each, run

# %% [markdown]
# ## Grouped-query attention
#
# There are $a$ *query heads*, but only $k$ *key/value heads*, and $k$ divides $a$. Query head $i$ reads key/value head
# $j = \lfloor i / (a/k) \rfloor$: the first $a/k$ query heads share the first one, and so on (Ainslie et al. 2023,
# [arXiv 2305.13245](https://arxiv.org/abs/2305.13245), section 2.2). With $k = a$ it is the attention of GPT-2; with
# $k = 1$ it is multi-query attention. The KV cache, which is kept when a model generates text, shrinks by $a/k$.
#
# $X$ is $[b, s, h]$ and a head's size is $d$. The parameters are a dict:
#
# | key | shape | |
# |---|---|---|
# | `"Q"` | $[h, a, d]$ | `Q[:, i]` is query head $i$'s |
# | `"K"`, `"V"` | $[h, k, d]$ | `K[:, j]` and `V[:, j]` are key/value head $j$'s |
# | `"O"` | $[a, d, h]$ | `O[i]` takes query head $i$'s result to the output |
#
# $$Y = \sum_{i<a} \mathrm{softmax}\left(\frac{(X Q_i)(X K_j)^T}{\sqrt d} + \text{causal mask}\right) X V_j\, O_i,
# \qquad j = \lfloor i / (a/k) \rfloor .$$
#
# This is the whole layer with its backward, on one process. Your ranks must agree with it.

# %% locked="whole"
import numpy as np

from grading import check_data, each, expect, expect_dicts, expect_equal, expect_values, passed, run


def whole_attention(x, p, dy):
    """Return y, dx, and the gradients, a dict like p. x: [b, s, h]; dy: the upstream gradient [b, s, h]."""
    (h, a, d), k = p["Q"].shape, p["K"].shape[1]
    reads = np.arange(a) // (a // k)                                            # query head -> key/value head
    weights = p["Q"], p["K"][:, reads], p["V"][:, reads]                        # [h, a, d] each
    q, key, value = (np.einsum("bsh,had->basd", x, w) for w in weights)         # [b, a, s, d] each
    scores = np.where(np.tri(x.shape[1], dtype=bool), q @ key.swapaxes(2, 3) / np.sqrt(d), -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))                      # [b, a, s, s]
    probs = probs / probs.sum(-1, keepdims=True)
    context = probs @ value                                                     # [b, a, s, d]
    y = np.einsum("basd,adh->bsh", context, p["O"])
    dcontext = np.einsum("bsh,adh->basd", dy, p["O"])
    dprobs = dcontext @ value.swapaxes(2, 3)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) / np.sqrt(d)
    dqkv = dscores @ key, dscores.swapaxes(2, 3) @ q, probs.swapaxes(2, 3) @ dcontext
    dx = sum(np.einsum("basd,had->bsh", *both) for both in zip(dqkv, weights))
    dq, dkey, dvalue = (np.einsum("bsh,basd->had", x, one) for one in dqkv)
    dkey, dvalue = (one.reshape(h, k, a // k, d).sum(2) for one in (dkey, dvalue))      # over the heads that share it
    return y, dx, {"Q": dq, "K": dkey, "V": dvalue, "O": np.einsum("basd,bsh->adh", context, dy)}


# %% locked="tools"
def layer(random, h, a, k, d=2):
    """Draw random parameters."""
    return {"Q": random.normal(size=(h, a, d)), "K": random.normal(size=(h, k, d)),
            "V": random.normal(size=(h, k, d)), "O": random.normal(size=(a, d, h))}


def shards_of(p, n):
    """Return every rank's shard, if n divides a, and one of k and n divides the other.

    (The checks that give the points have another function for any n.)
    """
    a, k, shards = len(p["O"]), p["K"].shape[1], []
    for rank in range(n):
        own = slice(rank * a // n, (rank + 1) * a // n)
        read = slice(rank * k // n, max((rank + 1) * k // n, rank * k // n + 1))
        shards.append({"Q": p["Q"][:, own], "K": p["K"][:, read], "V": p["V"][:, read], "O": p["O"][own]})
    return shards


def inputs(random, b, s, h):
    """Draw a random x and a random upstream gradient."""
    return random.normal(size=(2, b, s, h))


# %% [markdown]
# ## 1. Which rank holds what
#
# The *query* heads are split as by `np.array_split`: if $a$ does not divide by the number of ranks, the first ranks
# have one more. A rank holds every key/value head that one of its query heads reads, once, and no other. So a key/value
# head may be held by several ranks: by all that have one of its query heads. With fewer query heads than ranks, the
# last ranks hold nothing.
#
# For example $a = 6$, $k = 2$ on 4 ranks: query heads 0 1 | 2 3 | 4 | 5. Query heads 0 to 2 read key/value head 0, and
# 3 to 5 read 1. So rank 1 holds both, and rank 2 holds key/value head 1 only.
#
# `heads` returns a rank's query heads and its key/value heads: two lists of numbers, each ascending. `holders` returns
# for each of the $k$ key/value heads the list of the ranks that hold it.

# %% answer="heads"
# %%answer heads
import numpy as np


def heads(a, k, rank, size):
    """Return the list of the rank's query heads, and the list of its key/value heads."""
    ### BEGIN SOLUTION
    queries = np.array_split(np.arange(a), size)[rank].tolist()
    return queries, sorted({i // (a // k) for i in queries})
    ### END SOLUTION


def holders(a, k, size):
    """Return for each key/value head the list of the ranks that hold it."""
    ### BEGIN SOLUTION
    return [[rank for rank in range(size) if j in heads(a, k, rank, size)[1]] for j in range(k)]
    ### END SOLUTION


# %% [markdown]
# To see what your code does, run it, here as `heads(a, k, rank, size)` in one process:

# %%
for rank in range(4):
    print(rank, run(None, "heads", 6, 2, rank, 4).results[0])

# %% check="check_heads" points=6
# The heads of each rank: query heads, key/value heads, and the holders of each
def check_heads(a, k, rank, n, queries, keys):
    found = expect_values(run(None, "heads", a, k, rank, n).results, ("query heads", "key/value heads"))
    who = f"rank {rank} of {n} with a = {a}, k = {k}"
    expect_equal(found[0], [queries], f"the query heads of {who}", tolerance=0)
    expect_equal(found[1], [keys], f"the key/value heads of {who}",
                 "how many query heads read the same one? There are a / k of them.", 0)


def check_holders(a, k, n, right):
    found, = run(None, "holders", a, k, n).results
    expect(isinstance(found, list | tuple) and len(found) == k, f"holders should return a list of {k} lists.")
    for j, ranks in enumerate(right):
        expect_equal([found[j]], [ranks], f"who holds key/value head {j} of a = {a}, k = {k} on {n} ranks",
                     "every rank that has one of its query heads.", 0)


check_heads(4, 4, 1, 2, [2, 3], [2, 3])
check_heads(8, 2, 1, 4, [2, 3], [0])
check_holders(4, 4, 2, [[0], [0], [1], [1]])
check_holders(8, 2, 4, [[0, 1], [2, 3]])
passed("heads and holders on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
check_heads(3, 1, 0, 1, [0, 1, 2], [0])
check_heads(6, 2, 1, 4, [2, 3], [0, 1])
check_heads(12, 3, 1, 5, [3, 4, 5], [0, 1])
check_heads(4, 2, 4, 5, [], [])
check_holders(6, 2, 4, [[0, 1], [1, 2, 3]])
check_holders(4, 2, 5, [[0, 1], [2, 3]])
check_holders(12, 4, 5, [[0], [1], [2, 3], [3, 4]])
### END HIDDEN TESTS

# %% [markdown]
# A rank's shard has its own heads only, in ascending order: with $a_r$ query heads and $k_r$ key/value heads, `"Q"` is
# $[h, a_r, d]$, `"K"` and `"V"` are $[h, k_r, d]$, and `"O"` is $[a_r, d, h]$.

# %% answer="shard"
# %%answer shard
def shard(group, whole):
    """Return this rank's shard, a dict. whole: the dict of all parameters."""
    ### BEGIN SOLUTION
    queries, keys = heads(len(whole["O"]), whole["K"].shape[1], group.rank, group.size)
    return {**{key: whole[key].take(keys if key in "KV" else queries, axis=1) for key in "QKV"},
            "O": whole["O"][queries[0]:queries[-1] + 1] if queries else whole["O"][:0]}
    ### END SOLUTION


# %% check="check_shard" points=4
# Sharding the parameters by heads
### BEGIN HIDDEN TESTS
def ragged_shards_of(p, n):
    """Return every rank's shard for any a, k and n."""
    share = len(p["O"]) // p["K"].shape[1]
    every = [(mine, np.unique(mine // share)) for mine in np.array_split(np.arange(len(p["O"])), n)]
    return [{"Q": p["Q"][:, mine], "K": p["K"][:, keys], "V": p["V"][:, keys], "O": p["O"][mine]}
            for mine, keys in every]


shards_of = ragged_shards_of
### END HIDDEN TESTS


def check_shard(a, k, n):
    p = layer(check_data("shard"), 3, a, k)
    expect_dicts(run(n, "shard", p, allow=()).results, shards_of(p, n), "the shard",
                 "Q and O go by query heads, K and V by key/value heads. Which axis is that of the heads?")


for a, k, n in ((4, 4, 2), (8, 2, 4)):
    check_shard(a, k, n)
passed("shard on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for case in ((3, 1, 1), (6, 2, 4), (4, 2, 5)):
    check_shard(*case)
### END HIDDEN TESTS

# %% [markdown]
# ## 2. A sum over some of the ranks
#
# The gradients of a key/value head must be summed over its holders, and over no other rank. There is no collective for
# that, so you build one from messages (lab 1 has the table: `send`, `receive`, `exchange`). `sum_over(group, x, ranks)`
# is called by the ranks in the list `ranks` (ascending, and you are in it), and returns to each of them the sum of
# their `x`.
#
# All of them go on to update a copy of the same parameters. If their sums differed in the last bit, the copies would
# drift apart. So add in the order of ranks, as in lab 1: exactly $((x_{r_0} + x_{r_1}) + x_{r_2}) + \dots$, on every
# rank. Arrays may have any shape. With $m$ ranks in the list, none may send more than $m - 1$ times its `x`.

# %% answer="sum_over"
# %%answer sum_over
def sum_over(group, x, ranks):
    """Return the sum of the x of these ranks, on each of them the same to the bit. x has the same shape on all."""
    ### BEGIN SOLUTION
    me, arrived = ranks.index(group.rank), {group.rank: x}
    for step in range(1, len(ranks)):
        to, source = ranks[(me + step) % len(ranks)], ranks[(me - step) % len(ranks)]
        arrived[source] = group.exchange(x, to, source)
    total = arrived[ranks[0]]
    for other in ranks[1:]:
        total = total + arrived[other]
    return total
    ### END SOLUTION


# %% check="check_sum_over" points=8
# A sum over some of the ranks, in their order, and cheap
MESSAGES = ("send", "receive", "exchange")


def sums_in_order(xs, sets):
    """Return for every rank the sum of the xs of its set of ranks, in order."""
    sums = {}
    for ranks in sets:
        total = xs[ranks[0]]
        for rank in ranks[1:]:
            total = total + xs[rank]
        sums |= dict.fromkeys(ranks, total)
    return [sums[rank] for rank in sorted(sums)]


def check_sum_over(*sets):
    n = sum(map(len, sets))
    xs = list(check_data("sum_over").normal(size=(n, 2, 3)) * 10.0 ** np.arange(n)[:, None, None])
    sets_of = [next(ranks for ranks in sets if rank in ranks) for rank in range(n)]
    outcome = run(n, "sum_over", each(xs), each(sets_of), allow=MESSAGES)
    what = f"the sum over {' and '.join(map(str, sets))}"
    expect_equal(outcome.results, sums_in_order(xs, sets), what, "x of the first rank in the list comes first.", 0)
    for rank, (sent, ranks) in enumerate(zip(outcome.sent, sets_of)):
        expect(sent <= 6 * (len(ranks) - 1), f"rank {rank} has sent {sent} elements for {what}; "
               f"{6 * (len(ranks) - 1)} are enough.", "no rank outside the list needs the sum.")


check_sum_over([0, 1])
check_sum_over([0, 1], [2, 3])
passed("sum_over on two ranks of 2 and of 4")
### BEGIN HIDDEN TESTS
check_sum_over([0], [1, 2, 4], [3])
check_sum_over([0, 2, 4, 6, 7], [1, 3, 5])
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Attention on ranks
#
# The computation of one head is given at the top of the next cell, forward and backward. (It computes keys and values
# for every query head anew. You may do better, but need not.)
#
# `attention_forward` gets $X$, identical on all ranks, and the rank's shard, and returns $Y$, identical on all ranks,
# and a cache: arrays, or tuples, lists and dicts of arrays. The check passes it to `attention_backward`, which returns
# $\partial L / \partial X$, identical on all ranks, and the gradients of the rank's shard. **Every** holder of a
# key/value head gets its *whole* gradient: from all of its query heads, wherever they are.
#
# Forward, one all-reduce of $b s h$ elements is enough. Backward, another, and for each key/value head that a rank
# shares with $m - 1$ others $2 h d\,(m - 1)$ elements. An all-reduce (`group.all_reduce`) needs all ranks, also those
# that hold nothing.
#
# A rank may share one head with the rank before it and another with the rank after it. Think about which rank waits for
# which.

# %% answer="attention"
# %%answer attention
import numpy as np


def head_forward(x, q, k, v, o):
    """Return one causal head's summand of y [b, s, h], and kept (given). x: [b, s, h]; q, k, v: [h, d]; o: [d, h]."""
    queries, keys, values = x @ q, x @ k, x @ v                                      # [b, s, d] each
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(q.shape[1])                     # [b, s, s]
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ values @ o, (x, q, k, v, o, queries, keys, values, weights)


def head_backward(dy, kept):
    """Return this head's part of dx [b, s, h], and dq, dk, dv [h, d] and do [d, h] (given). dy: [b, s, h]."""
    x, q, k, v, o, queries, keys, values, weights = kept
    dmixed = dy @ o.T                                                                # y = mixed @ o
    dvalues = weights.swapaxes(1, 2) @ dmixed                                        # mixed = weights @ values
    dweights = dmixed @ values.swapaxes(1, 2)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / np.sqrt(q.shape[1])
    dqueries, dkeys = dscores @ keys, dscores.swapaxes(1, 2) @ queries
    dx = dqueries @ q.T + dkeys @ k.T + dvalues @ v.T
    dq, dk, dv = (np.einsum("bsh,bsd->hd", x, one) for one in (dqueries, dkeys, dvalues))
    return dx, dq, dk, dv, np.einsum("bsd,bsh->dh", weights @ values, dy)


def attention_forward(group, x, shard, a, k):
    """Return y [b, s, h] and a cache. x [b, s, h] and y are identical on all ranks; the shard is this rank's."""
    ### BEGIN SOLUTION
    queries, keys = heads(a, k, group.rank, group.size)
    y, cache = np.zeros_like(x), []
    for i, head in enumerate(queries):
        j = keys.index(head // (a // k))
        summand, kept = head_forward(x, shard["Q"][:, i], shard["K"][:, j], shard["V"][:, j], shard["O"][i])
        y += summand
        cache.append(kept)
    return group.all_reduce(y), cache
    ### END SOLUTION


def attention_backward(group, dy, shard, cache, a, k):
    """Return dx [b, s, h] and the gradients of this rank's shard. dy [b, s, h] and dx are identical on all ranks."""
    ### BEGIN SOLUTION
    queries, keys = heads(a, k, group.rank, group.size)
    dx, grads = np.zeros_like(dy), {key: np.zeros_like(one) for key, one in shard.items()}
    for i, head in enumerate(queries):
        j = keys.index(head // (a // k))
        part, grads["Q"][:, i], dk, dv, grads["O"][i] = head_backward(dy, cache[i])
        dx += part
        grads["K"][:, j] += dk
        grads["V"][:, j] += dv
    for j, key in enumerate(keys):
        both = np.stack([grads["K"][:, j], grads["V"][:, j]])
        grads["K"][:, j], grads["V"][:, j] = sum_over(group, both, holders(a, k, group.size)[key])
    return group.all_reduce(dx), grads
    ### END SOLUTION


# %% check="check_attention_forward" points=8
# Attention forward: every rank has the whole Y
EVERYTHING = ("all_reduce", *MESSAGES)
S, H = 3, 4


def forward_on_ranks(a, k, n):
    """Check the forward. Return the elements that each rank has sent, the caches, and (parameters, x, dy)."""
    random = check_data("attention")
    p, (x, dy) = layer(random, H, a, k), inputs(random, 2, S, H)
    outcome = run(n, "attention_forward", x, each(shards_of(p, n)), a, k, allow=EVERYTHING,
                  hint="every rank must come to an all-reduce, also one without heads.")
    ys, caches = expect_values(outcome.results, ("y", "cache"))
    expect_equal(ys, [whole_attention(x, p, dy)[0]] * n, "y",
                 "query head i of all, not of the rank, reads key/value head i // (a // k). Where is that in the "
                 "shard?")
    return outcome.sent, caches, (p, x, dy)


for a, k, n in ((4, 4, 2), (8, 2, 4)):
    forward_on_ranks(a, k, n)
passed("attention_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for case in ((3, 1, 1), (6, 2, 4), (5, 1, 3), (4, 2, 5)):
    forward_on_ranks(*case)
### END HIDDEN TESTS

# %% check="check_attention_backward" points=12
# Attention backward: dX, and the whole gradient of every key/value head on every rank that holds it
def backward_on_ranks(a, k, n):
    """Check the backward. Return the elements that each rank has sent, forward and backward."""
    forward, caches, (p, x, dy) = forward_on_ranks(a, k, n)
    shards, (_, dx, grads) = shards_of(p, n), whole_attention(x, p, dy)
    backward = run(n, "attention_backward", dy, each(shards), each(caches), a, k, allow=EVERYTHING)
    dxs, mine = expect_values(backward.results, ("dx", "gradients"))
    expect_equal(dxs, [dx] * n, "dx", "every rank's heads used all of x.")
    expect_dicts(mine, shards_of(grads, n), "the gradient",
                 "a key/value head has a summand from each query head that reads it, here and on other ranks.")
    return forward, backward.sent


for a, k, n in ((4, 4, 2), (8, 2, 4)):
    backward_on_ranks(a, k, n)
passed("attention_backward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for case in ((4, 2, 1), (6, 2, 3), (6, 3, 8)):
    backward_on_ranks(*case)
### END HIDDEN TESTS

# %% check="check_attention_cost" points=4
# Attention: one all-reduce each way, and the shared gradients only to those who share them
def check_attention_cost(a, k, n, others):
    """Check what is sent. `others`: for each rank the number of other holders, summed over its key/value heads."""
    forward, backward = backward_on_ranks(a, k, n)
    one, d = 2 * 2 * S * H * (n - 1) // n, 2
    for rank, shared in enumerate(others):
        for way, sent, enough in (("forward", forward, one), ("backward", backward, one + shared * 2 * H * d)):
            expect(sent[rank] <= enough, f"{way}, rank {rank} has sent {sent[rank]:,} elements; {enough:,} are enough.",
                   "add up on the rank first; and a head's gradients concern only those who hold that head.")


check_attention_cost(8, 2, 4, [1, 1, 1, 1])
passed("attention sends no more than needed")
### BEGIN HIDDEN TESTS
check_attention_cost(5, 5, 3, [0, 0, 0])
check_attention_cost(6, 2, 3, [1, 2, 1])
### END HIDDEN TESTS

# %% [markdown]
# ## 4. Tokens
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


# %% check="check_embedding" points=6
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
                 "which is the first token of this rank? And what does a rank add for tokens that it does not hold?")
    enough = 2 * 2 * s * h * (n - 1) // n
    expect(max(outcome.sent) <= enough, f"a rank has sent {max(outcome.sent)} elements; {enough} are enough.",
           "one all-reduce of x, and not of the table.")


for n in (2, 4):
    check_embedding(8, n)
passed("embed_forward on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for V, n, pad in ((5, 1, 4), (11, 4, 3), (3, 5, 2)):
    check_embedding(V, n, pad)
### END HIDDEN TESTS

# %% check="check_embedding_backward" points=6
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
# ## 5. From vectors to logits
#
# The same table, read as columns, gives the logits: *tied* weights (the same section of Vaswani et al.). A rank
# computes the logits of its own tokens, $X E_r^T$, $[b, s, V_r]$, without the factor $\sqrt h$. They stay sharded: the
# loss of lab 4 takes them as they are.
#
# `logits_backward` returns $\partial L / \partial X$, identical on all ranks, and the contribution of the logits to the
# gradient of the rank's rows. Again `pad` gets none. One all-reduce of $b s h$ elements backward, and nothing forward.

# %% answer="logits"
# %%answer logits
import numpy as np


def logits_forward(group, x, rows):
    """Return the logits [b, s, V_r] of this rank's tokens. x [b, s, h] is identical on all ranks; rows: [V_r, h]."""
    ### BEGIN SOLUTION
    return x @ rows.T
    ### END SOLUTION


def logits_backward(group, dlogits, x, rows, V, pad):
    """Return dx [b, s, h], identical on all ranks, and the gradient of this rank's rows [V_r, h]."""
    ### BEGIN SOLUTION
    drows = np.einsum("bsv,bsh->vh", dlogits, x)
    drows[np.array_split(np.arange(V), group.size)[group.rank] == pad] = 0
    return group.all_reduce(dlogits @ rows), drows
    ### END SOLUTION


# %% check="check_logits" points=6
# Vectors to logits: own tokens forward; backward all of dX, and no gradient for pad
def check_logits(V, n, pad=1, s=3, h=4):
    random = check_data("logits")
    table, _ = table_and_tokens(random, V, 2, s, h, pad)
    x, _ = inputs(random, 2, s, h)
    dlogits = random.normal(size=(2, s, V))
    rows, parts = np.array_split(table, n), np.array_split(dlogits, n, axis=-1)
    forward = run(n, "logits_forward", x, each(rows), allow=(), hint="each rank's logits stay where they are.")
    expect_equal(forward.results, np.array_split(x @ table.T, n, axis=-1), "the logits of its tokens",
                 "no factor sqrt(h) here.")
    backward = run(n, "logits_backward", each(parts), x, each(rows), V, pad, allow=("all_reduce",))
    dxs, drows = expect_values(backward.results, ("dx", "gradient of the rows"))
    expect_equal(dxs, [dlogits @ table] * n, "dx", "every rank's tokens used all of x.")
    right = np.einsum("bsv,bsh->vh", dlogits, x) * (np.arange(V) != pad)[:, None]
    expect_equal(drows, np.array_split(right, n), "the gradient of its rows", "which of its rows is pad, if any?")
    enough = 2 * 2 * s * h * (n - 1) // n
    expect(max(backward.sent) <= enough, f"a rank has sent {max(backward.sent)} elements; {enough} are enough.")


for n in (2, 4):
    check_logits(8, n)
passed("logits on 2 and 4 ranks")
### BEGIN HIDDEN TESTS
for V, n, pad in ((4, 1, 3), (11, 4, 9), (3, 5, 2)):
    check_logits(V, n, pad)
### END HIDDEN TESTS

# %% [markdown]
# ## To think about
#
# - A model has $a = 64$ query heads and $k = 8$ key/value heads. From how many ranks on do shared key/value heads cost
#   something? What does a rank hold of K and V with 64 ranks, and what would it hold if $k$ were 64?
# - Suppose that every holder adds the others' gradients to its own in the order in which they arrive. What goes wrong
#   after 10,000 steps, and why does no test of one step see it?
# - The gradient of $E$ is the sum of what the embedding and the logits contribute. In a pipeline the first stage has
#   the one and the last stage has the other. What must they do?
