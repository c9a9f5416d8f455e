# %% [markdown]
# # 4. Heads: how attention is sharded
#
# The other half of a transformer's layer is attention. It has four matrices, and a softmax in the middle, which must
# not be applied to partial sums. Sharding it is easy, because its inventors have already divided it into *heads*. But
# there is a trap in how the matrices are stored: the shapes fit, the program runs, and the model is a different one.
#
# **You will** build four heads by hand, see where each of them looks, and distribute them over ranks; shard the fused
# matrix of queries, keys and values in the right and in the wrong way; see what the square root in the formula is for,
# and why it belongs to the head; and do it all on real ranks, forward and backward.
#
# **You need** walkthroughs [*Splitting matrices*](01_splitting_matrices.ipynb) (columns, then rows) and [*f and
# g*](02_f_and_g.ipynb). About 40 minutes.

# %%
# %load_ext shardlab.notebook
import inspect
from dataclasses import replace

import numpy as np

from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.heads import draw_patterns, draw_qkv
from shardlab.notebook.pictures.shards import by_columns, by_rows, draw_matrices, owners_of, partial_sums
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig
from reference.layers.attention import (Attention, attention_backward, attention_forward, attention_tensors,
                                        sharded_attention_forward)
from reference.comm.regions import TENSOR_PARALLEL

random = np.random.default_rng(3)

# %% [markdown]
# ## What a head does
#
# In attention each position of a text looks at others, and takes from each of them what it needs. Each of $s$ positions
# has $h$ numbers, a row of $X$. From them a head computes three shorter rows, of $d$ numbers:
#
# - a **query** $q$: what does this position look for?
# - a **key** $k$: what does it have to offer?
# - a **value** $v$: what does it give?
#
# The better the query of position $i$ fits the key of position $j$, the more $i$ takes from $j$: their product
# $q_i \cdot k_j$ is the *score*. Softmax ($e^{z_j}$ over the sum of all $e^{z_j}$) turns a position's scores into
# *shares*, the attention weights, which add up to 1. The output is the values, mixed in these shares:
#
# $$\mathrm{softmax}\!\left(\frac{Q K^T}{\sqrt{d}}\right) V$$
#
# In a GPT a position may look only at itself and at those before it. A layer has $a$ heads side by side, each with its
# own matrices for $q$, $k$ and $v$, and $d = h/a$. (In this walkthrough $d$ is the size of a head. In walkthrough *Data
# parallelism* it is the number of replicas: the papers use the letter for both.)
#
# ## Four heads, made by hand
#
# Training finds out what heads should look for. Ours are made by hand, so that we can see what they do. Here every
# token is a word. Its row of $X$ has three parts: a 1 that says which word it is; cosines and sines that say at which
# position; and a 1 that is always there.

# %%
text = "the cat sat on the mat and the cat".split()
words = sorted(set(text))
b, s, h, a, d = 1, len(text), 32, 4, 8

def encode(n):
    """Return [s, 8] for positions n [s]: cosines and sines of four angles, which grow with n at four speeds."""
    angles = np.outer(n, [1.3, 0.7, 0.4, 0.2])
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

n = np.arange(s)
x = np.zeros((b, s, h))
x[0, n, [words.index(word) for word in text]] = 1         # numbers 0 to 7: which word
x[0, :, 8:16] = encode(n)                                  # 8 to 15: where
x[0, :, 16] = 1                                           # 16: always

# %% [markdown]
# Each head has a matrix $[h, d]$ for queries, one for keys and one for values. In the project they are one array,
# *fused*: $[h, 3, a, d]$, so that one matrix product computes them all. `w[:, 0, i]` gives the queries of head $i$ and
# `w[:, 1, i]` its keys. A score is large if the two are similar. Ours are:
#
# | head | query | key |
# |---|---|---|
# | 0 | my position, minus 1 | the other's position |
# | 1 | my word | the other's word |
# | 2 | nothing, so that all scores are 0 | nothing |
# | 3 | position 0, always | the other's position |

# %%
w = np.zeros((h, 3, a, d))
w[:, 2] = random.normal(size=(h, a, d))                               # values: anything
one_back = np.linalg.lstsq(encode(n), encode(n - 1), rcond=None)[0]     # turns a position into the one before
w[8:16, 0, 0], w[8:16, 1, 0] = 6 * one_back, np.eye(8)                # head 0
w[0:8, 0, 1], w[0:8, 1, 1] = 15 * np.eye(8), np.eye(8)                # head 1
w[16, 0, 3], w[8:16, 1, 3] = 6 * encode(np.zeros(1)), np.eye(8)        # head 3

p = Attention(w, np.zeros((3, a, d)), random.normal(size=(h, h)) / np.sqrt(h), random.normal(size=h))
c = ModelConfig(num_layers=1, hidden_size=h, num_attention_heads=a, vocab_size=1, max_position_embeddings=s)
y, cache = attention_forward(x, p, c)
print("shares of each head [b, a, s, s]:", cache.core.probs.shape, " they add up to 1:",
      np.allclose(cache.core.probs.sum(-1), 1))

# %%
titles = ["the word before", "the same word", "all so far", "the first word"]
t = 2
owners = owners_of(a, t)
draw_patterns(cache.core.probs[0], owners, text, titles)

# %% [markdown]
# A row is a position, and shows where it looks; the darker, the larger the share. Grey positions are hidden: they are
# in the future. Each head has a picture of its own, to which no other head contributes. That is the point: **heads do
# not interact**, until a last matrix mixes their results, the *output projection* $[h, h]$. So we distribute them: two
# ranks, two heads each. The colours show which rank has which head.
#
# ## Why not some other way?
#
# Here is the cost of other ways to shard attention.
#
# **Across a head.** Rank 0 has the first half of each query and key, rank 1 the second. A score is a sum over the $d$
# numbers, so each rank has a partial sum of it. And softmax is not linear (the rule of walkthrough *Splitting
# matrices*): the scores must be added up first, $s^2$ of them for each head and text.

# %%
from reference.ops import softmax

q, k = cache.core.q[0, :, 0], cache.core.k[0, :, 0]                       # head 0's, [s, d]
halves = [q[:, half] @ k[:, half].T for half in (slice(0, d // 2), slice(d // 2, d))]
print("the scores are the sum of the halves:     ", np.allclose(sum(halves), q @ k.T))
print("softmax is the sum of the halves' softmax:", np.allclose(sum(map(softmax, halves)), softmax(q @ k.T)))

# %% [markdown]
# **By positions.** Each rank takes some positions of the text. But each looks at keys and values of all others before
# it, so those must be gathered, and each rank needs all of the weights.
#
# **By heads** there is g at the end, as in the MLP: one all-reduce of $b\,s\,h$ numbers. With the sizes of GPT-3
# ($s = 2048$, $h = 12288$, $a = 96$), each of eight ranks would send, in 16 bits, for one text in one layer:
#
# **Predict.** By heads, how many MB is that? (An all-reduce in a ring sends $2N(t-1)/t$ numbers.)

# %%
guess = ...                # MB

# %% tags=["hide-output"]
from reference.comm.ring import ring_all_gather, ring_all_reduce

S, H, heads, megabytes = 2048, 12288, 96, 2 / 1e6
ways = {"by heads: g": ring_all_reduce(S * H, 8),
        "across heads: scores, then g": ring_all_reduce(heads * S**2, 8) + ring_all_reduce(S * H, 8),
        "by positions: keys and values": ring_all_gather(2 * S * H, 8)}
reveal(guess, ways["by heads: g"] * megabytes, "MB that each rank sends, by heads")
draw_bars({name: {"sent": numbers * megabytes} for name, numbers in ways.items()},
          "MB that each of 8 ranks sends in the forward of attention", unit=" MB")

# %% [markdown]
# Splitting by positions sends as much as by heads (and less if several queries share a key), but a rank then holds all
# weights of the layer. (For very long texts it is done nevertheless. It is called context parallelism, and walkthrough
# *Long sequences* shows it.) By heads, a rank holds $1/t$ of the weights. Of what grows with $s^2$, the shares $[b, a,
# s, s]$, it holds $1/t$ either way.
#
# ## The trap: how Q, K and V are stored
#
# The fused array $[h, 3, a, d]$ can be read as a matrix of $3h$ columns: first all queries, head by head, then all
# keys, then all values. Rank 0 needs the columns of *its heads* in each of the three. What happens if we just split the
# $3h$ columns in two, like the MLP's $A$?

# %%
draw_qkv({"by heads": np.tile(owners, (3, 1)), "straight through": owners_of(3 * a, t).reshape(3, a)}, a)

# %% [markdown]
# Split straight through, rank 0 has *all queries* and half of the keys, and rank 1 not one query. It ought to fail
# immediately. It does not. A rank's $3h/t$ columns are reshaped to $[h, 3, a/t, d]$, and the shape is right:
#
# **Predict.** On two ranks, rank 0 gets the columns of six heads: two that it takes for queries, two for keys, two for
# values. How many of the six are what it takes them for?

# %%
guess = ...                # of the six

# %% tags=["hide-output"]
from reference.params import split

tensors = attention_tensors(c)

def straight_through(t):
    """Return each rank's tensors, of which all but w_qkv are right."""
    pieces = np.split(p.w_qkv.reshape(h, 3 * h), t, axis=1)
    return [replace(shard, w_qkv=piece.reshape(shard.w_qkv.shape))
            for shard, piece in zip(split(p, tensors, t), pieces)]

def off(shards):
    """Return the largest error of the result of these ranks, relative to the largest element."""
    ys, _ = sharded_attention_forward([x] * len(shards), shards, c, TENSOR_PARALLEL)
    return np.abs(ys[0] - y).max() / np.abs(y).max()

for t in (1, 2, 4):
    print(f"{t} ranks: by heads right: {off(split(p, tensors, t)) < 1e-12},"
          f"  straight through off by {off(straight_through(t)):4.0%}")

kinds = np.repeat(["q", "k", "v"], a)[:3 * a // 2].reshape(3, a // 2)       # of rank 0's columns
reveal(guess, (kinds == [["q"], ["k"], ["v"]]).sum(), "of the six are what rank 0 takes them for")

# %% [markdown]
# What does rank 0 of two compute? It takes the first third of its columns for queries, which is right: they are those
# of heads 0 and 1. It takes the second third for keys, but those are the *queries* of heads 2 and 3. It takes the last
# third for values: the keys of heads 0 and 1. That is a valid attention layer, with other weights. Trained from the
# start in this way it learns. But with two ranks it is a different model than with four, and the weights of one are
# noise to the other.
#
# In the project nobody can make this mistake by hand: each tensor is declared with its shape and the *axis* along which
# it is split, and `split` (and the drawing of initial weights, and checkpoints) use that declaration.

# %%
print(inspect.getsource(attention_tensors))

# %% [markdown]
# `split=2` is axis $a$ of $[h, 3, a, d]$. (Megatron-LM stores the columns in another order, each head's query, key and
# value side by side, for which straight through *is* by heads. To convert weights between the two, permute them.)
#
# ## The output projection: rows
#
# A rank has its heads' part of the *context*: $[b, s, h/t]$, as columns. Columns on the left need a split by rows on
# the right, as in the MLP. So the output projection is split by rows, $d$ rows for each head, and each rank has a
# partial sum:

# %%
t = 2
draw_matrices([by_columns("context", s, h // 2, t, "[s, h]: heads side by side"), "x",
               by_rows("projection", h // 2, h // 2, t, "[h, h]"), "=",
               partial_sums("Y", s, h // 2, "partial sums")], t, "the heads' results, and the rows that read them")

# %% [markdown]
# In the textbook all of it is this function. `heads_forward` does not know whether it has all heads or some; g is
# `region.leave`, and the bias comes once, after the sum.

# %%
print(inspect.getsource(sharded_attention_forward))

# %% [markdown]
# ## The root belongs to the head
#
# Why is the score divided by $\sqrt{d}$? If the numbers of $q$ and $k$ vary by about 1, their product, a sum of $d$ of
# such products, varies by $\sqrt{d}$. With large scores softmax saturates: one share is 1, all others are 0, and its
# gradient is 0 as well. Divided by $\sqrt{d}$ they vary by about 1, however large a head is ([Vaswani et al.
# 2017](https://arxiv.org/abs/1706.03762), section 3.2.1). Here is the largest of 64 shares for random queries and keys.
# The third curve is a common mistake: the root of the *model's* size, here $h = 16\,d$.

# %%
def largest(size, divisor):
    """Return the largest share among 64 random keys, averaged over 300 random queries."""
    draws = np.random.default_rng(size)
    q, k = draws.normal(size=(300, size)), draws.normal(size=(64, size))
    return softmax(q @ k.T / divisor).max(-1).mean()

sizes = [4, 8, 16, 32, 64, 128, 256]
draw_curves({"divided by the root of d": [largest(size, np.sqrt(size)) for size in sizes],
             "not divided": [largest(size, 1) for size in sizes],
             "divided by the root of h": [largest(size, np.sqrt(16 * size)) for size in sizes]},
            "size d of a head", "largest of 64 shares", x=sizes, log="x")

# %% [markdown]
# Not divided, a large head sees only one position. Divided by $\sqrt{h}$, it sees a little of each position, nearly the
# same of all.
#
# For us there is another point: $d$ is the same on any number of ranks. A rank computes it from what it holds,
# `q.shape[-1]` of $[b, s, a/t, d]$. If it took the root of *its columns*, $h/t$, there would be a different model for
# each $t$:

# %%
scores = q @ k.T                                                          # of head 0, not divided
for t in (1, 2, 4):
    shares = softmax(scores[:2, :2] / np.sqrt(h / t))[1]
    print(f"t = {t}: position 1 takes {shares[0]:.0%} from position 0 and {shares[1]:.0%} from itself")
shares = softmax(scores[:2, :2] / np.sqrt(d))[1]
print(f"with the root of d = h/a, whatever t is: {shares[0]:.0%} and {shares[1]:.0%}")

# %% [markdown]
# With one head on each rank, $t = a$, the mistake is invisible. A test of that case alone proves nothing.
#
# ## On real ranks
#
# Four ranks, one head each. `mpi_impl/layers/attention.py` is the same layer for one rank. Each gets its shard of our
# weights:

# %%
ranks["shards"], ranks["x"], ranks["c"] = split(p, tensors, 4), x, c

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.attention import attention_backward, attention_forward

mine, region = shards[rank], TensorParallelRegion(group)
y, cache = attention_forward(x, mine, c, region)
probs = cache.core.probs[0]
print(f"w_qkv {mine.w_qkv.shape}, projection {mine.w_out.shape}, shares [a/t, s, s] {probs.shape}")

# %% [markdown]
# No rank has sent anything to compute these shares. Here are the four ranks' own arrays:

# %%
draw_patterns(np.concatenate(ranks["probs"]), range(4), text, titles)

# %%
print("Y is right on each rank:", [np.allclose(one, y) for one in ranks["y"]])

# %% [markdown]
# The backward, from a random $dY$: f adds up $dX$ at the edge, and the weights' gradients stay where the weights are.

# %%
dy = random.normal(size=x.shape)
ranks["dy"] = dy

# %% [markdown]
# **Predict.** $X$ has $1 \cdot 9 \cdot 32$ numbers. How many elements go into all-reduces, forward and backward
# together?

# %%
guess = ...                # elements

# %% tags=["hide-output"]
# %%ranks 4
from shardlab.demos.printing import traffic_table
from mpi_impl.parallel.sinks import ImmediateSink
from reference.params import tree_map

grads, region = tree_map(np.zeros_like, mine), TensorParallelRegion(group)     # each cell has a new ledger
with group.ledger.phase("forward"):
    y, cache = attention_forward(x, mine, c, region)
with group.ledger.phase("backward"):
    dx = attention_backward(dy, mine, cache, c, grads, ImmediateSink(), region)
elements = group.ledger.elements(operation="all_reduce")
print(traffic_table(group.ledger))

# %% tags=["hide-output"]
reveal(guess, ranks["elements"][0], "elements in all-reduces")

# %% [markdown]
# Is it right? Compare it with the whole layer, in one process:

# %%
from reference.params import join

dx, whole = attention_backward(dy, p, attention_forward(x, p, c)[1], c)
gathered = join(ranks["grads"], tensors)                                  # the ranks' shards, put together again
print("dX:", all(np.allclose(one, dx) for one in ranks["dx"]))
for name in ("w_qkv", "b_qkv", "w_out", "b_out"):
    print(f"d{name}:", np.allclose(getattr(gathered, name), getattr(whole, name)))

# %% [markdown]
# It is as in the MLP: one all-reduce forward, one backward, of $b\,s\,h$ numbers each. Together a layer has four
# ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), figure 4).
#
# One thing a rank must know that it cannot see in its arrays: *which* heads it has. Dropout sets random shares to 0,
# and the random numbers depend on the head's number in the whole layer (`first_head` in the source). If every rank
# called its first head 0, all ranks would drop the same places in their heads. Nothing would fail.
#
# ## Heads that do not divide
#
# Six heads on four ranks? The program refuses, before it starts:

# %%
from reference.config import ParallelConfig, check_model_fits
from reference.errors import UserError

try:
    check_model_fits(ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=6, vocab_size=100,
                                 max_position_embeddings=16), ParallelConfig(tensor_model_parallel_size=4))
except UserError as error:
    print(error)

# %% [markdown]
# It would be possible. Two ranks with one head and one with two are right, too: heads do not interact, whichever rank
# holds them. In the textbook we can try it, with shards that we make ourselves:

# %%
stops = [0, 1, 2, 4]                                                      # heads 0; 1; 2 and 3
uneven = [replace(p, w_qkv=p.w_qkv[:, :, i:j], b_qkv=p.b_qkv[:, i:j], w_out=p.w_out[i * d:j * d])
          for i, j in zip(stops, stops[1:])]
print("right with 1, 1 and 2 heads:", off(uneven) < 1e-12)

# %% [markdown]
# But g waits for the slowest. The rank with two heads takes twice as long, and the other two are idle half of the time:
# three ranks would be no faster than two. So Megatron, and this project, require $a$ to be a multiple of $t$.
#
# ## What to take away
#
# | tensor | whole | split along | on a rank |
# |---|---|---|---|
# | queries, keys, values | $[h, 3, a, d]$ | heads | $[h, 3, a/t, d]$ |
# | their biases | $[3, a, d]$ | heads | $[3, a/t, d]$ |
# | output projection | $[h, h]$ | rows, $d$ for each head | $[h/t, h]$ |
# | its bias | $[h]$ | not at all | $[h]$, added once, after g |
#
# - Heads are independent until the output projection. That is columns first, then rows, with softmax in between.
# - A fused matrix has an inner structure. Split it along the axis of heads, not through the $3h$ columns.
# - The score is divided by $\sqrt{d}$, $d$ the size of a *head*. A number that a rank computes from its own shapes must
#   not change with $t$.
#
# ## Try it
#
# 1. Head 1 looks at the same word, itself included. Can you change its queries or keys so that it looks at the word
#    that *followed* the same word, last time? (No. It takes two layers: what would the first have to do?)
# 2. In `straight_through`, store the columns as Megatron does: `p.w_qkv.transpose(0, 2, 1, 3)` before the reshape, and
#    `.reshape(h, a // t, 3, d).transpose(0, 2, 1, 3)` for each piece. Is it right now, and for which $t$?
# 3. In `mpi_impl/layers/attention.py` every rank could say `first_head=0`. Which cell of this walkthrough would notice?
#    (The README shows a program that does.)
#
# <details><summary>Answer to 2</summary>
#
# ```python
# def straight_through(t):
#     pieces = np.split(p.w_qkv.transpose(0, 2, 1, 3).reshape(h, 3 * h), t, axis=1)
#     return [replace(shard, w_qkv=piece.reshape(h, a // t, 3, d).transpose(0, 2, 1, 3))
#             for shard, piece in zip(split(p, tensors, t), pieces)]
# ```
#
# `off(straight_through(t))` is below 1e-12 for 1, 2 and 4 ranks. Now a head's query, key and value are side by side, so
# $3h/t$ columns are whole heads for every $t$ that divides $a$. With 3 ranks, `split` refuses. To convert weights
# between the two layouts, permute them: the transposition is all that there is to it.
#
# </details>
#
# Next: [5. Tokens: embedding and loss](05_embedding_and_loss.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.attention`.
