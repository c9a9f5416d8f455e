# %% [markdown]
# # 8. Sequence parallelism and recompute
#
# In a block on $t$ ranks everything outside of attention and the MLP is replicated: layer norms, dropout, sums. To
# compute that $t$ times over is cheap. To *keep* it for the backward is not, and it fills the memory of large models.
# Can it be sharded after all? And what need not be kept at all, since it can be computed again?
#
# **You will** shard the positions of a text outside the regions, with another region and without a change to any layer;
# see which gradients are partial sums then, and what is sent; count what a rank keeps, byte by byte; and drop what can
# be computed again (recompute), dropout included.
#
# **You need** walkthroughs [*A block on real ranks*](06_a_block_on_real_ranks.ipynb) and
# [*Dropout on many ranks*](07_dropout_on_many_ranks.ipynb) (masks as functions). About 30 minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from shardlab.notebook.pictures.blocks import draw_block
from shardlab.notebook.pictures.charts import draw_bars
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig, ParallelConfig

# %% [markdown]
# ## The block of walkthrough *A block on real ranks*
#
# The same sizes, the same weights, one process that says what is right, and four ranks, each with its shard. `through`
# runs it forward and backward:

# %%
from shardlab.demos.one_block import B, CONFIG, S, T, TENSORS, in_one_process, inputs, off
from reference.params import leaves, split

t, b, s, c, tensors = T, B, S, CONFIG, TENSORS
x, dy = inputs()
y, dx, grads = in_one_process(x, dy)
ranks["c"], ranks["x"], ranks["dy"] = c, x, dy

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.one_block import DROPOUT as dropout, TENSORS as tensors, shard, through
from reference.params import leaves

p = shard(group)

# %% [markdown]
# What it sends with *f* and *g*, to compare with later:

# %%
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes
from shardlab.demos.printing import traffic_table

through(TensorParallelRegion(group), p, x, dy)
sent = sum(ring_bytes(entry, total) for entry, total in group.ledger.totals.items())
if rank == 0:
    print(traffic_table(group.ledger))

# %% [markdown]
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
from mpi_impl.comm.regions import SequenceParallelRegion

print(inspect.getsource(SequenceParallelRegion.enter))
print(inspect.getsource(SequenceParallelRegion.leave))

# %%
# %%ranks 4
from mpi_impl.comm.regions import SequenceParallelRegion

n = x.shape[1] // size
mine = slice(rank * n, (rank + 1) * n)
y_own, cache_own, dx_own, grads_own = through(SequenceParallelRegion(group), p, x[:, mine], dy[:, mine])
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
# total should be the same as before. But the ledger has lines that say `again`: the inputs of both regions are gathered
# a second time, for the backward.
#
# **Predict.** How much do these two all-gathers add to what four all-reduces send?

# %%
guess = ...                # as a share: 1 would be as much again

# %% tags=["hide-output"]
# %%ranks 4
if rank == 0:
    print(traffic_table(ledger))
halves = {entry: ring_bytes(entry, total) for entry, total in ledger.totals.items()}
again = sum(sent for entry, sent in halves.items() if entry.reason.endswith("again"))
as_before = sum(halves.values()) - again

# %% tags=["hide-output"]
print("without the lines that say `again`, the same as with f and g:", ranks["as_before"] == ranks["sent"])
reveal(guess, ranks["again"][0] / ranks["sent"][0], "of what f and g send, on top")

# %% [markdown]
# `again` is a choice. If the inputs that were gathered in the forward were kept, each rank would hold
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

#
# **Predict.** Outside the regions the caches of one of the four ranks have this many bytes. By how much does sequence
# parallelism divide them?

# %%
guess = ...                # 2 would be half of the bytes

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.layers.block import block_backward, block_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import Recompute
from reference.array_bytes import array_bytes
from reference.layer_context import LayerContext
from reference.params import tree_map

def kept(cache):
    """Return the bytes in a block's cache."""
    outside = array_bytes(cache.input_layernorm, cache.attention.x, cache.attention_mask,
                          cache.post_attention_layernorm, cache.mlp[0], cache.mlp_mask)
    core = array_bytes(getattr(cache.attention.core, "probs", None), getattr(cache.attention.core, "mask", None))
    return {"outside": outside, "inside": array_bytes(cache) - outside - core, "core": core}

_, cache, _, _ = through(TensorParallelRegion(group), p, x, dy)
selective = LayerContext(dropout, Recompute("selective"))
y_lean, cache_lean = block_forward(x[:, mine], p, c, SequenceParallelRegion(group), selective)
found = {"tensor parallel": kept(cache), "+ sequence parallel": kept(cache_own),
         "+ selective recompute": kept(cache_lean), "full recompute instead": {"outside": x[:, mine].nbytes}}

# %% tags=["hide-output"]
from dataclasses import replace

from shardlab.predict.predict import layer_bytes
from shardlab.predict.rank import ImaginedWorld
from reference.config import Recompute
from reference.precision import Precision

sequence = ParallelConfig(t, sequence_parallel=True)
ways = [ParallelConfig(t), sequence, replace(sequence, recompute=Recompute("selective")),
        replace(sequence, recompute=Recompute("full"))]
for (name, parts), way in zip(ranks["found"][0].items(), ways):
    expected = layer_bytes(ImaginedWorld(c, way, Precision("float64"), b, s, 1))
    print(f"{name:24} {sum(parts.values()):>9,} bytes measured on rank 0; predicted, without data: {expected:>9,}")
    assert sum(parts.values()) == expected
outside = [parts["outside"] for parts in ranks["found"][0].values()]
reveal(guess, outside[0] / outside[1], "times less outside the regions")
draw_bars({name: {part: n / 1000 for part, n in parts.items()} for name, parts in ranks["found"][0].items()},
          "kB that rank 0 keeps of one block for the backward", unit=" kB")

# %% [markdown]
# Our texts are short, so the core is small. The same for a block of GPT-3, by the formulas of Korthikanti et al.
# (equations 1 to 4; the last bar has sequence parallelism, too). The core is $5as/h$ times $sbh$ bytes on one rank,
# more than all the rest, and $1/t$ of that on $t$ ranks:

# %%
from reference.costs.memory import layer_activations

gpt3 = ModelConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=51200,
                   max_position_embeddings=2048)
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
# Over a step these bytes come and go. Each layer's forward adds its own, and its backward frees them again; a layer
# that is recomputed has its whole cache only while its backward runs. Here is one microbatch through 12 of GPT-3's
# layers on one of 8 ranks, where a forward takes one unit of time, a backward two, and a second forward one more:

# %%
from shardlab.notebook.pictures.charts import draw_curves

def held(kept, again=0, layers=12):
    """Return the GB after each unit of time, if a layer keeps so many, and recomputes others before its backward."""
    steps = [kept * n + again * (unit > 0) for n in range(layers, 0, -1) for unit in range(3 if again else 2)]
    return [*(kept * n for n in range(layers)), *steps, 0]

nothing, lean, full = (sum(layer_activations(gpt3, 1, 2048, 8, True, how)) / 1e9
                       for how in ("none", "selective", "full"))
draw_curves({"nothing recomputed": held(nothing), "selective": held(lean), "full": held(full, nothing)},
            "units of time", "GB", "activations of one microbatch on a rank")

# %% [markdown]
# (The core's own second forward is too short to be seen. Equation 8 of Korthikanti et al. counts three times as much
# for the core, which makes their overhead 2.7 %.) Full recompute also repeats the messages of the forward, since the
# whole block runs again. So use selective recompute first, and full recompute only if memory is still too small.
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
# - Sequence parallelism is another region: the layers do not change, and the same is sent, but for what is gathered
#   again.
# - A tensor that a rank applies to its own positions only has a partial gradient.
# - A mask that is a function of an element's index in the whole array is right for sharded positions, and a second time
#   for recompute.
# - Selective recompute drops what is largest and cheapest.
#
# ## Try it
#
# 1. Make `s` four times as large. Which of the three colours in the measured bars grows most, and by how much?
# 2. Pass `keep_gathered_inputs=True` to the `SequenceParallelRegion`. What happens to the lines that say `again`, and
#    to the blue part of the bar? (The prediction must know it, too:
#    `ParallelConfig(t, sequence_parallel=True, keep_gathered_inputs=True)`.)
# 3. Leave out the cell that sums the gradients of the "weights outside", and train. Which tensors of the ranks drift
#    apart, and which do not?
#
# <details><summary>Answer to 2</summary>
#
# ```python
# keeping = SequenceParallelRegion(group, keep_gathered_inputs=True)       # in a cell on ranks
# _, cache_kept, _, _ = through(keeping, p, x[:, mine], dy[:, mine])
# print(kept(cache_own)["outside"], kept(cache_kept)["outside"])           # 17536 42112
# ```
#
# The lines that say `again` are gone, and a rank sends 98,304 bytes, as with f and g. In return the blue part grows
# from 17,536 to 42,112 bytes: the inputs of both regions are now kept whole, $2 \cdot 16 \cdot 64$ numbers of 8 bytes
# each, in place of a quarter. That is $2 \cdot \frac{3}{4} \cdot 16{,}384 = 24{,}576$ bytes more. `layer_bytes`
# predicts it.
#
# </details>
#
# Next: [9. Pipelines](09_pipelines.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.sequence_parallel`.
