# %% [markdown]
# # 5. Tokens: embedding and loss
#
# A model computes with numbers, so at its beginning tokens become numbers, and at its end numbers become tokens again.
# Both ends use the same table, with a row for each of 50,000 tokens. And the output, a number for every token of the
# vocabulary at every position, is among the largest arrays of the whole model. This walkthrough shards the table and
# that array, and computes the loss without ever gathering the array.
#
# **You will** distribute a vocabulary, and look up a text of which each rank knows a part; find out what padding must
# not do; compute the loss from sharded logits with three small sums; see three ways to get it wrong; and count the
# bytes for models of real size.
#
# **You need** walkthroughs [*Splitting matrices*](01_splitting_matrices.ipynb) and [*f and g*](02_f_and_g.ipynb).
# About 40 minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from shardlab.notebook.pictures.charts import draw_bars
from shardlab.notebook.pictures.shards import by_columns, draw_matrices, whole
from shardlab.notebook.pictures.vocabulary import draw_lookup, draw_vocabulary
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig
from reference.layers import embedding
from reference.layers.embedding import Embedding, local_ids, word_tensor
from reference.comm.regions import TENSOR_PARALLEL
from reference.params import initialize, split

random = np.random.default_rng(4)

# %% [markdown]
# ## A table of tokens
#
# The $V$ tokens that a model knows are its *vocabulary*, and a token is a number from 0 to $V - 1$. (Real tokens are
# mostly parts of words; here each is a whole word.) The *embedding* is a table $E$, $[V, h]$: to embed a text is to
# look up the rows of its tokens. The table is learnt, like all weights. Here are seven tokens, a text made of them, and
# a table with $h = 4$:

# %%
text = "the cat sat on the mat and the dog sat on the cat".split()
vocabulary = sorted(set(text))
V, h, t = len(vocabulary), 4, 4
tokens = np.array([[vocabulary.index(word) for word in text]])       # [b, s] = [1, 13]

c = ModelConfig(num_layers=1, hidden_size=h, num_attention_heads=1, vocab_size=V, max_position_embeddings=13,
                init_method_std=0.8, make_vocab_size_divisible_by=1)
tensors = Embedding(word_tensor(c), None)            # the table of tokens; that of positions is left out here
E = initialize(tensors, seed=4, dtype=np.float64).word
print(vocabulary, tokens[0])

# %% [markdown]
# $V$ is large, 50,257 for GPT-2. So the table is sharded by rows: each of $t$ ranks has $V/t$ tokens. Seven tokens do
# not divide by four, so a row for a token that does not exist is added at the end: *padding*. `split` does that:

# %%
shards = split(Embedding(E, None), tensors, t)
for rank, p in enumerate(shards):
    own = vocabulary[rank * len(p.word):(rank + 1) * len(p.word)]
    print(f"rank {rank} has {p.word.shape}:", *own, *["(padding)"] * (len(p.word) - len(own)))

# %% [markdown]
# ## Looking up tokens that other ranks hold
#
# Every rank has the whole text. It looks up the tokens that it has, and returns **zero** for all others. For every
# token all but one of the ranks' results are zero, so their sum is the token's row. That sum over the ranks is g, an
# all-reduce of $b\,s\,h$ numbers. Backward, g does nothing: each rank has all of $dX$, and adds it up for the tokens
# that it holds.

# %%
owners = tokens[0] // len(shards[0].word)            # all shards have the same number of rows
draw_lookup(text, owners, t)

# %%
print(inspect.getsource(local_ids))
xs, _ = embedding.sharded_embedding_forward(tokens, shards, TENSOR_PARALLEL)
print("the same as in the whole table:", np.array_equal(xs[0], E[tokens]))

# %% [markdown]
# `np.where(held, ids, 0)`: a token that is not there gets row 0, and the row is then multiplied by `held`, which is 0.
# What if we leave out the zeros?

# %%
ids, held = zip(*[local_ids(tokens, rank * len(p.word), len(p.word)) for rank, p in enumerate(shards)])

unmasked = sum(p.word[i] for p, i in zip(shards, ids))                # not multiplied by `held`
print(f"off by {np.abs(unmasked - E[tokens]).max() / np.abs(E).max():.0%} of the largest element")

# %% [markdown]
# And what if we leave out `np.where`, since the row is set to zero in the end anyway? On two ranks, with four rows
# each:

# %%
for rank, p in enumerate(split(Embedding(E, None), tensors, 2)):
    rows = tokens - rank * len(p.word)
    try:
        looked_up, error = p.word[rows], "no error"
    except IndexError:
        error = "IndexError"
    print(f"rank {rank}, rows {rows[0]} of {len(p.word)}: {error}")

# %% [markdown]
# In NumPy row $-1$ is the last row. Rank 1, for which the tokens of other ranks have negative numbers, gets no error.
# So rank 0 fails, and rank 1 goes on to the all-reduce and waits there: a hang, on two ranks. On one rank, which holds
# all tokens, everything is right.
#
# ## What padding must not do
#
# Padding is there so that all ranks have arrays of one shape. Here are real sizes: the vocabulary of GPT-2, padded to a
# multiple of 128 on each rank, as in Megatron (matrices of such sizes are faster):
#
# **Predict.** GPT-2's vocabulary has 50,257 tokens. On one rank, how many rows of padding are that?

# %%
guess = ...                # rows

# %% tags=["hide-output"]
gpt2 = ModelConfig(num_layers=48, hidden_size=1600, num_attention_heads=25, vocab_size=50257,
                   max_position_embeddings=1024)
for ranks_ in (1, 2, 4, 8):
    padded = gpt2.padded_vocab_size(ranks_)
    print(f"t = {ranks_}: {padded:,} rows, {padded - gpt2.vocab_size} of them padding, {padded // ranks_:,} on a rank")
reveal(guess, gpt2.padded_vocab_size(1) - gpt2.vocab_size, "rows of padding on one rank")
assert gpt2.make_vocab_size_divisible_by == 128 and round(gpt2.vocab_size, -4) == 50_000

# %% [markdown]
# The amount of padding depends on $t$. So if padding had any effect, a model on 8 ranks would differ from one on two.
# In this project it is storage and nothing else: never drawn, never decayed, not in a checkpoint. It cannot be looked
# up, since no text has such a token. But it can do harm at the other end.
#
# ## The logits: the same table, as columns
#
# At its end, the model has a row $x$ of $h$ numbers for each position again. The product of $x$ with a token's row of
# $E$ says how well that token would fit as the next one. These numbers are the *logits*, $[b, s, V]$:
#
# $$\text{logits} = X E^T$$
#
# To use $E$ once more, rather than a second table, is called *tying*; GPT-2 does it. It saves $V h$ parameters, and for
# us it means that the sharding is given. $E$ split by rows is $E^T$ split by columns. So this product is split by
# columns (walkthrough *Splitting matrices*): each rank computes the logits of its own tokens, and nothing is sent.
# Before it comes f, because every rank uses all of $X$.

# %%
draw_matrices([whole("X", len(text), h), "x", by_columns("E transposed", h, V + -V % t, t), "=",
               by_columns("logits", len(text), V + -V % t, t)], t, "logits: a product split by columns")

# %% [markdown]
# Which part of $E$'s gradient is on which rank? Tokens that were looked up get a part from the embedding. All tokens
# get a part from the logits. Both are computed on the rank that has the row, so they are just added up, and nothing is
# sent. (If a pipeline has its two ends on different ranks, each has a copy of the table: walkthrough *Pipelines*.)
#
# Our model has no layers in between, so $X$ is the embedding itself. And the padding?

# %%
tables = [p.word for p in shards]
logits, _ = embedding.sharded_logits_forward(xs, tables, V, TENSOR_PARALLEL)
for rank, part in enumerate(logits):
    print(f"rank {rank}: logits {part.shape}, after the first token {part[0, 0].round(2)}")

# %% [markdown]
# The logit of padding is **minus infinity**. Otherwise it would be 0 (a row of zeros, times $x$), and 0 is a logit like
# any other: it would get some of the probability.
#
# ## The loss
#
# *Softmax* turns logits into probabilities: token $w$ has $e^{z_w}$ over the sum of all $e^{z_v}$. The loss at a
# position is minus the logarithm of the probability of the *target*, the token that does come next. It is 0 if the
# target is certain:
#
# $$\ell = -\log \frac{e^{z_{target}}}{\sum_v e^{z_v}} = \log \sum_v e^{z_v} - z_{target}$$
#
# If padding is treated as a token like any other, the loss is larger, and grows with the amount of padding:

# %%
from reference.ops import cross_entropy

z, targets = (E[tokens] @ E.T)[:, :-1], tokens[:, 1:]                 # at each position the next token; [1, 12, 7]
mean = cross_entropy(z, targets)[0].mean()

for ranks_ in (1, 2, 3, 5):
    none = -V % ranks_                                                # tokens that do not exist
    as_token = np.concatenate([z, np.zeros((1, 12, none))], axis=-1)
    masked = np.concatenate([z, np.full((1, 12, none), -np.inf)], axis=-1)
    print(f"t = {ranks_}, {none} padded: loss {cross_entropy(as_token, targets)[0].mean():.4f} with logit 0,"
          f"  right with minus infinity: {np.isclose(cross_entropy(masked, targets)[0].mean(), mean)}")

# %% [markdown]
# ## Three numbers for each position
#
# Each rank has the logits of its own tokens. To get the loss we could gather them all: then each rank has $[b, s, V]$
# and does what one process would do. But look at the formula. All it needs from 50,000 logits is *two* numbers: the sum
# of $e^{z}$, and the target's logit. The first is the sum of the ranks' sums. One rank knows the second, and if the
# others contribute 0, it is a sum as well (as with the lookup).
#
# The third number is for safety. $e^{1000}$ is larger than any floating-point number. But the loss stays the same if
# the same number is subtracted from all logits. So the largest of them is subtracted first. Then the largest power is
# $e^0 = 1$: nothing overflows, and the sum is at least 1, so its logarithm is safe, too.
#
# Here are the logits at one position, where the token `sat` has been read and `on` comes next. For each step, what each
# rank contributes:

# %%
at = 2                                               # 'sat'
here = [part[0, at] for part in logits]              # each rank's two logits
target = targets[0, at]

highest = max(part.max() for part in here)
sums = [np.exp(part - highest).sum() for part in here]
owner, row = divmod(target, len(here[0]))
picked = [here[rank][row] - highest if rank == owner else 0.0 for rank in range(t)]

print("largest logit   ", *(f"{part.max():8.3f}" for part in here), f"   the largest: {highest:.3f}")
print("sum of exp      ", *(f"{part:8.3f}" for part in sums), f"   the sum: {sum(sums):.3f}")
print("target's logit  ", *(f"{part:8.3f}" for part in picked), f"   the sum: {sum(picked):.3f}")
print(f"loss: log {sum(sums):.3f} - ({sum(picked):.3f}) = {np.log(sum(sums)) - sum(picked):.4f},"
      f" in one process {cross_entropy(z, targets)[0][0, at]:.4f}")

# %% [markdown]
# Three all-reduces (one of them takes the maximum, not the sum), each of one number for each position. In the textbook,
# for all positions together, this is the third of three ways (`reference/layers/cross_entropy.py` has all of them).
# [Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053) (section 3) have the idea, but do not mention the maximum.

# %%
from reference.layers.cross_entropy import (gathered_cross_entropy, sharded_cross_entropy_backward,
                                            sharded_cross_entropy_forward, unsafe_cross_entropy)

print(inspect.getsource(sharded_cross_entropy_forward))

# %%
parts = [part[:, :-1] for part in logits]            # the last token has no next one
loss, caches = sharded_cross_entropy_forward(parts, targets)
print("as in one process:", np.allclose(loss, cross_entropy(z, targets)[0]))
print("as when gathered: ", np.allclose(loss, gathered_cross_entropy(parts, targets)))

# %% [markdown]
# ### Three wrong ways
#
# **Softmax on each rank alone.** Then the probabilities add up to 1 on *each* rank, and the target competes only with
# tokens of the same rank. **Each rank's own maximum.** It is safe, and looks harmless, since any number may be
# subtracted. But it must be the *same* number, or the ranks' sums have different scales. At the position above:

# %%
alone = cross_entropy(here[owner], np.array(row))[0]

tops = [part.max() for part in here]
total = sum(np.exp(part - top).sum() for part, top in zip(here, tops))
own = np.log(total) - (here[owner][row] - tops[owner])

print(f"loss {loss[0, at]:.3f}; with softmax on each rank alone {alone:.3f}; with each rank's own maximum {own:.3f}")

# %% [markdown]
# **No maximum.** Right, as long as logits are small. In which format do they stay small enough?

# %%
for kind in (np.float16, np.float32, np.float64):
    print(f"{kind.__name__}: exp overflows above {np.log(float(np.finfo(kind).max)):.1f}")

with np.errstate(over="ignore"):
    for factor in (1, 10, 1000):
        large = [factor * part for part in parts]
        print(f"logits x {factor}: no maximum {unsafe_cross_entropy(large, targets):.6g},",
              f"with the maximum {sharded_cross_entropy_forward(large, targets)[0].sum():.6g}")

# %% [markdown]
# ## The gradient needs no message
#
# What is the gradient of the loss with respect to the logits? Token $w$'s probability, minus 1 if it is the target.
# Each rank can compute that for its own tokens: it has the largest logit and the sum from the forward. So backward
# **nothing is sent**, and the gradient is sharded like the logits, just as the backward of the product needs it.

# %%
dlogits = sharded_cross_entropy_backward(np.ones_like(loss), caches)
draw_vocabulary({"logits": np.concatenate(here), "gradient: probability, minus 1 for the target":
            np.concatenate([part[0, at] for part in dlogits])}, vocabulary, t, target)

# %% [markdown]
# The gradients of one position add up to 0. The step goes against the gradient, so the target's logit rises and all
# others fall, most of all those that were too probable. Padding has probability 0, and gradient 0. Compare with
# numerical gradients, from a random $d\ell$ for each position:

# %%
dloss = random.normal(size=loss.shape)
found = np.concatenate(sharded_cross_entropy_backward(dloss, caches), axis=-1)[..., :V]

measured, step = np.empty_like(z), 1e-5
for i in np.ndindex(z.shape):
    up, down = z.copy(), z.copy()
    up[i], down[i] = z[i] + step, z[i] - step
    measured[i] = (dloss * (cross_entropy(up, targets)[0] - cross_entropy(down, targets)[0])).sum() / (2 * step)

print("the same as measured:", np.abs(found - measured).max() < 1e-8)
print("add up to 0 at each position:", np.abs(found.sum(-1)).max() < 1e-12)

# %% [markdown]
# ## On real ranks
#
# The same with a process for each shard: tokens in, loss out, and back to the gradient of the table.

# %%
ranks["shards"], ranks["tokens"], ranks["dloss"], ranks["V"] = shards, tokens, dloss, V

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.embedding import embedding_forward, logits_forward

mine, region = shards[rank], TensorParallelRegion(group)
x, cache = embedding_forward(tokens, mine, region)
ids, held, *_ = cache
logits, kept = logits_forward(x, mine.word, V, region)
print(f"found {held.sum():2} of {tokens.size} tokens; x {x.shape}, logits {logits.shape}")

# %% [markdown]
# **Predict.** The text has 12 positions with a target, and $h = 4$. How many elements go into all-reduces in the
# forward, the embedding's and the loss's?

# %%
guess = ...                # elements

# %% tags=["hide-output"]
# %%ranks 4
from shardlab.demos.printing import traffic_table
from mpi_impl.layers.cross_entropy import cross_entropy_backward, cross_entropy_forward
from mpi_impl.layers.embedding import embedding_backward, logits_backward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.params import tree_map

region, grads = TensorParallelRegion(group), tree_map(np.zeros_like, mine)     # each cell has a new ledger
with group.ledger.phase("forward"):
    x, cache = embedding_forward(tokens[:, :-1], mine, region)
    logits, kept = logits_forward(x, mine.word, V, region)
    loss, losses = cross_entropy_forward(logits, tokens[:, 1:], group)
with group.ledger.phase("backward"):
    dlogits = cross_entropy_backward(dloss, losses)
    dx = logits_backward(dlogits, mine.word, kept, grads.word, ImmediateSink(), region)
    embedding_backward(dx, cache, grads, region)
elements = group.ledger.elements(phase="forward")
print(traffic_table(group.ledger))

# %% tags=["hide-output"]
reveal(guess, ranks["elements"][0], "elements in the forward's all-reduces")

# %% [markdown]
# For 12 positions: g of the embedding, $12 \cdot 4$ numbers. The three sums of the loss, 12 numbers each. And f, where
# $X$ went into the logits. Is the gradient of the table right, both of its parts?

# %%
def total_loss(table):
    x = table[tokens[:, :-1]]
    return (dloss * cross_entropy(x @ table.T, targets)[0]).sum()

measured = np.empty_like(E)
for i in np.ndindex(E.shape):
    up, down = E.copy(), E.copy()
    up[i], down[i] = E[i] + step, E[i] - step
    measured[i] = (total_loss(up) - total_loss(down)) / (2 * step)

dE = np.concatenate([grads.word for grads in ranks["grads"]])
print("loss on each rank:", [np.allclose(one, loss) for one in ranks["loss"]])
print("dE as measured:", np.abs(dE[:V] - measured).max() < 1e-7, " padding's gradient is 0:", not dE[V:].any())

# %% [markdown]
# ## What it saves
#
# For models of real size, on eight ranks, for one text: gathering the logits; the three sums; and for comparison, one g
# of $b\,s\,h$ numbers, of which each layer has two. In float32, 4 bytes, since sums of exponentials need precision.

# %%
from reference.comm.ring import ring_all_gather, ring_all_reduce

sizes = {"GPT-2": (1024, 1600), "GPT-3": (2048, 12288)}               # s and h
padded = gpt2.padded_vocab_size(8)
bars = {}
for name, (s, hidden) in sizes.items():
    bars[f"{name}: gather the logits"] = {"sent": 4e-6 * ring_all_gather(s * padded, 8)}
    bars[f"{name}: g, for comparison"] = {"sent": 4e-6 * ring_all_reduce(s * hidden, 8)}
    bars[f"{name}: the three sums"] = {"sent": 4e-6 * 3 * ring_all_reduce(s, 8)}
draw_bars(bars, "MB that each of 8 ranks sends for one text, in float32", unit=" MB")

# %% [markdown]
# The third and the sixth bar are there; they are too short to be seen. In general gathering sends $b\,s\,V(t-1)/t$ and
# the three sums $6\,b\,s\,(t-1)/t$ numbers, $V/6$ times less.
#
# **Predict.** How many times less is that for GPT-2?

# %%
guess = ...                # times

# %% tags=["hide-output"]
less = ring_all_gather(gpt2.vocab_size, 8) / (3 * ring_all_reduce(1, 8))
assert round(less) == round(gpt2.vocab_size / 6)
reveal(guess, less, "times less for GPT-2's vocabulary")

# %% [markdown]
# And sending less is not even the main advantage. A rank that gathers the logits also has to *store* them, all of them,
# and their gradient as well:

# %%
draw_bars({f"{name}: {way}": {"held": 4e-6 * s * padded / part}
           for name, (s, _) in sizes.items() for way, part in (("gathered", 1), ("a rank's tokens", 8))},
          "MB of logits on each of 8 ranks for one text, in float32", unit=" MB")

# %% [markdown]
# ## What to take away
#
# | | on a rank | forward | backward |
# |---|---|---|---|
# | table of tokens | $V/t$ rows, the last ones padding | | |
# | embedding | looks up what it holds, else zero | g: all-reduce of $b\,s\,h$ | nothing |
# | logits | those of its tokens; padding $-\infty$ | nothing | f: all-reduce of $b\,s\,h$ |
# | loss | a sum, and perhaps the target | 3 all-reduces of $b\,s$ | nothing |
#
# - A rank contributes zero for what it does not hold. Then a sum combines the results: lookups, and the target's logit.
# - Padding depends on $t$, so it must have no effect: never looked up, no probability, no gradient.
# - Subtract the *global* maximum. Each rank's own is safe, but wrong.
# - Ask what a result needs to know of a large array before you send it.
#
# ## Try it
#
# 1. Set `t = 8` above (and 8 in the `%%ranks` cells). Rank 7 has nothing but padding, so all of its logits are minus
#    infinity. What is its maximum, what its sum of exp? Does anything break? What about each rank's own maximum?
# 2. Subtract the *smallest* logit in place of the largest, for logits that are 1000 times as large. What goes wrong?
#    And with the mean?
# 3. Often only the most probable token of a language model is needed. What must the ranks send to find it, and how many
#    numbers is that for each position?
#
# <details><summary>Answer to 3</summary>
#
# Two numbers for each position: the largest logit, and the id of a token that has it. In lists, as above:
#
# ```python
# rows, tops = logits[0].shape[-1], [part.max(-1) for part in logits]      # [b, s] on each rank
# highest = np.max(tops, axis=0)                                           # first all-reduce: the maximum
# offers = [np.where(top == highest, rank * rows + part.argmax(-1), V)     # V loses against every token
#           for rank, (part, top) in enumerate(zip(logits, tops))]
# token = np.min(offers, axis=0)                                           # second all-reduce: the minimum
# print(np.array_equal(token, (E[tokens] @ E.T).argmax(-1)))               # True
# ```
#
# It is the idea of the loss again: a rank that does not hold what is looked for contributes what changes nothing.
#
# </details>
#
# Next: [6. A whole block, on real ranks](06_a_block_on_real_ranks.ipynb). The demos for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.embedding` and `... -m shardlab.demos.cross_entropy`.
