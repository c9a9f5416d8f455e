# %% [markdown]
# # 6. A whole block on real ranks
#
# A transformer is a stack of equal *blocks*. A block is attention and an MLP, and a few small things around them: layer
# norms, dropout, sums. The first walkthroughs have sharded attention and the MLP over $t$ ranks. The small things are
# replicated. What does it cost that every rank does them? And what does a whole block send?
#
# **You will** see which tensors of a block are sharded, and which are not; run a block on four ranks, forward and
# backward, and get the same numbers as in one process; count what the ranks send, and compare it with the formula of
# the papers; and see what becomes of a block without norm and residual.
#
# **You need** walkthroughs *Splitting matrices* to *Attention heads*: shards, an all-reduce, *f* and *g*, heads. About
# 30 minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from shardlab.demos.one_block import B, CONFIG, S, T, in_one_process, inputs, off, shard, through
from shardlab.notebook.pictures.blocks import draw_block
from shardlab.notebook.predictions import reveal
from reference.config import ModelConfig

t, b, s, c = T, B, S, CONFIG
h = c.hidden_size
print(f"{t} ranks; {b} texts of {s} tokens; h = {h}, {c.num_attention_heads} heads; dropout {c.hidden_dropout}")

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
#
# **Predict.** A norm, dropout or a sum takes ten operations or so for each number of $x$. How many do the matrix
# products of a block of GPT-3 take, with $h = 12288$? (There are $12 h^2$ weights, and each is multiplied and added
# once for every position.)

# %%
guess = ...                # operations for each number of x: write yours in place of the dots

# %% tags=["hide-output"]
from reference.costs.flops import forward_flops

gpt3 = ModelConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=51200,
                   max_position_embeddings=2048)
products = forward_flops(gpt3, b=1, s=2048)
per_number = (products.linear + products.attention) // gpt3.num_layers // (2048 * gpt3.hidden_size)
reveal(guess, per_number, "operations for each number of x")

# %% [markdown]
# ($24 h$ for the weights, and a little for attention's scores.) The small things are cheap, even $t$ times. Their
# weights are few, too. One place declares which tensors of a block are split, and along which axis, with the
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
print(inspect.getsource(in_one_process))

x, dy = inputs()
y, dx, grads = in_one_process(x, dy)

# %% [markdown]
# Now the ranks. `ranks["x"] = x` gives every rank a variable. Each rank then draws its shard of the weights by itself,
# without the whole: an initial weight is a function of the tensor's name and of the element's index in it.

# %%
ranks["x"], ranks["dy"] = x, dy
print(inspect.getsource(shard), inspect.getsource(through), sep="\n")

# %% [markdown]
# A *sink* receives $x$ and $dy$, whose product is a weight's gradient. The immediate one adds it at once; that of a
# pipeline may keep both, and multiply them when its rank would wait (*W*, in walkthrough *Pipelines*). The machine's
# `block_forward` is that of the textbook, except for `region`, which contains *f* and *g*. Here it runs, with dropout
# on:

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.one_block import shard, through

p = shard(group)
y, cache, dx, grads = through(TensorParallelRegion(group), p, x, dy)
print(f"heads {rank * 2} and {rank * 2 + 1}: Q, K and V {p.attention.w_qkv.shape}, MLP {p.mlp.w_in.shape}")

# %%
for what, found, expected in [("y", ranks["y"], [y] * t), ("dx", ranks["dx"], [dx] * t),
                              ("all gradients", ranks["grads"], split(grads, tensors, t))]:
    print(f"{what}, on every rank: off by less than 1e-12?", all(off(*pair) < 1e-12 for pair in zip(found, expected)))

# %% [markdown]
# They are equal up to rounding: float64 has 16 digits, and the ranks add up in another order than one process.
#
# ## What it sends
#
# The ledger lists it (its last column assumes that every collective runs as a ring, as the papers do).
#
# **Predict.** $x$ has $2 \cdot 16 \cdot 64$ numbers of 8 bytes. A ring sends $2\frac{t-1}{t}$ of an array for an
# all-reduce. How many bytes does each of the four ranks send for the block, forward and backward together?

# %%
guess = ...                # bytes that a rank sends

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes
from shardlab.demos.printing import traffic_table

through(TensorParallelRegion(group), p, x, dy)
sent = sum(ring_bytes(entry, total) for entry, total in group.ledger.totals.items())
if rank == 0:
    print(traffic_table(group.ledger))

# %% tags=["hide-output"]
reveal(guess, ranks["sent"][0], "bytes that a rank sends")

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
# ## The block on a course's slides
#
# Some slides show a simpler block: no norm, no residual, no bias, ReLU, and scores divided by $\sqrt{D}$, with $D$ the
# width of the whole $x$. (Their $B$, $L$, $D$, $n_h$, $H$ and $d_{tp}$ are our $b$, $s$, $h$, $a$, $h/a$ and $t$.) Here
# it is, with all ranks in a list. *f* and *g* are where ours are: $Q$, $K$, $V$ and $W^1$ are split by columns, $W^O$
# and $W^2$ by rows, and an all-reduce follows each of these two.

# %%
from reference.comm.collectives import all_reduce
from reference.ops import softmax

D, H = h, h // c.num_attention_heads

def slides_block(x, shards):
    """x [B, L, D] -> x' [B, L, D]. A rank has n_h/d_tp heads, and 4 D/d_tp columns of the MLP."""
    partial = []
    for w_q, w_k, w_v, w_o, _, _ in shards:                                     # f: backward, an all-reduce of dx
        q, k, v = ((x @ w).reshape(b, s, -1, H).swapaxes(1, 2) for w in (w_q, w_k, w_v))     # [B, n_h/d_tp, L, H]
        z = softmax(q @ k.swapaxes(2, 3) / D**0.5) @ v
        partial.append(z.swapaxes(1, 2).reshape(b, s, -1) @ w_o)                # [B, L, D/d_tp] @ [D/d_tp, D]
    out = all_reduce(partial)[0]                                                # g: forward, an all-reduce
    return all_reduce([np.maximum(out @ w_1, 0) @ w_2 for *_, w_1, w_2 in shards])[0]       # f and g again

random = np.random.default_rng(5)

def draw_weights():
    return [random.normal(size=(n, m)) / n**0.5 for n, m in [(D, D)] * 4 + [(D, 4 * D), (4 * D, D)]]

weights = draw_weights()
shards = list(zip(*(np.split(w, t, axis) for w, axis in zip(weights, (1, 1, 1, 0, 1, 0)))))
print(f"{t} ranks compute what one does:", np.allclose(slides_block(x, [weights]), slides_block(x, shards)))

# %% [markdown]
# The root first. A score adds up $H$ products, so it varies by $\sqrt{H}$, and $\sqrt{D}$ divides by too much:
# attention becomes flatter ([walkthrough *Attention heads*](04_attention_heads.ipynb) has the picture). Then the depth.
# Without a residual, all that a block passes on is a mixture of positions. We stack blocks as on the slides, with
# random weights:

# %%
y, differ = x, []
for _ in range(24):
    y = slides_block(y, [draw_weights()])
    differ.append(y.std(1).mean() / y.std())
print(f"positions differ by {differ[0]:.2f} of their size after one block, and by {differ[1]:.5f} after two")

# %% [markdown]
# **Predict.** After how many blocks do they differ by less than a millionth of their size?

# %%
guess = ...                # blocks

# %% tags=["hide-output"]
q, k = (x @ w[:, :H] for w in weights[:2])                                      # of the first head
flat, usual = (softmax(q @ k.swapaxes(1, 2) / root).max(-1).mean() for root in (D**0.5, H**0.5))
print(f"the largest of {s} shares: {flat:.2f} with the root of D, {usual:.2f} with the root of H")

z = x               # through the project's block, with weights of a similar size
for layer in range(24):
    z = textbook.block_forward(z, initialize(tensors, layer, "float64"), c)[0]
print(f"after 24 blocks: size {y.std():.0e}, and {z.std():.1f} of the project's;",
      f"positions differ by {differ[-1]:.0e} of it, and by {z.std(1).mean() / z.std():.1f}")
reveal(guess, 1 + sum(share > 1e-6 for share in differ), "blocks")

# %% [markdown]
# After a few blocks all positions say the same, and no later one can tell them apart
# ([Dong et al. 2021](https://arxiv.org/abs/2103.03404) prove how fast). The residual keeps what each position was, and
# the norm keeps a branch's input from growing with depth. So the project's block has both, and the head's root.
#
# ## What to take away
#
# | part of a block | on each rank | sent |
# |---|---|---|
# | attention | $1/t$ of the heads | *f* backward, *g* forward: an all-reduce of $bsh$ each |
# | MLP | $1/t$ of the columns | *f* backward, *g* forward: an all-reduce of $bsh$ each |
# | norms, dropout, sums | all of it | nothing |
#
# - What is replicated is cheap to compute: a few operations for each number of $x$, against $24 h$.
# - A rank draws its shard of the weights by itself: an initial weight is a function of its name and its index.
# - Four all-reduces for each block and microbatch, whatever $t$ is: it is the volume of tensor parallelism.
#
# ## Try it
#
# 1. On eight ranks (`t = 8`, and 8 in the `%%ranks` cells) each rank has one head. By how much does what a rank sends
#    grow? Towards what does it tend for many ranks?
#
# <details><summary>Answer</summary>
#
# A ring's all-reduce of $N$ numbers costs a rank $2N(t-1)/t$. On four ranks that is $1.5N$, on eight $1.75N$: a sixth
# more. For many ranks it tends to $2N$, a third more than on four. So the number of ranks hardly changes what each of
# them *sends*. But each *computes* half as much on twice as many ranks, and waits for twice as many rounds: the share
# of a step that messages take grows.
#
# </details>
#
# 2. On the ranks, make a subclass of `TensorParallelRegion` whose `enter_backward` returns what it gets, and use it in
#    place of the region. Which of the three lines says False now, and which gradients are still right?
# 3. Which tensors of a block does GPT-3 replicate, and how many bytes in 16 bits is that on each rank, for all of its
#    blocks?
#
# Next: [7. Dropout on many ranks](07_dropout_on_many_ranks.ipynb). The demos for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.attention` and `... -m shardlab.demos.mlp`.
