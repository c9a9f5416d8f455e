# %% [markdown]
# # 19. Where f and g come from
#
# *f* and *g* were put into the MLP by hand, in walkthrough *f and g*, by people who knew where. Then sequence
# parallelism put two other operators there, attention got a pair of its own, the loss three sums, and each came with a
# proof. Could nobody have told us where they belong? The matrix product could.
#
# **You will** write an MLP once, with no ranks in it, and derive f and g, with their backwards, from a single line that
# says what is sharded; derive sequence parallelism, replicas and a sharded loss from other lines; meet the four types
# that decide it, and be refused by them; run a derived program on real ranks; find Megatron's layout by a search; prove
# 81 layouts at once; and plant a bug that no type can see.
#
# **You need** walkthroughs *f and g*, *Embedding and loss* and *Sequence parallelism*, and *What is a proof?* for the
# proof. About 50 minutes.

# %%
# %load_ext shardlab.notebook
import inspect
from itertools import combinations, product

import numpy as np

from shardlab.notebook.pictures.changes import draw_changes
from shardlab.notebook.pictures.shards import OWNERS
from shardlab.notebook.predictions import reveal
from shardlab.report.charts import finish
from shardlab.report.drawing import Picture
from reference import ops
from reference.comm.ring import RING
from reference.errors import UserError
from reference.named import layers
from reference.named.functions import Function
from reference.named.mesh import Mesh
from reference.named.program import ACTIVATION, CONSTANT, WEIGHT, Named, Program
from reference.named.types import INVARIANT, PARTIAL, REPLICATED, dual

random = np.random.default_rng(18)

# %% [markdown]
# ## Three lines
#
# An MLP is three lines of NumPy, with $x$ $[b, s, h]$, $A$ $[h, f]$, $B$ $[f, h]$, and two biases:

# %%
sizes = dict(b=4, s=8, h=8, f=32, g=4, r=1, d=2, V=24, z=8, n=2)      # of all axes on this page

def three_lines(x, A, a, B, b):
    z = x @ A + a
    z = ops.gelu(z)[0]
    return z @ B + b

# %% [markdown]
# The letters stand only in this sentence. Let us put them into the program: every axis of every array has a name. Then
# a matrix product needs no rule about rows and columns. It multiplies the numbers whose indices agree, and adds up
# along the names that the result lacks. Here are the MLP and its linear layer, in `reference/named/layers.py`:

# %%
print(inspect.getsource(layers.linear))
print(inspect.getsource(layers.mlp))

# %% [markdown]
# `p` is a `Program`. It computes nothing yet; it records which operation reads which arrays. The file has all layers of
# a GPT in this way, and the word "rank" occurs in it once: "Nothing here knows of ranks."
#
# ## One more line
#
# A *mesh* has ranks in one direction or in several, each with a name: `{"t": 2}` are two ranks, in direction t. (The
# program's messages call it "the mesh's axis t". On this page only arrays have axes.) A *layout* says which named axes
# are sharded, and over which direction: `{"f": "t"}` shards every array that has an f along its f. These are $A$, by
# columns, the first bias, and $B$, by rows.

# %%
MLP = dict(w_in="h f", b_in="f", w_out="f h", b_out="h")

def write(layer, axes, layout, mesh, last=(), sizes=sizes):
    """Write a layer of x [b s h] and of weights with these axes; return its program and its result."""
    p = Program(mesh, layout, sizes)
    y = layer(p, p.array("x", "b s h"), declare(p, axes), *(p.array(*one, CONSTANT) for one in last))
    return p, p.rest(y)

def declare(p, axes):
    return {name: declare(p, of) if isinstance(of, dict) else p.array(name, of, WEIGHT) for name, of in axes.items()}

# %% [markdown]
# While the program is written, it finds that some operands do not go together, and *changes* one of them. A program
# prints its changes:
#
# **Predict.** How many changes does the MLP need?

# %%
guess = ...                # changes

# %% tags=["hide-output"]
p, y = write(layers.mlp, MLP, {"f": "t"}, {"t": 2})
print(p)
reveal(guess, len(str(p).splitlines()), "changes")

# %% [markdown]
# The first one keeps $x$ as it is, and adds up its gradient in the backward: that is **f**. The second adds up the
# ranks' results of the second product, and keeps the gradient as it is: that is **g**. It comes before the bias, as it
# must. Nobody has written either of them. And without a layout?

# %%
print("changes:", str(write(layers.mlp, MLP, {}, {"t": 2})[0]).splitlines())

# %% [markdown]
# ## Does it run?
#
# A `Mesh` plays a program. For each name it has a list with one array for each rank. Its ranks communicate by the
# functions of `reference/comm/collectives.py`, and it records each collective in `messages`:

# %%
def play(p, y, mesh):
    """Play a program on random arrays, forward and backward; return the whole ones by name, and each rank's."""
    whole = {x: np.ones(size_of(x)) if x.role == CONSTANT else random.normal(size=size_of(x)) for x in outside(p)}
    arrays, caches = mesh.forward(p, whole)
    mesh.backward(p, caches, {y: mesh.deal(random.normal(size=size_of(y)), y)})
    return {x.name: one for x, one in whole.items()}, arrays

def outside(p):
    """Return what a program reads and does not compute."""
    results = {step.result for step in p.steps}
    return dict.fromkeys(x for step in p.steps for x in step.operands if x not in results)

def size_of(x):
    return [sizes[axis] for axis in x.axes]

mesh = Mesh({"t": 2})
whole, arrays = play(p, y, mesh)
expected = three_lines(*(whole[name] for name in ("x", "w_in", "b_in", "w_out", "b_out")))
print("both ranks have the three lines' result:", all(np.allclose(one, expected) for one in arrays[y]))

# %% [markdown]
# **Predict.** How many numbers went through collectives, forward and backward together?

# %%
guess = ...                # numbers

# %% tags=["hide-output"]
def show(messages):
    for operation, name, m, elements in messages:
        print(f"{operation:14} of {name:15} on {m}: {elements} numbers")

show(mesh.messages)
assert sizes["b"] * sizes["s"] * sizes["h"] == 256
reveal(guess, sum(elements for *_, elements in mesh.messages), "numbers")

# %% [markdown]
# Two all-reduces, each of $b\,s\,h = 256$ numbers: Megatron's.
#
# ## Four types
#
# How did the program know? On a direction of the mesh, each array has one of four *types*. They say how an array and
# what the ranks hold belong together. Take the array 1 2 3 4, and two ranks:

# %%
two, one_axis = Mesh({"t": 2}), Named("array", ("i",), {}, ACTIVATION)
array = np.arange(1, 5)
for kind in INVARIANT, REPLICATED, PARTIAL, "i":
    held = two.change([array, array], one_axis, "t", INVARIANT, kind) if kind != INVARIANT else [array, array]
    print(f"{kind if kind != 'i' else 'cut along i':12} rank 0 {held[0]!s:10} rank 1 {held[1]!s:10}"
          f" its gradient is {dual(kind) if kind != 'i' else 'cut along i'}")

# %% [markdown]
# - **Cut along i**: each rank has a piece.
# - **Partial**: the ranks have the terms of a sum. (Any terms would do. Here rank 0 has everything, and rank 1 zeros.)
# - **Invariant** and **replicated** look the same: all ranks hold the array. They differ in what happens *next*. If all
#   ranks compute the same with it, each of them knows its whole gradient: it is invariant. If each rank uses it for its
#   own part of the work, its own columns say, then each knows a part of the gradient, and the gradient is partial: it
#   is replicated.
#
# So types come in pairs. The gradient of an array has the *dual* type: replicated and partial are each other's dual, as
# copying and adding up are each other's transpose (walkthrough *f and g*), and the other two are their own.
#
# Now everything is said. From one type to another there are twelve ways (and from one cut to another a thirteenth), and
# the backward of each needs no thought: the gradient goes from the dual of the second type to the dual of the first,
# and that way is in the same table.

# %%
draw_changes()

# %% [markdown]
# f is the way from invariant to replicated. Its backward goes from partial to invariant: a sum, which is g. And g's
# backward is f. Look for the other pairs! The all-gather and the reduce-scatter of sequence parallelism are in the last
# two rows, and so is the all-to-all of walkthrough *Long sequences*, as *exchange*.
#
# ## Three rules
#
# What does an operation ask of its operands?
#
# - A **product** is linear in each operand. If both are cut along the same axis, the result is cut there, or partial if
#   it lacks the axis. An operand without the axis must be replicated. One operand may be partial, if the others are
#   replicated: $(u + v) w = u w + v w$.
# - A **sum** is linear in both together: both may be partial, or neither. (Both sharded along the same axes, or both
#   replicated, is fine, too.)
# - Any other **function** may not be partial, and needs whole the axis along which it works.
#
# Were these rules thought of, or measured? Both. `tests/reference/test_named_types.py` tries *all* combinations of
# types on exact numbers (walkthrough *What is a proof?*): where a rule gives a type, the result and all gradients are
# right with this type and with no other, and where it refuses, no type is right.
#
# ## To be refused
#
# Usually a program mends what does not go together. A *strict* one refuses it instead, while it is being written, and
# says why. So it can check a program in which people write f and g themselves. Megatron's MLP without f:

# %%
def strictly(f=True, g=True):
    """Write the MLP up to its last bias, with f and g as changes by hand."""
    p = Program({"t": 2}, {"f": "t"}, sizes, strict=True)
    x, w = p.array("x", "b s h"), declare(p, MLP)
    if f:
        x = p.change(x, "t", REPLICATED)
    y = p.product(p.function(layers.GELU, p.product(x, w["w_in"], "b s f")), w["w_out"], "b s h")
    return p, p.change(y, "t", INVARIANT) if g else y, w

def refused(write):
    try:
        write()
    except UserError as error:
        print(error)

refused(lambda: strictly(f=False))

# %% [markdown]
# This is `Dropped` of walkthrough *f and g*, the bug that raised no error and left norms as they were. It needs no run
# to be found. The bias before g, so that each rank adds it once:

# %%
p, y, w = strictly(g=False)
refused(lambda: p.sum(y, w["b_out"]))

# %% [markdown]
# A product of two partial sums, $(u + v)(u + v)$, which is not $u u + v v$:

# %%
refused(lambda: p.product(y, y, "b s h"))

# %% [markdown]
# And f twice, or g twice? There is nothing to refuse: a change from a type to itself is no change, so it cannot be
# written.

# %%
p, y, w = strictly()
assert p.change(y, "t", INVARIANT) is y
print(p)

# %% [markdown]
# ## Another line: sequence parallelism
#
# Outside the region every rank did the same work. So let the positions be sharded as well, over the same ranks:

# %%
p, y = write(layers.mlp, MLP, {"f": "t", "s": "t"}, {"t": 2})
print(p)

# %% [markdown]
# An array that has both axes, such as $x$ after the first product, cannot be cut along both over the same ranks. The
# weight's cut stays, since weights do not travel. So $x$ is gathered, with a reduce-scatter backward, and the partial
# sum is scattered, with an all-gather backward: sequence parallelism, from two letters.
#
# And there is a third line, which people have forgotten so often that the bug zoo has it in several
# forms: the bias is added to a rank's own positions only, so its gradient is partial, and has to be added up.
#
# **Predict.** What does a rank send now, relative to f and g, in a ring? The gradient of the bias is 8 numbers.

# %%
guess = ...                # 1 would be the same

# %% tags=["hide-output"]
def sent(messages, t=2):
    """Return the numbers that a rank sends in a ring."""
    return sum(RING[operation](elements, t) for operation, _, _, elements in messages)

by_positions = Mesh({"t": 2})
play(p, y, by_positions)
show(by_positions.messages)
reveal(guess, sent(by_positions.messages) / sent(mesh.messages), "times as much")

# %% [markdown]
# The same, and the bias. (Walkthrough *Sequence parallelism* gathers $x$ again in the backward, to keep less of it. The
# derived program keeps what it has gathered. It saves no memory.)
#
# ## Replicas, and two directions
#
# Samples over a direction d are data parallelism. The program changes weights, and nothing else:

# %%
print(write(layers.mlp, MLP, {"b": "d"}, {"d": 2})[0])

# %% [markdown]
# The all-reduce of gradients, one for each weight. (By hand one packs them into a bucket, walkthrough *Data
# parallelism*.) With both directions, types are found on each by itself:

# %%
print(write(layers.mlp, MLP, {"f": "t", "b": "d"}, {"t": 2, "d": 2})[0])

# %% [markdown]
# ## Keys and values
#
# Positions over a direction c, and attention. A position needs the keys of all others, so keys have a name of their own
# for positions, z. Heads over t need f and g:

# %%
ATTENTION = dict(w_q="h g r d", w_kv="h n g d", w_out="g r d h")
past = [("past", "s z")]
print("heads:", write(layers.attention, ATTENTION, {"g": "t"}, {"t": 2}, past)[0], sep="\n")
print("positions:", write(layers.attention, ATTENTION, {"s": "c"}, {"c": 2}, past)[0], sep="\n")

# %% [markdown]
# (`past` is the mask, a constant, so nothing is sent for it.) In the second program keys and values are gathered,
# `function [b s g d]`, and their gradients scattered. That is context parallelism as Llama 3 was trained with. A
# *ring* that never holds all keys (walkthrough *Long sequences*) is not found. Why not? We come to it now.
#
# ## Three numbers instead of V
#
# The last layer makes $V$ logits for each position, and a loss. `layers.loss` writes it in small steps: the largest
# logit, exponentials, their sum, a logarithm, and the target's logit, each as an operation with names.
#
# **Predict.** With the vocabulary sharded, how many numbers for each position are sent forward?

# %%
guess = ...                # numbers for a position; there are 24 logits

# %% tags=["hide-output"]
def write_loss(loss):
    p = Program({"t": 2}, {"V": "t"}, sizes)
    constants = p.array("targets", "b s V", CONSTANT), p.array("ones", "V", CONSTANT)
    return p, p.rest(loss(p, p.array("x", "b s h"), p.array("word", "V h", WEIGHT), *constants))

tokens = np.eye(sizes["V"])[random.integers(sizes["V"], size=(sizes["b"], sizes["s"]))]    # a 1 among zeros for each
numbers = dict(x=random.normal(size=(4, 8, 8)), word=random.normal(size=(24, 8)), targets=tokens, ones=np.ones(24))

def play_loss(loss):
    """Play a loss forward; return the messages, and the losses."""
    p, y = write_loss(loss)
    mesh = Mesh(p.mesh)
    arrays, _ = mesh.forward(p, {x: numbers[x.name] for x in outside(p)})
    return mesh.messages, arrays[y][0]

in_steps, losses = play_loss(layers.loss)
show(in_steps)
reveal(guess, sum(elements for *_, elements in in_steps) / (sizes["b"] * sizes["s"]), "numbers for each position")

# %% [markdown]
# That is walkthrough *Embedding and loss*'s cross-entropy: a maximum and two sums. Now somebody tidies up, and writes
# the loss as *one* function along $V$, as every library has it:

# %%
def cross_entropy(logits, targets):
    shifted = logits - logits.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1)
    return np.log(total) - (shifted * targets).sum(-1), (shifted, total, targets)

def cross_entropy_backward(dloss, cache):
    shifted, total, targets = cache
    return dloss[..., None] * (np.exp(shifted) / total[..., None] - targets)

def loss_in_one(p, x, word, targets, ones):
    logits = p.product(x, word, "b s V")
    return p.function(Function(cross_entropy, cross_entropy_backward), logits, targets, along="V", out="b s")

in_one, the_same = play_loss(loss_in_one)
show(in_one)
print("the same losses:", np.allclose(losses, the_same))
print(write_loss(loss_in_one)[0])

# %% [markdown]
# All logits are gathered: 8 times as many numbers, and each rank has to hold them. The program is right, and it is
# slow.

# %%
assert in_one[0][3] == 8 * sum(elements for *_, elements in in_steps)

# %% [markdown]
# Why did the machine not find the better way? Because it cannot look into a function. "Along V" is all that it knows:
# the function needs all of V. It takes a *law* to do better: a maximum of maxima is the maximum, a sum of sums is the
# sum. Whoever wrote `layers.loss` knew this law, and wrote the function as pieces, for each of which there is a rule.
# Derivation does not replace an idea. It spares you the work of carrying an idea through all layouts, forward and
# backward. The ring of walkthrough *Long sequences* has a law, too: a softmax can be corrected when a larger number
# comes. It is in no rule here, so it is not found.
#
# ## One all-reduce less
#
# Here is an idea that is found. A GPT's block has attention, then the MLP, each with its own g. GPT-J
# ([Wang and Komatsuzaki 2021](https://github.com/kingoflolz/mesh-transformer-jax)) has both read *one* norm, and adds
# both to $x$:

# %%
def parallel_block(p, x, w, past):
    normed = layers.layer_norm(p, x, w["norm"])
    both = p.sum(layers.attention(p, normed, w["attention"], past), layers.mlp(p, normed, w["mlp"]))
    return p.sum(p.sum(x, both), w["b_out"])

NORM = dict(weight="h", bias="h")
PARALLEL = dict(norm=NORM, attention=ATTENTION, mlp=dict(w_in="h f", b_in="f", w_out="f h"), b_out="h")
BLOCK = dict(input_layernorm=NORM, attention=ATTENTION, post_attention_layernorm=NORM, mlp=MLP)
megatron = {"f": "t", "g": "t"}

# %% [markdown]
# GPT's block has four all-reduces, two of them forward.
#
# **Predict.** How many has this one?

# %%
guess = ...                # all-reduces, forward and backward

# %% tags=["hide-output"]
counts = {}
for name, layer, axes in ("GPT", layers.block, BLOCK), ("GPT-J", parallel_block, PARALLEL):
    mesh = Mesh({"t": 2})
    p, y = write(layer, axes, megatron, mesh.sizes, past)
    play(p, y, mesh)
    counts[name] = len(mesh.messages)
    print(f"{name}, {counts[name]} all-reduces:", p, sep="\n")
reveal(guess, counts["GPT-J"], "all-reduces")

# %% [markdown]
# One g: a sum of two partial arrays is partial, by the rule for sums, and the program does not add up before something
# needs it. One f: what was changed once is not changed again, and the two gradients that come to it are added before
# they are sent. PaLM has such blocks, too, because they train faster
# ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), section 2), and whoever builds one by hand has to move g.
# Here nobody has to.
#
# ## On real ranks
#
# A `RankMesh` is a mesh of which a rank holds one place. It plays the same program, with a group for each direction:

# %%
values = {name: random.normal(size=[sizes[axis] for axis in of.split()]) for name, of in MLP.items()}
x, dy = random.normal(size=(2, sizes["b"], sizes["s"], sizes["h"]))
ranks["sizes"], ranks["axes"], ranks["values"], ranks["x"], ranks["dy"] = sizes, MLP, values, x, dy

# %%
# %%ranks 4
from mpi_impl.comm.mesh import RankMesh
from shardlab.demos.printing import traffic_table
from reference.named import layers
from reference.named.program import WEIGHT, Program

p = Program({"t": size}, {"f": "t"}, sizes)
named, w = p.array("x", "b s h"), {name: p.array(name, of, WEIGHT) for name, of in axes.items()}
result = p.rest(layers.mlp(p, named, w))

mesh = RankMesh({"t": group})
arrays, caches = mesh.forward(p, {named: x} | {w[name]: values[name] for name in w})
gradients = mesh.backward(p, caches, {result: mesh.deal(dy, result)})
derived = dict(y=arrays[result][0], dx=gradients[named][0], dw=gradients[w["w_in"]][0])
mesh = None                    # it holds a group, which is of this cell
print(traffic_table(group.ledger))

# %% [markdown]
# Below is the layer of `mpi_impl/layers/mlp.py`, with the f and g that people have put into it, on the same numbers:

# %%
# %%ranks 4
from mpi_impl.comm.regions import TensorParallelRegion
from mpi_impl.layers.mlp import mlp_backward, mlp_forward
from mpi_impl.parallel.sinks import ImmediateSink
from reference.config import ModelConfig
from reference.layers.mlp import MLP, mlp_tensors
from reference.params import split, tree_map

c = ModelConfig(1, sizes["h"], 1, 1, sizes["s"])
mine, region = split(MLP(**values), mlp_tensors(c), size)[rank], TensorParallelRegion(group)
grads = tree_map(np.zeros_like, mine)
y, cache = mlp_forward(x, mine, c, region)
dx = mlp_backward(dy.copy(), mine, cache, c, grads, ImmediateSink(), region)
print(traffic_table(group.ledger))
print("the same y, dx and gradient of A:", np.allclose(y, derived["y"]), np.allclose(dx, derived["dx"]),
      np.allclose(grads.w_in, derived["dw"]))

# %% [markdown]
# The same messages, and the same numbers. `tests/mpi_impl/test_named.py` says so of every layer of a GPT and of a
# Llama, with and without sequence parallelism, for random sizes, on 2 to 4 ranks.
#
# ## Is Megatron's layout the best?
#
# If a layout is a line, we can try all of them. A block has the axes b, s, h, f and g. Each is sharded over 4 ranks or
# not. Only b and s not both: activations have both axes, and can be cut along one of them only. For each layout
# we write the program, play it, and count what a rank sends in a step, the numbers of its weights, and those of
# its activations: all arrays of the program. (Recompute, walkthrough *Sequence parallelism*, would keep fewer.)

# %%
t, found = 4, {}
for cut in (cut for n in range(6) for cut in combinations("bshfg", n) if not {"b", "s"} <= set(cut)):
    mesh = Mesh({"t": t})
    p, y = write(layers.block, BLOCK, dict.fromkeys(cut, "t"), mesh.sizes, past)
    arrays = play(p, y, mesh)[1]
    held = {id(xs[0]): (x.role, xs[0].size) for x, xs in arrays.items()}      # an array that is kept counts once
    weights, activations = (sum(size for of, size in held.values() if of == role) for role in (WEIGHT, ACTIVATION))
    found["".join(cut)] = sent(mesh.messages, t), weights, activations
print(len(found), "layouts")

# %% [markdown]
# A layout is *beaten* if another needs no more of anything, and less of something. These are not:

# %%
def beaten(mine):
    return any(all(a <= b for a, b in zip(other, mine)) and other != mine for other in found.values())

best = {cut: cost for cut, cost in sorted(found.items(), key=lambda item: item[1]) if not beaten(cost)}
for cut, (messages, weights, activations) in best.items():
    print(f"{cut or '(nothing)':10} sends {messages:6,.0f}   weights {weights:6,}   activations {activations:7,}")

# %%
figure = Picture((8.5, 3.6), layout="constrained")
axes = figure.subplots()
for cost in sorted(set(found.values())):
    names = [cut or "nothing" for cut, other in best.items() if other == cost]
    messages, weights, activations = cost
    axes.scatter(messages, activations, s=weights / 4, alpha=0.8,
                 color="#C8C8C8" if not names else OWNERS[1] if {"fg", "sfg"} & {*names} else OWNERS[0])
    axes.annotate(", ".join(names), (messages, activations), (9, 4), textcoords="offset points", fontsize=9)
finish(axes, "numbers that a rank sends", "24 layouts of a block on 4 ranks; areas are weights", "both",
       "numbers of activations")
figure.set_label("Layouts by the numbers that a rank sends, its weights and its activations. The best, in this order: "
                 + "; ".join(f"{cut or 'nothing'} {cost}" for cut, cost in best.items()))
figure

# %% [markdown]
# - **fg** is the layout of the first Megatron-LM: heads, and columns of the MLP. No layout with as few weights sends
#   less.
# - **sfg** is sequence parallelism. It sends 60 numbers more, for gradients of norms and of a bias, and needs
#   a third less for activations. **bfg** is its twin: it shards samples in place of positions, at the same cost.
#   Megatron takes positions, since a microbatch often has only one sample.
# - **b** is data parallelism. It sends each weight's gradient, and nothing of the batch: the more samples, the better
#   it looks. **bf** splits attention by samples, and the MLP as Megatron does.
# - **nothing** sends nothing and holds everything; **f** and **g** alone are halves of Megatron's; with **h** even the
#   norms are sharded, at a price that nobody pays.

# %%
assert min(cost for cost in found.values() if cost[1] <= 240) == found["fg"]
assert found["sfg"][0] - found["fg"][0] == 60 and 0.65 < found["sfg"][2] / found["fg"][2] < 0.7
assert found["sfg"] == found["bfg"]

# %% [markdown]
# The search does not know what f and g are. It knows four types and a table.
#
# ## Proved
#
# Rules can be wrong. But the claim is a simple one: *any layout computes the same formulas*, forward and backward.
# Walkthrough *What is a proof?* has the means to prove it. Here is the textbook's MLP, without names, on exact random
# numbers, and all layouts of b, s, h and f on a mesh of two directions with two ranks each:

# %%
from reference.config import ModelConfig
from reference.exact.array import random_array
from reference.layers import mlp as textbook

small = dict(b=2, s=2, h=4, f=4)

def exact(name, of):
    return random_array([small[axis] for axis in of.split()], name)

c = ModelConfig(1, small["h"], 1, 1, small["s"], ffn_hidden_size=small["f"])
weights = {name: exact(name, of) for name, of in MLP.items()}
x, dy = exact("x", "b s h"), exact("dy", "b s h")

def right_layouts(layer, divide_by=1):
    """Count the layouts in which all ranks' pieces are the textbook's, of the output and of all gradients."""
    expected, cache = textbook.mlp_forward(x, textbook.MLP(**weights), c)
    dx, grads = textbook.mlp_backward(dy / divide_by, textbook.MLP(**weights), cache, c)
    whole, right = dict(vars(grads), x=dx), []
    for places in product([None, "t", "d"], repeat=4):
        layout = {axis: m for axis, m in zip("bshf", places) if m}
        p, y = write(layer, MLP, layout, {"t": 2, "d": 2}, sizes=small)
        mesh = Mesh(p.mesh)
        arrays, caches = mesh.forward(p, {named: dict(weights, x=x)[named.name] for named in outside(p)})
        found = mesh.backward(p, caches, {y: mesh.deal(dy, y)})
        pairs = [(arrays[y], mesh.deal(expected / divide_by, y))]
        pairs += [(found[named], mesh.deal(whole[named.name], named)) for named in outside(p)]
        right.append(all((mine == piece).all() for each in pairs for mine, piece in zip(*each)))
    return sum(right), len(right)

print("{} of {} layouts are proved".format(*right_layouts(layers.mlp)))

# %% [markdown]
# No tolerance, no case left out. `tests/reference/test_named.py` does it for all layers of `layers.py`, on meshes of up
# to three directions, for random layouts, however senseless.
#
# ## What types do not see
#
# Types know who holds what. They do not know what the numbers *are*. So let somebody want the mean over samples of
# something, and divide each sample's output by the number of samples, as one does:

# %%
MEAN = Function(lambda y: (y / len(y), len(y)), lambda dy, n: dy / n)

def averaged_mlp(p, x, w):
    return p.function(MEAN, layers.mlp(p, x, w))

print(write(averaged_mlp, MLP, {"b": "d"}, {"d": 2})[0])

# %% [markdown]
# A function of each element, on an array that is cut along b: nothing to refuse, and nothing to change. A strict
# program would accept it, too.
#
# **Predict.** In how many of the 81 layouts is it right?

# %%
guess = ...                # layouts

# %% tags=["hide-output"]
right, of_all = right_layouts(averaged_mlp, divide_by=small["b"])
reveal(guess, right, f"layouts of {of_all}")

# %% [markdown]
# Only where y has all samples on each rank. These are the 27 layouts in which b is not sharded, and 18 more, in which h
# is sharded over the same ranks, so that y comes out of the last product cut along h. In the others `len(y)` is the
# number of samples *on the rank*. On two replicas each divides by half the batch, and everything is twice as large:
# output, gradients, and the learning rate that you think you have.

# %%
assert right == 27 + 18

# %% [markdown]
# The right line divides by `p.sizes["b"]`. This mistake is so common that the zoo has it many times over, as a factor
# of d, of t, of the microbatches. No type system that we know sees it: in all of them, a constant is a constant.
# Numbers do, exact ones and floats alike.
#
# Types find at once, and without a run, what numbers find only where somebody looks. Numbers find what types cannot
# say. A project needs both.
#
# ## What to take away
#
# | layout | what the program adds | by hand that is called |
# |---|---|---|
# | f, or g, over t | invariant to replicated; partial to invariant | f and g: tensor parallelism |
# | and s over t | cut to replicated; partial to cut; biases to replicated | sequence parallelism |
# | b over d | each weight to replicated | data parallelism: gradients are summed |
# | s over c | keys and values to replicated | context parallelism, by all-gather |
# | V over t | a maximum and two sums, of one number a position | the vocabulary-parallel loss |
#
# - Four types, and the dual of each: the backward of a change is the change between the duals, in the same table.
# - f and g are not inventions. They are what is left to do if a product is sharded along the axis between two matrices.
# - A rule applies what somebody has understood to every layout. What nobody has told it, such as the law of a softmax,
#   it does not find.
# - Types see who holds what. They do not see what it is worth.
#
# ## Try it
#
# 1. Look at the table of changes. Which changes are their own backward?
#
# <details><summary>Answer</summary>
#
# Those that go from a type to its dual: partial to replicated (an all-reduce both ways), replicated to partial (nothing
# but zeros, both ways), and from one cut to another, which is an all-to-all back. The first is the map of walkthrough
# *f and g* that made gradients three times as large: right between a partial and a replicated array, wrong where the
# loss counts once.
#
# </details>
#
# 2. Shard the features instead: `write(layers.mlp, MLP, {"h": "t"}, {"t": 2})`. What is sent now, and why does nobody
#    split an MLP so?
#
# <details><summary>Answer</summary>
#
# Now the *first* product is along the sharded axis, and its result $[b, s, f]$ is partial. GeLU needs it whole, so it
# is added up, and its gradient too: two all-reduces as before, of arrays that are four times as large. It is the wrong
# split of walkthrough *Splitting matrices*. But the program does not call it wrong. It only tells you what it costs.
#
# </details>
#
# 3. Write sequence parallelism as a strict program: `{"f": "t", "s": "t"}`, with the changes by hand, and the bias.
#
# <details><summary>Answer</summary>
#
# ```python
# p = Program({"t": 2}, {"f": "t", "s": "t"}, sizes, strict=True)
# x, w = p.array("x", "b s h"), declare(p, MLP)
# z = p.sum(p.product(p.change(x, "t", REPLICATED), w["w_in"], "b s f"), w["b_in"])
# y = p.change(p.product(p.function(layers.GELU, z), w["w_out"], "b s h"), "t", "s")
# p.sum(y, p.change(w["b_out"], "t", REPLICATED))
# ```
#
# Leave one of the three changes out, and read the sentence.
#
# </details>
#
# 4. Give the parallel block's attention and MLP their own output biases, `b_out` in both, as `layers.block` has them.
#    How many all-reduces are there now? How would you get one back?
#
# <details><summary>Answer</summary>
#
# Three, two of them forward: each bias needs a complete sum before it. Add the two biases to $x$ after `both`, as the
# block does with one. (The one all-reduce backward stays: both read one $x$.)
#
# </details>
#
# 5. On a mesh `{"t": 2}`, let the MLP's weights be sharded along h *and* f, `{"h": "t", "f": "t"}`, and x by samples,
#    `"b": "t"`. What comes out? Is that ZeRO-3?
#
# <details><summary>Answer</summary>
#
# It is right, and it is not ZeRO-3. Weights stay where they are, by a rule of the program, so activations travel: an
# all-to-all exchanges a rank's samples for its features, a reduce-scatter follows each product, and an all-to-all leads
# back. ZeRO-3 gathers weights, and activations stay. Which is cheaper depends on which are larger.
#
# </details>
#
# 6. Harder. `layers.loss` subtracts the largest logit, for which one number a position is sent. Write a loss that does
#    not, and compare it with `layers.loss`: first on floats, then on exact numbers (walkthrough *What is a proof?*), by
#    `numbers`. What do you find, and who is right?
#
# <details><summary>Answer</summary>
#
# ```python
# def without(p, x, word, targets, ones):
#     logits = p.product(x, word, "b s V")
#     total = p.product(p.function(layers.EXP, logits), ones, "b s")
#     return p.sum(p.function(layers.LOG, total), p.product(logits, targets, "b s"), -1)
# ```
#
# Two numbers a position are sent. Floats agree (as long as no logit is so large that its exponential overflows). Exact
# numbers, `random_array` for `x` and `word`, do not: a false alarm. Exact numbers know the law of exp, but not that
# $\log (u / v) = \log u - \log v$, by which the largest logit cancels. A machine does not find what follows from a law
# that nobody has taught it, and it proves nothing by such a law either.
#
# </details>
#
# `.venv/bin/shardlab plan --operators` searches layouts with the time of real hardware in place of our counts, a choice
# for each operator ([planning](../docs/planning.md)). It finds Megatron's layers, too, and cases in which others are
# faster. The page [named axes](../docs/named_axes.md) has the rules, what hand-written layers do better, and what
# another project's type checker accepts and refuses.
#
# Next: [20. Inference](20_inference.ipynb).
