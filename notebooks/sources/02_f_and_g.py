# %% [markdown]
# # 2. f and g, and why they are adjoint
#
# In [walkthrough *Splitting matrices*](01_splitting_matrices.ipynb) an MLP was split over $t$ ranks, and there was one
# sum over the ranks, at its end. That was the forward pass. Training also has a backward pass, which computes how each
# number should have been different. It also needs a sum, at the *other* end, and if you forget it, you get no error,
# only wrong gradients.
#
# **You will** write the two operators of Megatron-LM, *f* and *g*, as matrices and see that each is the other's
# transpose; check a sharded MLP against numerical gradients; leave a sum out, or do it twice, and see what happens;
# take an all-reduce apart into the steps of a ring; and find the same two matrices again in sequence parallelism.
#
# **You need** walkthrough *Splitting matrices* (rank, shard, partial sum, all-reduce) and the chain rule. About 50
# minutes.

# %%
# %load_ext shardlab.notebook
import inspect

import numpy as np

from shardlab.notebook.pictures.charts import draw_curves
from shardlab.notebook.pictures.maps import Map, draw_maps, replicated
from shardlab.notebook.pictures.ring import draw_ring, ring_all_reduce
from shardlab.notebook.pictures.shards import OWNERS, owners_of
from shardlab.notebook.predictions import reveal
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture
from reference.comm.collectives import all_reduce
from reference.comm.regions import SequenceParallelRegion, TensorParallelRegion

random = np.random.default_rng(2)

# %% [markdown]
# ## The two edges of a region
#
# Between $X$ and the partial sums of $Y$ every rank works alone, on its own columns. Call that the *region*. Outside of
# it all ranks hold the same arrays. So there are two edges, and something happens at each of them, forward and
# backward. [Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053) (section 3, figure 3) call the edge where $X$ goes
# in **f**, and that where $Y$ comes out **g**. In the textbook, where a list has one array for each rank:

# %%
for name in ("enter", "enter_backward", "leave", "leave_backward"):
    print(inspect.getsource(getattr(TensorParallelRegion, name)))

# %% [markdown]
# Forward, f does nothing at all. It has a name because of its backward. The reasons in the docstrings are good ones.
# But there is a better way to find out what a backward has to be, with nothing to remember.
#
# ## f and g as matrices
#
# Take three ranks, and an $x$ of three numbers. f takes $x$ (which all ranks hold) to what the ranks have *inside* the
# region: nine numbers, three on each. g takes nine numbers, three on each rank, to three. Both are *linear*: no
# products of inputs, no nonlinear function. And every linear map is a matrix. Column $j$ is the output when the $j$-th
# input is 1 and all others are 0, so we can read the matrices off the textbook's own functions:

# %%
t, n = 3, 3
region = TensorParallelRegion()

f = np.column_stack([np.concatenate(region.enter([e] * t)) for e in np.eye(n)])
g = np.column_stack([region.leave(np.split(e, t))[0] for e in np.eye(n * t)])

draw_maps([Map("f", f, out=owners_of(n * t, t), into=replicated(n)),
           Map("g", g, out=replicated(n), into=owners_of(n * t, t))], "f copies, g adds up")

# %% [markdown]
# The strips show which rank has a number: outputs to the left of the matrix, inputs above it. f says "every rank gets
# $x$", g says "add up what the ranks have". And each is the other's transpose:

# %%
print("g is f transposed:", np.array_equal(g, f.T))

# %% [markdown]
# ## A backward is a transpose
#
# Why does that matter? Let $y = M x$, and let the loss $\ell$ depend on $y$. Write $dy$ for the gradient of $\ell$ with
# respect to $y$, and $\langle u, v \rangle$ for the sum of $u_i v_i$. If $x$ moves by a little $\delta$, $y$ moves by
# $M \delta$, so $\ell$ moves by
#
# $$\langle dy, M \delta \rangle = \langle M^T dy, \delta \rangle, \qquad\text{hence}\qquad dx = M^T dy.$$
#
# The backward of *any* linear map is its transpose. For maps that are not written down as matrices one says *adjoint*
# for the same thing: $f^*$ is the adjoint of $f$ if $\langle f x, y \rangle = \langle x, f^* y \rangle$ for all $x$ and
# $y$. So, without thinking about which rank used what:
#
# - the backward of f, which copies, is its transpose, which adds up: **g**;
# - the backward of g, which adds up, is its transpose, which copies: **f**.
#
# Now with functions instead of matrices, and random arrays $[b, s, h]$ (texts, tokens, numbers for each token). Inside,
# the ranks hold different arrays, so the inner product is the sum over all of them. Outside, they hold the same one, so
# it counts once:

# %%
t, shape = 4, (2, 4, 8)
x, dy = random.normal(size=(2, *shape))                   # outside: one array, which all ranks hold
us, dus = random.normal(size=(2, t, *shape))              # inside: an array on each rank

inside = sum((u * du).sum() for u, du in zip(region.enter([x] * t), dus))
outside = (x * region.enter_backward(list(dus))[0]).sum()
print("<f x, u> = <x, f* u>:", abs(inside - outside) < 1e-12)

outside = (region.leave(list(us))[0] * dy).sum()
inside = sum((u * du).sum() for u, du in zip(us, region.leave_backward([dy] * t)))
print("<g u, y> = <u, g* y>:", abs(inside - outside) < 1e-12)

# %% [markdown]
# This test knows nothing about MLPs, and it decides whether a forward and a backward fit together. The project has it
# as a theorem about random shapes, in `tests/reference/test_mappings.py`.
#
# "Counts once" is not a detail. What if we treated each rank's copy of $Y$ as a separate array? Then g is a map from
# $t$ arrays to $t$ arrays, f after g:
#
# **Predict.** Is its backward a copy, as g's is? By how much is the gradient that each of three ranks gets then
# larger than $dy$?

# %%
guess = ...                # times

# %% tags=["hide-output"]
both = f @ g
print("its own transpose:", np.array_equal(both, both.T))

backward = np.split(both.T @ np.tile([1.0, 2.0, 3.0], 3), 3)      # on three ranks, from dy = 1, 2, 3 on each
print("what each rank gets:", *backward)
assert np.array_equal(backward[0], 3 * np.array([1.0, 2.0, 3.0]))
reveal(guess, backward[0][0] / 1.0, "times dy, on each rank")

# %% [markdown]
# This map is its own transpose, so its backward is an all-reduce, and $dy$ comes out three times as large. That is not
# a mistake of calculus: it is the gradient of the sum of *three* losses, one for each copy. A framework that
# differentiates an all-reduce in this way, in a program in which every rank computes the same loss, has the gradients
# of $t$ losses. Megatron counts the loss once, and so g's backward copies.
#
# ## Compared with numerical gradients
#
# A *numerical* gradient needs no backward at all: move one number up a little and down a little, and see by how much
# the loss changes. It is slow, but it decides who is right. Here is the MLP of walkthrough *Splitting matrices* with
# the biases, from `reference/layers/mlp.py`, on four ranks. The loss is $\langle dY, Y \rangle$ with a random $dY$, so
# $dY$ *is* its gradient with respect to $Y$. (Random, because with ones many a wrong backward looks right.)

# %%
from reference.config import ModelConfig
from reference.layers.mlp import mlp_tensors, sharded_mlp_backward, sharded_mlp_forward
from reference.params import initialize, split

c = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=1, max_position_embeddings=4,
                init_method_std=0.5)
shards = split(initialize(mlp_tensors(c), seed=2, dtype=np.float64), mlp_tensors(c), t)   # of each rank, in a list

def loss(x):
    ys, _ = sharded_mlp_forward([x] * t, shards, c, region)
    return (dy * ys[0]).sum()

# %%
def numerical(function, x, step=1e-5):
    """Return the gradient of function(x) with respect to the array x, which is moved in place."""
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape):
        before = x[i]
        x[i] = before + step
        up = function(x)
        x[i] = before - step
        gradient[i], x[i] = (up - function(x)) / (2 * step), before
    return gradient

measured = numerical(loss, x)

# %% [markdown]
# Now the backward, as it is, and with two mistakes that are easily made. `Dropped` assumes that f does nothing in the
# backward either. `Twice` is a program in which two people have each added the sum.

# %%
class Dropped(TensorParallelRegion):
    def enter_backward(self, dxs):
        return dxs

class Twice(TensorParallelRegion):
    def enter_backward(self, dxs):
        return all_reduce(all_reduce(dxs))

found, weights = {}, {}
_, cache = sharded_mlp_forward([x] * t, shards, c, region)
for name, backward in {"f as it is": region, "dropped": Dropped(), "twice": Twice()}.items():
    found[name], weights[name] = sharded_mlp_backward([dy] * t, shards, cache, c, backward)

for name, dxs in found.items():
    off = np.abs(np.array(dxs) - measured).max() / np.abs(measured).max()
    print(f"{name:10}  right: {off < 1e-6!s:5}  off by {off:4.0%} of the largest element;"
          f"  identical on all ranks: {all(np.array_equal(dx, dxs[0]) for dx in dxs)}")

# %% [markdown]
# In the picture each point is one element of $dX$ on one rank: the measured value to the right, the computed one
# upwards. Correct points lie on the line.

# %%
figure = Picture((9, 3.4), layout="constrained")
for axes, (name, dxs) in zip(figure.subplots(1, 3), found.items()):
    axes.axline((0, 0), slope=1, color="#B0B0B0", linewidth=1)
    for rank, dx in enumerate(dxs):
        axes.scatter(measured, dx, s=34 - 8 * rank, color=OWNERS[rank], label=f"rank {rank}", marker="os^D"[rank])
    finish(axes, "measured", name, "both")
figure.axes[0].set_ylabel("backward", fontsize=9)
figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=t, frameon=False, fontsize=9)
figure.set_label("Elements of dX, computed against measured. " + "; ".join(
    f"{name}: {'on' if np.allclose(dxs, measured, atol=1e-4) else 'off'} the line" for name, dxs in found.items()))
figure

# %% [markdown]
# With `Dropped`, each rank has a cloud of its own: its partial sum of $dX$. With `Twice`, all ranks agree, which looks
# healthy, but on a line that is four times too steep.
#
# What about the gradients of the *weights*, those that training is for?

# %%
for name, grads in weights.items():
    same = all(np.array_equal(one.w_in, other.w_in) for one, other in zip(grads, weights["f as it is"]))
    print(f"{name:10}  dA the same: {same}")

# %% [markdown]
# They are right in all three cases! $dA = X^T dZ$ ($Z = XA$, before GeLU) needs no $dX$. The mistake hurts the layers
# *below*.
#
# ## Eight layers deep
#
# So let there be something below: eight blocks of a transformer, each with attention and an MLP, each with its own f,
# and around both a residual sum and a layer norm (walkthrough *A block on real ranks*). What are the gradients of each
# layer's $A$ now?

# %%
from reference.layers.block import block_tensors, sharded_block_backward, sharded_block_forward

L, h = 8, 16
deep = ModelConfig(num_layers=L, hidden_size=h, num_attention_heads=4, vocab_size=1, max_position_embeddings=6,
                   init_method_std=0.2)
tensors = dict(enumerate([block_tensors(deep)] * L))
blocks = split(initialize(tensors, seed=1, dtype=np.float64), tensors, t)
first_x, last_dy = random.normal(size=(2, 2, 6, h))

def gradients(backward):
    """Return for each layer a list of the ranks' gradients."""
    xs, dys, caches, grads = [first_x] * t, [last_dy] * t, [], {}
    for i in range(L):
        xs, cache = sharded_block_forward(xs, [p[i] for p in blocks], deep, region)
        caches.append(cache)
    for i in reversed(range(L)):
        dys, grads[i] = sharded_block_backward(dys, [p[i] for p in blocks], caches[i], deep, backward)
    return [grads[i] for i in range(L)]

right, dropped, twice = gradients(region), gradients(Dropped()), gradients(Twice())

# %%
def joined(layer):
    return np.concatenate([grads.mlp.w_in for grads in layer], axis=1)       # all columns of dA

def norms(layers):
    return [np.linalg.norm(joined(layer)) for layer in layers]

def ratio(layers):
    return [wrong / norm for wrong, norm in zip(norms(layers), norms(right))]

draw_curves({"as it is": [1.0] * L, "dropped": ratio(dropped), "twice": ratio(twice)}, "layer",
            "norm / right norm", "the norm of dA, layer by layer (the backward goes from right to left)")

# %% [markdown]
# The gradients of *Twice* grow from layer to layer, which somebody will notice. The norms of *Dropped* look normal.
# But:

# %%
off = [np.linalg.norm(joined(a) - joined(b)) / np.linalg.norm(joined(b)) for a, b in zip(dropped, right)]
print("dropped, layers 1 to 8: dA is off by", *(f"{part:.0%}" for part in off))

# %% [markdown]
# And it gets worse. A layer norm's gain is replicated, and each rank updates its own copy with its own gradient. That
# works because all have the same gradient. Without f's sum they have different ones: after one step the ranks' copies
# differ, arrays outside the region are no longer identical, and g adds up parts of different models.

# %%
for name, layers in {"as it is": right, "dropped": dropped, "twice": twice}.items():
    gains = [grads.input_layernorm.weight for grads in layers[0]]
    print(f"{name:9} gradient of the first layer's gain identical on all ranks:",
          all(np.allclose(gain, gains[0]) for gain in gains))

# %% [markdown]
# ## On real ranks
#
# `mpi_impl/layers/mlp.py` is the same layer for one rank. Its `region` sends something, and asks for the reason. Its
# backward adds the weights' gradients to `grads`, through a `sink`: a function that decides when the product `x.T @ dy`
# is computed. Here that is at once; a pipeline may postpone it until its rank would wait.

# %%
from mpi_impl.layers import mlp as on_ranks

print(inspect.getsource(on_ranks.mlp_backward))

# %%
ranks["shards"], ranks["c"], ranks["x"], ranks["dy"] = shards, c, x, dy       # to all ranks

# %% [markdown]
# **Predict.** The layer's input and output are $[2, 4, 8]$, in float64, on 4 ranks. How many bytes does each rank
# send, forward and backward together, if an all-reduce sends $2(t-1)/t$ of its array?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes
from mpi_impl.comm.regions import TensorParallelRegion
from shardlab.demos.printing import traffic_table
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.params import tree_map

p, region = shards[rank], TensorParallelRegion(group)         # of all shards this rank takes its own
grads = tree_map(np.zeros_like, p)
with group.ledger.phase("forward"):
    y, cache = mlp_forward(x, p, c, region)
with group.ledger.phase("backward"):
    dx = mlp_backward(dy, p, cache, c, grads, ImmediateSink(), region)
sent = sum(ring_bytes(entry, total) for entry, total in group.ledger.totals.items())
print(traffic_table(group.ledger))

# %% tags=["hide-output"]
print([np.allclose(dx, measured, atol=1e-6) for dx in ranks["dx"]])
assert len(set(ranks["sent"])) == 1
reveal(guess, ranks["sent"][0], "bytes that each rank sends")

# %% [markdown]
# Two all-reduces, each of $b\,s\,h = 2 \cdot 4 \cdot 8$ numbers: g's, for the layer's output, in the forward; f's, for
# its input, in the backward. Each rank's $dX$ is the measured one.
#
# ## What an all-reduce costs
#
# The last column of the ledger says how many bytes each rank has sent. For an all-reduce of $N$ numbers that is
# $2N(t-1)/t$, numbers of 8 bytes. Where does the formula come from?
#
# Suppose that all ranks send their arrays to rank 0, which adds them up and sends the sum back to each. Then rank 0
# receives and sends $(t-1)N$ numbers while the others wait. A *ring* is better: every rank sends to the next rank only,
# all at the same time ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). Each array is divided
# into $t$ pieces. In the picture there is a row for each rank and a box for each piece of its array. Rank $i$ begins
# with a stripe of its own colour in each of its boxes; a box with all colours is complete. A frame marks what has just
# arrived from the rank above (for rank 0, from the last):

# %%
t = 4
steps = ring_all_reduce(np.tile(2 ** np.arange(t)[:, None], (1, t)))
draw_ring(steps)

# %% [markdown]
# First the **reduce-scatter**: in each step a rank passes on the piece that it has just received, with its own numbers
# added. After $t-1$ steps rank $i$ has the complete piece $i$ of the sum, and incomplete pieces otherwise. Then the
# **all-gather**: complete pieces go around the ring and replace the incomplete ones, in another $t-1$ steps. In each of
# these $2(t-1)$ steps every rank sends one piece, $N/t$ numbers, and no rank is busier than the others:
#
# $$2(t-1) \cdot \frac{N}{t} = \frac{2N(t-1)}{t} < 2N.$$
#
# (In the picture rank $i$'s numbers are $2^i$, so that the binary digits of a sum show which ranks are in it. A stripe
# is a digit.)

# %%
print("at the end each piece on each rank is", np.unique(steps[-1].held), "= 1 + 2 + 4 + 8")
print("steps:", len(steps) - 1, "= 2 (t - 1)")

# %% [markdown]
# On real ranks. `ring_reduce_scatter` is the demo's version, written with sends and receives; `group.reduce_scatter` is
# MPI's own.

# %%
# %%ranks 4
from shardlab.demos.collectives import ring_reduce_scatter
from reference.comm.ring import ring_all_gather

numbers = np.full(12, 2 ** rank)                              # N = 12, a piece has 3
_, by_hand = ring_reduce_scatter(group, numbers)
by_mpi = group.reduce_scatter(numbers, 0, "the same")
print(f"piece {by_hand}, the same from MPI: {np.array_equal(by_hand, by_mpi)}")
print("sent:", group.ledger.elements(operation="send"), "numbers; N (t-1)/t is", ring_all_gather(12, size))

# %% [markdown]
# So an all-reduce costs less than two arrays, on any number of ranks. If everything goes through rank 0, every further
# rank makes it more expensive:

# %%
from reference.comm.ring import ring_all_reduce as cost_of_ring

sizes = [2, 4, 8, 16, 32, 64]
draw_curves({"everything through rank 0": [size - 1 for size in sizes],
             "in a ring": [cost_of_ring(1, size) for size in sizes]},
            "ranks t", "arrays sent", "what the busiest rank sends, in arrays of N numbers", x=sizes, log="xy")

# %% [markdown]
# ## Sequence parallelism: the same matrices, other owners
#
# Outside the region all ranks hold the same $[b, s, h]$, and do the same with it: layer norms, dropout, residual sums,
# $t$ times over. All of that treats each position of a text separately. So the positions can be sharded: outside, rank
# $i$ has $s/t$ of them ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 4.2.2). That is *sequence
# parallelism*, and it is another `region`.
#
# Inside, all positions are needed. So f is replaced by an **all-gather**, which joins the ranks' positions. And g is
# replaced by a **reduce-scatter**: the partial sums are added up, but each rank needs only its positions of the sum.
# Their matrices, for three positions, one on each of three ranks:

# %%
t = 3
by_positions = SequenceParallelRegion()

def pieces_of(e):
    """Split the vector of all ranks' numbers into each rank's piece [1, positions, 1]."""
    return [piece.reshape(1, -1, 1) for piece in np.split(e, t)]

def vector(pieces):
    return np.concatenate([piece.ravel() for piece in pieces])

gather = np.column_stack([vector(by_positions.enter(pieces_of(e))) for e in np.eye(n)])
scatter = np.column_stack([vector(by_positions.leave(pieces_of(e))) for e in np.eye(n * t)])
draw_maps([Map("all-gather", gather, out=owners_of(n * t, t), into=owners_of(n, t)),
           Map("reduce-scatter", scatter, out=owners_of(n, t), into=owners_of(n * t, t))], "instead of f and g")

# %%
print("the same numbers as f and g:", np.array_equal(gather, f) and np.array_equal(scatter, g))

# %% [markdown]
# They *are* f and g. Only the strips have changed: which rank has a number outside. So they are adjoint, and each is
# the backward of the other. And an all-reduce is a reduce-scatter followed by an all-gather, as the ring has shown. So
# the same amount is sent: f and g send nothing in one direction and an all-reduce in the other, and these send half of
# it in each direction.
#
# On the same four ranks, here are the same layer and the same shards with another region. Each rank now has one of the
# four positions.
#
# **Predict.** With sequence parallelism, when inputs are not kept but gathered again, how much more does a rank send
# than with f and g?

# %%
guess = ...                # as a share: 1 would be twice as much

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.regions import SequenceParallelRegion

p, mine = shards[rank], slice(rank, rank + 1)                 # of the positions
for name, region, own in [("f and g", TensorParallelRegion(group), slice(None)),
                          ("all-gather, reduce-scatter", SequenceParallelRegion(group, True), mine),
                          ("the same, inputs not kept", SequenceParallelRegion(group), mine)]:
    grads = tree_map(np.zeros_like, p)
    with group.ledger.phase(name):
        y, cache = mlp_forward(x[:, own], p, c, region)
        dx = mlp_backward(dy[:, own].copy(), p, cache, c, grads, ImmediateSink(), region)
sent = {}
for entry, total in group.ledger.totals.items():
    sent[entry.phase] = sent.get(entry.phase, 0) + ring_bytes(entry, total)
print(traffic_table(group.ledger))

# %% tags=["hide-output"]
sent = ranks["sent"][0]
assert sent["f and g"] == sent["all-gather, reduce-scatter"]
reveal(guess, sent["the same, inputs not kept"] / sent["f and g"] - 1, "more")

# %%
print("every rank's dX is its position of the measured one:", np.allclose(np.concatenate(ranks["dx"], 1), measured))

# %% [markdown]
# (`dy.copy()`: an all-reduce puts its result where its input was.) It sends as much as f and g, to the byte: four times
# half an all-reduce. There is one more choice. The all-gathered $X$ is needed again in the backward, for $dA$. A rank
# can keep it, and with it all positions; or keep its own positions only, and gather again, as the paper does. The last
# rows of the ledger show it: a rank sends a quarter more, and keeps less.
#
# One thing is *not* free any more. A tensor that is applied outside the region, such as the gain of a layer norm or the
# last bias of the MLP, is applied only to a rank's own positions. Its gradient is a partial sum, to be added up at the
# end of a step: `complete` in `reference/comm/regions.py`.

# %%
db = ranks["grads"]
whole = dy.sum((0, 1))                                        # the bias was added at every position
print("one rank's gradient of the last bias is whole:", np.allclose(db[0].b_out, whole))
print("the ranks' sum is:", np.allclose(sum(grads.b_out for grads in db), whole))

# %% [markdown]
# ## What to take away
#
# | operator | forward | backward | elements sent, forward + backward |
# |---|---|---|---|
# | f, into the region | nothing: all have $x$ | all-reduce | $0 + 2N(t-1)/t$ |
# | g, out of the region | all-reduce | nothing: all have $dy$ | $2N(t-1)/t + 0$ |
# | with sequence parallelism, instead of f | all-gather | reduce-scatter | $N(t-1)/t + N(t-1)/t$ |
# | with sequence parallelism, instead of g | reduce-scatter | all-gather | $N(t-1)/t + N(t-1)/t$ |
#
# - The backward of a linear map is its transpose. To copy and to add up are transposes of one another.
# - $\langle f x, y \rangle = \langle x, f^* y \rangle$ with random $x$ and $y$ tests any such pair in two lines.
# - Without f's sum nothing fails, norms look right, the top layer is right; and the ranks' copies drift apart.
# - An all-reduce is a reduce-scatter and an all-gather, and on a ring costs less than $2N$.
#
# The site has an MLP on two ranks in numbers, whose f and g you can switch off: [a playground](../docs/playground.md).
#
# ## Try it
#
# 1. Replace the random `dy` by `np.ones(shape)`. Can you still distinguish the mistakes in the three plots? Now let the
#    layer be a softmax (`reference/ops.py`), whose outputs always add up to 1. What is its $dX$ for $dY = 1$, and which
#    mistakes would you see?
# 2. Give `TensorParallelRegion` another wrong backward: let `leave_backward` add up, `return all_reduce(dys)`. Which of
#    $dX$, $dA$, $dB$ are wrong now, and by what factor? Why does the last bias stay right?
# 3. Eight ranks could also exchange all they have in pairs, three times: 0 with 1, then with 2, then with 4, and so on.
#    How many numbers does each send? Say a message takes 5 µs, and 1 ns more for each number. For which $N$ is that
#    faster than the ring? (MPI chooses by size, too.)
#
# <details><summary>Answer to 2</summary>
#
# ```python
# class Again(TensorParallelRegion):
#     def leave_backward(self, dys):
#         return all_reduce(dys)
#
# dxs, grads = sharded_mlp_backward([dy] * t, shards, cache, c, Again())
# ```
#
# $dX$, $dA$ and $dB$ are four times the right ones, element by element: each rank begins with $t\,dY$ in place of $dY$,
# and everything inside the region is linear in it. The last bias is added after g, outside the region. So its gradient
# is taken from $dY$ itself, and is right, by the factor 1.0.
#
# </details>
#
# Next: [3. Data parallelism](03_data_parallelism.ipynb). The demos for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.collectives` and `... -m shardlab.demos.sequence_parallel`.
