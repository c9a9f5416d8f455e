# %% [markdown]
# # 7. Dropout on many ranks
#
# Dropout sets random numbers to 0. In a block that is sharded over ranks, some arrays are replicated, and some are
# sharded. Who draws the random numbers, so that copies stay copies, and shards stay independent? Most programs that get
# this wrong train happily, and nobody can say afterwards what they have trained.
#
# **You will** make dropout's random numbers independent of the ranks; look at the masks that four ranks draw; give each
# rank a seed of its own, and see one model become four; and let all ranks draw from the same numbers, which is wrong in
# another way.
#
# **You need** walkthrough [*A block on real ranks*](06_a_block_on_real_ranks.ipynb). About 25 minutes.

# %%
# %load_ext shardlab.notebook
import numpy as np

from shardlab.notebook.pictures.charts import draw_curves
from shardlab.notebook.pictures.masks import Drawn, draw_masks
from shardlab.notebook.predictions import reveal

# %% [markdown]
# ## The block of walkthrough *A block on real ranks*
#
# The same sizes, the same weights, and four ranks, each with its shard. `through` runs it forward and backward:

# %%
from shardlab.demos.one_block import B, CONFIG, DROPOUT, S, T, in_one_process, inputs, off

t, b, s, c, dropout = T, B, S, CONFIG, DROPOUT
x, dy = inputs()
y, _, _ = in_one_process(x, dy)
ranks["c"], ranks["x"], ranks["dy"] = c, x, dy

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.one_block import shard, through
from reference.random.dropout import Dropout

p, dropout = shard(group), Dropout(c, seed=1, step=0, layer=0)

# %%
# %%ranks 4
y, cache, dx, grads = through(TensorParallelRegion(group), p, x, dy, dropout)

# %% [markdown]
# ## Dropout: which rank draws what?
#
# A block has dropout in two kinds of places. *Outside* the regions, after attention and after the MLP, all ranks hold
# the same array, and must keep it the same: **all must draw the same mask**. *Inside*, attention drops some of its
# probabilities, and each rank has other heads: **each must draw its own**.
#
# Here a mask is not a sequence of random numbers but a function: whether an element is kept depends on the seed, the
# step, the layer, the place in the block, and *the element's index in the whole array*. A rank asks for its own part:

# %%
from reference.ops import draw_mask

every_head = draw_mask(dropout.attention(first_head=0), (b, 8, s, s), x)
two_of_rank_1 = draw_mask(dropout.attention(first_head=2), (b, 2, s, s), x)
print("rank 1's two heads are heads 2 and 3 of the whole:", np.array_equal(every_head.keep[:, 2:4], two_of_rank_1.keep))

# %% [markdown]
# These are the masks that the four ranks have just drawn, for the first text: attention's, $[s, s]$ for each head, and
# the first 16 columns of the one after attention. Dropped elements are white.

# %%
# %%ranks 4
inside, outside = cache.attention.core.mask.keep[0], cache.attention_mask.keep[0, :, :16]

# %%
def drawn():
    """Return the masks that the ranks have now."""
    heads = [Drawn(f"head {2 * rank + i}", mask, rank) for rank, both in enumerate(ranks["inside"])
             for i, mask in enumerate(both)]
    return {"inside:\neach its own": heads,
            "outside:\nall the same": [Drawn(f"rank {rank}", mask, rank) for rank, mask in enumerate(ranks["outside"])]}

draw_masks(drawn())

# %% [markdown]
# ### The wrong way: a seed for each rank
#
# Many programs begin with `seed + rank`, so that ranks draw different numbers. Inside that does no harm. Outside, two
# ranks that should hold the same array keep different elements of it.
#
# **Predict.** A fifth of the elements is dropped. If two ranks drop elements of the same array independently, what
# share of the elements is kept by one rank and dropped by the other?

# %%
guess = ...                # as a share: 0.5 is half of the elements

# %% tags=["hide-output"]
# %%ranks 4
wrong, cache, _, _ = through(TensorParallelRegion(group), p, x, dy, Dropout(c, seed=1 + rank, step=0, layer=0))
inside, outside = cache.attention.core.mask.keep[0], cache.attention_mask.keep[0, :, :16]
both = cache.attention_mask.keep
print("y begins", wrong[0, 0, :4].round(2))

# %% tags=["hide-output"]
reveal(guess, (ranks["both"][0] != ranks["both"][1]).mean(), "of the elements differ between ranks 0 and 1")
assert abs(2 * 0.2 * 0.8 - 0.32) < 1e-12          # kept by one and dropped by the other, either way
print(f"rank 1's y is off from rank 0's by {off(ranks['wrong'][1], ranks['wrong'][0]):.0%} of its largest element")
draw_masks({"outside, with\na seed for\neach rank": drawn()["outside:\nall the same"]})

# %% [markdown]
# ($2 \cdot 0.2 \cdot 0.8 = 0.32$, but for chance.) All ranks should hold the same $y$, and no two do. There is no
# error: shapes are right, and the next *g* adds up partial sums that belong to *different* inputs. What are the
# consequences? Let the block learn for 25 steps to produce some fixed target. Every rank has a copy of the norms'
# gains. Copies that start identical, and get identical gradients, stay identical.
#
# **Predict.** All copies are identical before the first step. After how many steps do they differ, if each rank has its
# own seed?

# %%
guess = ...                # steps

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.layer_context import LayerContext
from reference.params import tree_map

target = np.random.default_rng(6).normal(size=x.shape)

def learn(seed, steps=25):
    """Take plain gradient steps. Return for each step the loss, and how far the ranks' copies of a gain are apart."""
    weights, losses, apart = p, [], []
    for step in range(steps):
        region, grads = TensorParallelRegion(group), tree_map(np.zeros_like, p)
        y, cache = block_forward(x, weights, c, region, LayerContext(Dropout(c, seed, step, layer=0)))
        block_backward((y - target) / (y.size // y.shape[-1]), weights, cache, c, grads, ImmediateSink(), region)
        weights = tree_map(lambda weight, grad: weight - 0.01 * grad, weights, grads)
        losses.append(((y - target)**2).mean())
        gains = np.array(group.allgather_objects(weights.post_attention_layernorm.weight))
        apart.append((gains.max(0) - gains.min(0)).max())
    return losses, apart

(same_loss, same), (own_loss, own) = learn(seed=1), learn(seed=1 + rank)

# %% tags=["hide-output"]
same, own = ranks["same"][0], ranks["own"][0]
same_loss, own_loss = ranks["same_loss"][0], ranks["own_loss"][0]
print(f"loss, one seed:             from {same_loss[0]:.2f} to {same_loss[-1]:.2f}")
print(f"loss, a seed for each rank: from {own_loss[0]:.2f} to {own_loss[-1]:.2f}")
reveal(guess, next(steps for steps, difference in enumerate(own, 1) if difference > 1e-6), "steps")
print("with one seed the copies are apart by less than 1e-12:", max(same) < 1e-12)
draw_curves({"a seed for each rank": own, "one seed": same}, "step", "apart by at most",
            "The ranks' copies of one gain, which should be equal")

# %% [markdown]
# The loss falls in both cases. But with a seed for each rank there is no longer *one* model. Four ranks hold four sets
# of norms, which differ from the first step on, and nothing makes them equal again. A checkpoint would save one of the
# four, and nobody could say what was trained.
#
# ### The other wrong way: one seed for everything
#
# If every rank draws from the same random numbers inside the regions, too, the first heads of all ranks get the same
# mask. To see that, we pretend that each region is rank 0's:

# %%
# %%ranks 4
region = TensorParallelRegion(group)
region.rank = 0
wrong, cache, _, _ = through(region, p, x, dy, dropout)
inside = cache.attention.core.mask.keep[0]

# %%
print(f"y is off from one process's by {off(ranks['wrong'][0], y):.0%} of its largest element")
draw_masks({"inside, from\nthe same\nnumbers": drawn()["inside:\neach its own"]})

# %% [markdown]
# Heads 0, 2, 4 and 6 have one mask, heads 1, 3, 5 and 7 another. That does not break a run: the ranks agree, and every
# mask by itself is fine. But masks that should be independent are the same four times, and with another $t$ it would be
# another run. (Megatron draws in sequence, and so keeps two states of its generator: one that is identical on all
# ranks, for outside, and one for each rank, for inside.)
#
# ## What to take away
#
# | where | what the ranks hold | masks |
# |---|---|---|
# | outside the regions: after attention, after the MLP | the same array | must be identical |
# | inside: attention's probabilities | each its own heads | must be independent |
#
# - Make a mask a function of an element's index in the whole array, and both follow automatically: for any $t$.
# - A seed for each rank raises no error, and the loss falls. It splits the model into $t$ models.
# - One seed for everything gives heads of different ranks the same mask. That trains, too, and is another model for
#   every $t$.
#
# ## Try it
#
# 1. Set both dropouts to 0.001 in the cell that makes `c`. What is left of the difference between `seed=1 + rank` and
#    `seed=1`? What else could make copies drift apart?
# 2. Give ranks 0 and 1 one seed, and ranks 2 and 3 another. How many models are there after 25 steps? Which ranks'
#    gains are equal?
# 3. Every rank could draw the whole mask of all heads, from one seed in sequence, and take its own heads. Is that
#    right? What does it cost, and for which arrays would you not want to pay it?
#
# <details><summary>Answer to 2</summary>
#
# Let `learn` return `gains`, too, and run it with another seed:
#
# ```python
# losses, apart, gains = learn(seed=1 + rank // 2)
# print(np.unique(gains, axis=0, return_inverse=True)[1])                  # [0 0 1 1]
# ```
#
# Two models: ranks 0 and 1 have one, ranks 2 and 3 the other. Ranks with one seed draw the same masks outside the
# regions, and g gives all ranks the same sums, so their copies get the same gradients, and stay equal to the last bit.
# There are as many models as seeds, and the loss falls all the same.
#
# </details>
#
# Next: [8. Sequence parallelism and recompute](08_sequence_parallelism.ipynb). A demo of masks in attention:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.attention`.
