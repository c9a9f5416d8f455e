# %% [markdown]
# # 5. A whole block on real ranks
#
# A transformer is a stack of equal *blocks*. A block is attention and an MLP, and a few small things around them: layer
# norms, dropout, sums. The first walkthroughs have sharded attention and the MLP over $t$ ranks. The small things are
# replicated, and that raises three questions. What does it cost that every rank does them? What happens to dropout,
# which draws random numbers, when four ranks draw? And can they be sharded after all?
#
# **You will** run a block on four ranks, forward and backward, and get the same numbers as in one process; count what
# the ranks send and compare it with the formula of the papers; make dropout's random numbers independent of the ranks,
# and see what happens otherwise; then shard what was replicated (sequence parallelism), and drop what can be computed
# again (recompute).
#
# **You need** walkthroughs 1 to 3: shards, an all-reduce, *f* and *g*, heads. About 25 minutes.

# %%
# %load_ext mpi_impl.notebook
import inspect

import numpy as np

from mpi_impl.notebook.pictures.blocks import draw_block
from mpi_impl.notebook.pictures.charts import draw_bars, draw_curves
from mpi_impl.notebook.pictures.masks import Drawn, draw_masks
from reference.config import ModelConfig, ParallelConfig

t, b, s = 4, 2, 16      # ranks; a microbatch of b texts, s positions (tokens) each
c = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=8, vocab_size=1, max_position_embeddings=s,
                init_method_std=0.2, hidden_dropout=0.2, attention_dropout=0.2)
h = c.hidden_size

# %% [markdown]
# ## What a block is
#
# $x$ has $h$ numbers for each of $s$ positions of each of $b$ texts: $[b, s, h]$. A block computes an array of the same
# shape, in two *branches*:
#
# $$x \leftarrow x + \mathrm{dropout}(\mathrm{attention}(\mathrm{norm}(x))), \qquad
#   x \leftarrow x + \mathrm{dropout}(\mathrm{MLP}(\mathrm{norm}(x))).$$
#
# - A *layer norm* makes the $h$ numbers of each position have mean 0 and variance 1, times a *gain* and plus a bias
#   that are learnt.
# - *Dropout* sets random numbers to 0, here one in five, in training only, so that nothing comes to rely on one number.
#   The others are scaled up, so that the mean stays the same.
# - The sum with $x$ is called *residual*: a branch only has to compute the change.
#
# In one process (`reference/layers/block.py`):

# %%
from reference.layers import block as textbook

print(inspect.getsource(textbook.block_forward))

# %% [markdown]
# Every `..._forward` returns its result and a *cache*: the arrays that the backward will need. They are the
# *activations* that fill a device's memory. We come back to them.
#
# On $t$ ranks, attention and the MLP are in regions between *f* and *g*: inside, each rank has its own heads, or its
# own columns. Outside, all ranks hold the same $x$, and do the same with it:

# %%
draw_block(t)

# %% [markdown]
# So the norms, dropout and the sums are done $t$ times over. That is intended ([Shoeybi et al.
# 2019](https://arxiv.org/abs/1909.08053), section 3): the alternative would be to do them once and send the result.
# They are cheap. For a block of GPT-3, the matrix products alone take this many operations for each number of $x$:

# %%
from reference.costs.flops import forward_flops

gpt3 = ModelConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=51200,
                   max_position_embeddings=2048)
products = forward_flops(gpt3, b=1, s=2048)
per_number = (products.linear + products.attention) // gpt3.num_layers // (2048 * gpt3.hidden_size)
print(f"{per_number:,} operations for each number of x; a norm, dropout or a sum takes ten or so")

# %% [markdown]
# Their weights are few, too. One place declares which tensors of a block are split, and along which axis, with the
# shape of the whole tensor. `split=None` means that every rank has all of it:

# %%
from reference.layers.block import block_tensors
from reference.params import initialize, leaves, split

tensors = block_tensors(c)
for name, tensor in leaves(tensors):
    how = "replicated" if tensor.split is None else f"sharded along axis {tensor.split}"
    print(f"{name:32} {str(tensor.shape):15} on each rank {str(tensor.local_shape(t)):15} {how}")

# %%
def on_each_rank(c, t, replicated):
    """Count the elements of a block on a rank: those of its replicated tensors, or of its sharded ones."""
    found = [tensor for _, tensor in leaves(block_tensors(c)) if (tensor.split is None) == replicated]
    return sum(np.prod(tensor.local_shape(t)) for tensor in found)

for n in (1, 8):
    print(f"GPT-3, t = {n}: of a block each rank has {on_each_rank(gpt3, n, replicated=False):>13,} sharded weights "
          f"and {on_each_rank(gpt3, n, replicated=True):,} replicated ones")

# %% [markdown]
# ## On four ranks
#
# First one process, to know the right result. The gradient that comes from above, `dy`, is random: a wrong backward can
# look right with ones, but not with random numbers. A `LayerContext` tells a layer what is dropped, and what is kept.

# %%
from reference.dropout import Dropout
from reference.layer_context import LayerContext

random = np.random.default_rng(5)
x, dy = random.normal(size=(2, b, s, h))
whole = initialize(tensors, seed=1, dtype=np.float64)
dropout = Dropout(c, seed=1, step=0, layer=0)

y, cache = textbook.block_forward(x, whole, c, LayerContext(dropout))
dx, grads = textbook.block_backward(dy, whole, cache, c)

# %% [markdown]
# Now the ranks. `ranks["x"] = x` gives every rank a variable. Each rank then draws its shard of the weights by itself,
# without the whole: an initial weight is a function of the tensor's name and of the element's index in it.

# %%
ranks["c"], ranks["x"], ranks["dy"] = c, x, dy

# %%
# %%ranks 4
from mpi_impl.comm.mappings import TensorParallelRegion
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.dropout import Dropout
from reference.layer_context import LayerContext
from reference.layers.block import block_tensors
from reference.params import initialize_shard, leaves, tree_map

tensors = block_tensors(c)
p = initialize_shard(tensors, seed=1, dtype=np.float64, t=size, rank=rank)
dropout = Dropout(c, seed=1, step=0, layer=0)

def through(region, x, dy, dropout):
    """Run forward and backward of this rank's shard of the block."""
    with region.group.ledger.phase("forward"):
        y, cache = block_forward(x, p, c, region, LayerContext(dropout))
    grads = tree_map(np.zeros_like, p)
    with region.group.ledger.phase("backward"):
        dx = block_backward(dy, p, cache, c, grads, ImmediateSink(), region)
    return y, cache, dx, grads

# %% [markdown]
# A *sink* receives the weight gradients of a backward; the immediate one adds them immediately (walkthrough 6 has
# another). The machine's `block_forward` is that of the textbook, except for `region`, which contains *f* and *g*. Here
# it runs, with dropout on:

# %%
# %%ranks 4
y, cache, dx, grads = through(TensorParallelRegion(group), x, dy, dropout)
print(f"heads {rank * 2} and {rank * 2 + 1}: Q, K and V {p.attention.w_qkv.shape}, MLP {p.mlp.w_in.shape}")

# %%
def off(found, expected):
    """Return the largest difference in any tensor, relative to the tensor's largest element."""
    return max(np.abs(a - b).max() / np.abs(b).max() for (_, a), (_, b) in zip(leaves(found), leaves(expected)))

for what, found, expected in [("y", ranks["y"], [y] * t), ("dx", ranks["dx"], [dx] * t),
                              ("all gradients", ranks["grads"], split(grads, tensors, t))]:
    print(f"{what}, on every rank: off by less than 1e-12?", all(off(*pair) < 1e-12 for pair in zip(found, expected)))

# %% [markdown]
# They are equal up to rounding: float64 has 16 digits, and the ranks add up in another order than one process.
#
# ## What it sends
#
# The ledger lists it (its last column assumes that every collective runs as a ring, as the papers do):

# %%
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.demos.printing import traffic_table

through(TensorParallelRegion(group), x, dy, dropout)
sent = sum(ring_bytes(entry, total) for entry, total in group.ledger.totals.items())
if rank == 0:
    print(traffic_table(group.ledger))

# %% [markdown]
# Two all-reduces forward: *g* after attention and *g* after the MLP. Two backward: *f* before each. Each sums an array
# as large as $x$, and in a ring that sends $2\frac{t-1}{t}$ times its size. The formula of the papers (Shoeybi et al.
# 2019, figure 4; [Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 3.2), for a block and a microbatch:
#
# $$4 \cdot 2\,\tfrac{t-1}{t}\, b s h$$

# %%
from reference.costs.volumes import tensor_parallel_traffic

float64 = 8     # bytes
print("as the formula says, on every rank:",
      [sent == float64 * tensor_parallel_traffic(b, s, h, t) for sent in ranks["sent"]])
megabytes = 2 * tensor_parallel_traffic(1, 2048, gpt3.hidden_size, 8) / 1e6     # 2 bytes a number, b = 1, s = 2048
print(f"GPT-3 on 8 ranks: each sends {megabytes:,.0f} MB for a block and a microbatch, and there are "
      f"{gpt3.num_layers} blocks")

# %% [markdown]
# That is why tensor parallelism stays inside one server, where the links are fast.
#
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
# Many programs begin with `seed + rank`, so that ranks draw different numbers. Inside that does no harm. Outside:

# %%
# %%ranks 4
wrong, cache, _, _ = through(TensorParallelRegion(group), x, dy, Dropout(c, seed=1 + rank, step=0, layer=0))
inside, outside = cache.attention.core.mask.keep[0], cache.attention_mask.keep[0, :, :16]
print("y begins", wrong[0, 0, :4].round(2))

# %%
print(f"rank 1's y is off from rank 0's by {off(ranks['wrong'][1], ranks['wrong'][0]):.0%} of its largest element")
draw_masks({"outside, with\na seed for\neach rank": drawn()["outside:\nall the same"]})

# %% [markdown]
# All ranks should hold the same $y$, and no two do. There is no error: shapes are right, and the next *g* adds up
# partial sums that belong to *different* inputs. What are the consequences? Let the block learn for 25 steps to produce
# some fixed target. Every rank has a copy of the norms' gains. Copies that start identical, and get identical
# gradients, stay identical:

# %%
# %%ranks 4
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

# %%
same, own = ranks["same"][0], ranks["own"][0]
same_loss, own_loss = ranks["same_loss"][0], ranks["own_loss"][0]
print(f"loss, one seed:             from {same_loss[0]:.2f} to {same_loss[-1]:.2f}")
print(f"loss, a seed for each rank: from {own_loss[0]:.2f} to {own_loss[-1]:.2f}")
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
wrong, cache, _, _ = through(region, x, dy, dropout)
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
# ## Sequence parallelism: shard the rest
#
# Doing the norms four times is cheap. *Keeping* their activations four times is not: each rank keeps all of $[b, s, h]$
# for the backward of both norms and both dropouts, and as the inputs of both regions, however large $t$ is.
#
# But norm, dropout and sum treat each position by itself. So outside the regions each rank can have $s/t$ of the
# positions. Inside, every head needs all positions. At the edges the ranks must exchange data: before a region an
# *all-gather* (every rank gets all pieces), and after it a *reduce-scatter* (add up, and each gets its piece of the
# sum):

# %%
draw_block(t, sequence_parallel=True)

# %% [markdown]
# ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 4.2.2.) The layers do not change at all. They
# get another *region*, in which these two replace *f* and *g*:

# %%
from mpi_impl.comm.mappings import SequenceParallelRegion

print(inspect.getsource(SequenceParallelRegion.enter))
print(inspect.getsource(SequenceParallelRegion.leave))

# %%
# %%ranks 4
from mpi_impl.comm.mappings import SequenceParallelRegion

n = x.shape[1] // size
mine = slice(rank * n, (rank + 1) * n)
y_own, cache_own, dx_own, grads_own = through(SequenceParallelRegion(group), x[:, mine], dy[:, mine], dropout)
print(f"positions {mine.start} to {mine.stop - 1}: y {y_own.shape}")
ledger = group.ledger

# %%
for what, found, expected in [("y", ranks["y_own"], y), ("dx", ranks["dx_own"], dx)]:
    joined = np.concatenate(found, axis=1)
    print(f"{what}, joined along the positions: off by less than 1e-12?", off(joined, expected) < 1e-12)

# %% [markdown]
# Dropout is right, too, without further changes: a mask is a function of the position, and each rank has asked for its
# own. But one thing is missing. Each rank has applied a norm's gain to its own positions only, so the gain's gradient
# is a partial sum. With *f* and *g* it was whole:

# %%
def gain(grads):
    return grads.input_layernorm.weight

print(f"the gain's gradient on rank 0 is off by {off(gain(ranks['grads_own'][0]), gain(grads)):.0%}")

# %%
# %%ranks 4
for (_, tensor), (_, grad) in zip(leaves(tensors), leaves(grads_own)):
    if tensor.split is None:
        group.all_reduce(grad, "weights outside")

# %%
print("all gradients off by less than 1e-12?",
      all(off(*pair) < 1e-12 for pair in zip(ranks["grads_own"], split(grads, tensors, t))))

# %% [markdown]
# What does it send? An all-reduce *is* a reduce-scatter and then an all-gather: each of the two costs half. So the
# total should be the same as before:

# %%
# %%ranks 4
if rank == 0:
    print(traffic_table(ledger))
halves = {entry: ring_bytes(entry, total) for entry, total in ledger.totals.items()}
again = sum(sent for entry, sent in halves.items() if entry.reason.endswith("again"))
as_before = sum(halves.values()) - again

# %%
print("without the lines that say `again`, the same as with f and g:", ranks["as_before"] == ranks["sent"])
print(f"those lines come on top: {ranks['again'][0] / ranks['sent'][0]:.0%}")

# %% [markdown]
# `again` is a choice. The inputs of both regions were gathered in the forward. If they were kept, each rank would hold
# all of $[b, s, h]$, and sequence parallelism would save less. So a rank keeps its own positions, and gathers the
# others a second time. (With `keep_gathered_inputs=True` it does not.)
#
# ## What is kept, and recompute
#
# Every array in a cache can be counted. There are three parts: arrays outside the regions; attention's core, all arrays
# of $[s, s]$ for each head; and the other arrays inside.
#
# The core is special. It grows with $s^2$, and takes little to compute from Q, K and V. *Selective recompute* drops it
# in the forward and computes it again in the backward. *Full recompute* keeps nothing of a block except its input.

# %%
# %%ranks 4
from reference.config import Recompute
from reference.costs.array_bytes import array_bytes

def kept(cache):
    """Return the bytes in a block's cache."""
    outside = array_bytes(cache.input_layernorm, cache.attention.x, cache.attention_mask,
                          cache.post_attention_layernorm, cache.mlp[0], cache.mlp_mask)
    core = array_bytes(getattr(cache.attention.core, "probs", None), getattr(cache.attention.core, "mask", None))
    return {"outside": outside, "inside": array_bytes(cache) - outside - core, "core": core}

_, cache, _, _ = through(TensorParallelRegion(group), x, dy, dropout)
selective = LayerContext(dropout, Recompute("selective"))
y_lean, cache_lean = block_forward(x[:, mine], p, c, SequenceParallelRegion(group), selective)
found = {"tensor parallel": kept(cache), "+ sequence parallel": kept(cache_own),
         "+ selective recompute": kept(cache_lean), "full recompute instead": {"outside": x[:, mine].nbytes}}

# %%
from dataclasses import replace

from reference.config import Recompute
from reference.costs.activation_inventory import ActivationInventory, total
from reference.precision import Precision

sequence = ParallelConfig(t, sequence_parallel=True)
ways = [ParallelConfig(t), sequence, replace(sequence, recompute=Recompute("selective")),
        replace(sequence, recompute=Recompute("full"))]
for (name, parts), way in zip(ranks["found"][0].items(), ways):
    expected = total(ActivationInventory(c, b, s, Precision("float64"), way).layer())
    print(f"{name:24} {sum(parts.values()):>9,} bytes measured on rank 0; predicted, item by item: {expected:>9,}")
draw_bars({name: {part: n / 1000 for part, n in parts.items()} for name, parts in ranks["found"][0].items()},
          "kB that rank 0 keeps of one block for the backward", unit=" kB")

# %% [markdown]
# Our texts are short, so the core is small. The same for a block of GPT-3, by the formulas of Korthikanti et al.
# (equations 1 to 4; the last bar has sequence parallelism, too). The core is $5as/h$ times $sbh$ bytes on one rank,
# more than all the rest, and $1/t$ of that on $t$ ranks:

# %%
from reference.costs.memory import layer_activations

variants = {"one rank": (1, False, "none"), "8 ranks, tensor parallel": (8, False, "none"),
            "+ sequence parallel": (8, True, "none"), "+ selective recompute": (8, True, "selective"),
            "full recompute instead": (8, True, "full")}
sizes = {name: layer_activations(gpt3, 1, 2048, *way) for name, way in variants.items()}
draw_bars({name: {"outside": one.replicated / 1e6, "inside": one.split / 1e6, "core": one.core / 1e6}
           for name, one in sizes.items()}, "MB of activations of one block of GPT-3 on each rank", unit=" MB")

# %% [markdown]
# The second computation must give the same as the first, including dropout's masks. With a generator that draws in
# sequence we would have to save its state before the block and restore it. With a function there is nothing to do:

# %%
# %%ranks 4
region = SequenceParallelRegion(group)
grads_lean = tree_map(np.zeros_like, p)
dx_lean = block_backward(dy[:, mine], p, cache_lean, c, grads_lean, ImmediateSink(), region)

_, second = block_forward(x[:, mine], p, c, region, LayerContext(dropout))      # full recompute, from the input alone
first = cache_own
print("the same masks the second time, inside and outside:",
      np.array_equal(second.attention.core.mask.keep, first.attention.core.mask.keep),
      np.array_equal(second.mlp_mask.keep, first.mlp_mask.keep))

# %%
from reference.costs.flops import iteration_flops

print("selective recompute, dx off by less than 1e-12?", off(np.concatenate(ranks["dx_lean"], 1), dx) < 1e-12)
plain = iteration_flops(gpt3, 1, 2048)
for how in ("selective", "full"):
    print(f"{how} recompute of GPT-3 computes {iteration_flops(gpt3, 1, 2048, how) / plain - 1:.1%} more")

# %% [markdown]
# (Equation 8 of Korthikanti et al. counts three times as much for the core, which makes their overhead 2.7 %.) Full
# recompute also repeats the messages of the forward, since the whole block runs again. So use selective recompute
# first, and full recompute only if memory is still too small.
#
# ## What to take away
#
# | part of a block | tensor parallel | with sequence parallelism |
# |---|---|---|
# | attention, MLP | $1/t$ of the heads, of the columns | the same |
# | norms, dropout, sums | all of it, on every rank | $1/t$ of the positions |
# | sent, forward and backward | 4 all-reduces of $bsh$ | 4 all-gathers, 4 reduce-scatters; 2 to gather again |
# | kept | $10\,sbh$ bytes outside, on every rank | $10\,sbh/t$ |
# | gradients of norms and of biases after *g* | whole on every rank | partial: all-reduces of $h$ numbers |
#
# - Outside the regions all ranks must draw the same masks, inside each its own. Make a mask a function of an element's
#   index in the whole array, and both follow automatically: for any $t$, for sharded positions, and a second time for
#   recompute.
# - A seed for each rank raises no error, and the loss falls. It splits the model into $t$ models.
# - Selective recompute drops what is largest and cheapest.
#
# ## Try it
#
# 1. Set both dropouts to 0.001 in the cell that makes `c`. What is left of the difference between `seed=1 + rank` and
#    `seed=1`? What else could make copies drift apart?
# 2. Make `s` four times as large. Which of the three colours in the measured bars grows most, and by how much?
# 3. Pass `keep_gathered_inputs=True` to the `SequenceParallelRegion`. What happens to the lines that say `again`, and
#    to the blue part of the bar? (The prediction must know it, too:
#    `ParallelConfig(t, sequence_parallel=True, keep_gathered_inputs=True)`.)
#
# Next: [6. Pipelines](06_pipelines.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m mpi_impl.demos.sequence_parallel`.
