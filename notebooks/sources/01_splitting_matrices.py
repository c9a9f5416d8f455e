# %% [markdown]
# # 1. Splitting matrices, the right and the wrong way
#
# A large language model is, for the most part, matrix products. The matrices of the largest models do not fit into one
# device, so they are split into shards. There are several ways to split a product, and all are correct. But the
# function *between* two products decides which of them are cheap, and one of them is a trap that raises no error.
#
# **You will** split a product in three ways and see what each costs; combine two of them so that nothing has to be sent
# in between; fall into the trap; and run the same thing on processes that really hold one shard each.
#
# **You need** NumPy and matrix products. No paper, no GPU, no MPI. About 30 minutes.
#
# The first cell is the same in all walkthroughs. It does two things: figures are displayed automatically, and `%%ranks`
# runs a cell on several processes (we come to that at the end).

# %%
# %load_ext shardlab.notebook
import numpy as np

from shardlab.notebook.pictures.shards import by_columns, by_rows, draw_matrices, partial_sums, whole
from shardlab.notebook.predictions import reveal

random = np.random.default_rng(1)

# %% [markdown]
# ## A product, split in three ways
#
# $Y = X A$. $X$ has a row for each token of a text (a word, or a part of one) and a column for each of $h$ numbers that
# describe the token; $A$ is what the model has learnt. We have $t$ workers. Each is called a *rank* and has a number,
# from 0 to $t - 1$; the piece of a matrix that one rank holds is its *shard*.
#
# **By rows of X.** Each rank takes some of the tokens, and needs all of $A$. Grey matrices are needed whole on every
# rank:

# %%
rows, h, columns, t = 6, 4, 16, 4

draw_matrices([by_rows("X", rows, h, t), "x", whole("A", h, columns), "=", by_rows("Y", rows, columns, t)], t,
              "by rows of X")

# %% [markdown]
# That is *data parallelism*, and it is good as long as $A$ fits. It does not make a rank's part of $A$ any smaller, so
# it cannot be the answer to our question. (Six tokens do not divide by four ranks: two ranks have two tokens, two have
# one. Try other numbers in the cell above.)
#
# **By columns of A.** Column $j$ of $Y$ is $X$ times column $j$ of $A$, and needs no other column. So a rank with some
# columns of $A$ computes just those columns of $Y$, and nobody sends anything:

# %%
draw_matrices([whole("X", rows, h), "x", by_columns("A", h, columns, t), "=", by_columns("Y", rows, columns, t)], t,
              "by columns of A")

# %% [markdown]
# **By rows of A.** A row of $A$ meets a column of $X$. A rank with some rows of $A$ needs only the columns of $X$ that
# belong to them. Its result is as large as $Y$, but it is only one summand of $Y$:
#
# $$X A = X_0 A_0 + X_1 A_1 + X_2 A_2 + X_3 A_3$$
#
# The picture shows such *partial sums* as sheets behind one another. To get $Y$, the ranks must add them up.

# %%
draw_matrices([by_columns("X", rows, h, t), "x", by_rows("A", h, columns, t), "=",
               partial_sums("Y", rows, columns, "4 partial sums")], t, "by rows of A")

# %% [markdown]
# Are these claims true? We hold all ranks' shards in lists, one element for each rank, and compare. `np.array_split`
# splits as in the pictures: if the numbers do not divide, the first ranks have one more.

# %%
X, A = random.normal(size=(rows, h)), random.normal(size=(h, columns))
Y = X @ A

rows_of_Y = [x @ A for x in np.array_split(X, t, axis=0)]
columns_of_Y = [X @ a for a in np.array_split(A, t, axis=1)]
partial = [x @ a for x, a in zip(np.array_split(X, t, axis=1), np.array_split(A, t, axis=0))]

print("by rows of X:    joined as rows    ", np.allclose(np.concatenate(rows_of_Y, axis=0), Y))
print("by columns of A: joined as columns ", np.allclose(np.concatenate(columns_of_Y, axis=1), Y))
print("by rows of A:    added up          ", np.allclose(sum(partial), Y))
print("by rows of A:    rank 0's alone    ", np.allclose(partial[0], Y))

# %% [markdown]
# ## Two products with a nonlinear function between them
#
# The MLP, one half of every layer of a transformer, is
#
# $$Y = \mathrm{GeLU}(X A)\, B.$$
#
# $A$ has four times as many columns as rows, and $B$ four times as many rows as columns. GeLU is a smooth nonlinear
# function, applied to each element by itself. Without it the two products could be replaced by a single one.
#
# We want every rank to hold $1/t$ of $A$ and $1/t$ of $B$. For $A$ there were two ways, by columns and by rows. Which?

# %%
from shardlab.report.drawing import Picture
from reference.ops import gelu

u = np.linspace(-4, 4, 200)
figure = Picture((8.5, 2.6), layout="constrained")
axes = figure.add_subplot()
axes.plot(u, gelu(u)[0], color="#0072B2", linewidth=2, label="GeLU(u)")
axes.plot(u, 2 * gelu(u / 2)[0], "--", color="#EE7733", linewidth=2, label="GeLU(u/2) + GeLU(u/2)")
axes.grid(color="#E4E4E4")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
figure.set_label("Two curves that meet at u = 0. To both sides of it, the sum of two GeLU(u/2) is below GeLU(u).")
figure

# %% [markdown]
# The dashed curve is not the other one: **GeLU of a sum is not the sum of the GeLUs**, not even when the two summands
# are equal. That settles it.
#
# ### The wrong way: rows first
#
# Split $A$ by rows. Each rank has a partial sum of $X A$. Suppose that it applies GeLU to that and goes on:

# %%
B = random.normal(size=(columns, h))
right = gelu(X @ A)[0] @ B

wrong = sum(gelu(z)[0] @ B for z in partial)        # GeLU of partial sums
print("the same?", np.allclose(wrong, right))
print(f"off by as much as {np.abs(wrong - right).max() / np.abs(right).max():.0%} of the largest element")

# %% [markdown]
# Nothing failed, the shapes are right, the numbers have the right size, and a model that computes this *trains*: it is
# just another model. You would find out when you load its weights somewhere else. That is why this project compares
# everything with one process that splits nothing.
#
# It can be repaired: add up *before* GeLU. But then the ranks must send something in the middle of the layer, and it is
# the largest array of all, $4h$ numbers for each token:
#
# **Predict.** $X$ is $[6, 4]$, $A$ is $[4, 16]$, and $B$ is $[16, 4]$, so the ranks now add up arrays of 96 numbers.
# How many would it be if they could add up after $B$ instead?

# %%
guess = ...                # numbers: write yours in place of the dots, then run this cell and the next

# %% tags=["hide-output"]
repaired = gelu(sum(partial))[0] @ B
print("the same?", np.allclose(repaired, right))
assert partial[0].size == 96
reveal(guess, repaired.size, "numbers to add up after B")

# %% [markdown]
# ### The right way: columns first, then rows
#
# Split $A$ by columns. A rank has whole columns of $X A$, so it can apply GeLU to them. Now it has columns of
# $\mathrm{GeLU}(X A)$. And columns on the left are just what splitting $B$ *by rows* needs:

# %%
draw_matrices([whole("X", rows, h), "x", by_columns("A", h, columns, t), "  GeLU →", by_columns("Z", rows, columns, t),
               "x", by_rows("B", columns, h, t), "=", partial_sums("Y", rows, h, "4 partial sums")], t,
              "columns first, then rows")

# %%
shards = list(zip(np.array_split(A, t, axis=1), np.array_split(B, t, axis=0)))     # rank 0's (A, B), rank 1's, ...
sums = [gelu(X @ a)[0] @ b for a, b in shards]
print("the same?", np.allclose(sum(sums), right))

# %% [markdown]
# Between $X$ and the partial sums of $Y$ no rank needs data of another. There is one sum over the ranks, at the end, of
# an array as large as $Y$. If every rank contributes an array, and every rank gets the sum, that is called an
# **all-reduce**. Megatron-LM ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3) is built on this.
#
# What does each way send? With $b$ texts of $s$ tokens, an all-reduce of $N$ numbers over $t$ ranks in a ring costs
# each rank $2N(t-1)/t$ (walkthrough *f and g* and lab 1 say why):
#
# **Predict.** For the 8.3-billion-parameter model of the paper, $b = 8$, $s = 1024$, $h = 3072$, with 2 bytes for a
# number, on 8 ranks. How many MB does each rank send for $Y$, and so for the right way?

# %%
guess = ...                # MB

# %% tags=["hide-output"]
from shardlab.notebook.pictures.charts import draw_bars
from reference.comm.ring import ring_all_reduce

b, s, hidden = 8, 1024, 3072                    # the 8.3-billion-parameter model of the paper
megabytes = 2 / 1e6                             # 16 bits for a number
reveal(guess, megabytes * ring_all_reduce(b * s * hidden, 8), "MB that each rank sends for Y")
draw_bars({"columns, then rows: Y": {"sent": megabytes * ring_all_reduce(b * s * hidden, 8)},
           "rows, add up before GeLU: X A": {"sent": megabytes * ring_all_reduce(b * s * 4 * hidden, 8)}},
          "MB that each of 8 ranks sends in the forward of one MLP", unit=" MB")

# %% [markdown]
# And splitting by rows first costs even more: after GeLU every rank has all of $\mathrm{GeLU}(XA)$, so it holds $t$
# times as much, and splitting $B$ costs another sum.
#
# The biases of the MLP follow the same logic. The bias of $A$ has an element for each *column*, so it is split with the
# columns. The bias of $B$ belongs to $Y$. If every rank adds it to its partial sum, it is added $t$ times. It must be
# added **once, after the sum**. In the textbook, `reference/layers/mlp.py`, that is this line:

# %%
import inspect

from reference.layers import mlp

print(inspect.getsource(mlp.sharded_mlp_forward))

# %% [markdown]
# There `region.enter` is called *f* and `region.leave` is *g*; `g` is our sum. Walkthrough *f and g* is about the two.
#
# ## On real ranks
#
# So far one process held everybody's shards in a list. `%%ranks 4` runs a cell on four processes. Each has its own
# variables, and they can communicate only through `group`. `rank` is a process's own number.
#
# Every rank draws the same matrices (with the same seed), and keeps only its shard. Then it computes its partial sum,
# and `group.all_reduce` adds them up:

# %%
# %%ranks 4
from reference.ops import gelu

random = np.random.default_rng(1)
X, A, B = random.normal(size=(6, 4)), random.normal(size=(4, 16)), random.normal(size=(16, 4))
a, b = np.array_split(A, size, axis=1)[rank], np.array_split(B, size, axis=0)[rank]
partial = gelu(X @ a)[0] @ b
print(f"A {a.shape}, B {b.shape}, partial sum begins {partial[0, :3].round(3)}")

# %%
# %%ranks 4
Y = group.all_reduce(partial.copy(), "mlp output")
print(f"Y begins {Y[0, :3].round(3)}")

# %% [markdown]
# All four have printed the same, so the notebook shows it once. `ranks["Y"]` fetches the variable from all of them:

# %%
print([np.allclose(y, right) for y in ranks["Y"]])

# %% [markdown]
# A rank's *ledger* records what it sends, and every call of a collective must give a reason.
#
# **Predict.** $Y$ is $[6, 4]$, in float64. How many bytes does each of the 4 ranks send for its all-reduce, if it
# runs as a ring?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
Y = group.all_reduce(partial.copy(), "mlp output")
lines = list(group.ledger.totals.items())
if rank == 0:
    for entry, total in group.ledger.totals.items():
        print(entry.operation, "for the", entry.reason, "of", total.elements, entry.dtype, "elements")

# %% tags=["hide-output"]
from mpi_impl.comm.ledger import ring_bytes

sent = [sum(ring_bytes(*line) for line in lines) for lines in ranks["lines"]]
reveal(guess, sent[0], "bytes that each rank sends")
assert len(set(sent)) == 1

# %% [markdown]
# ### What if one rank does not join in?
#
# An all-reduce needs everyone. If one rank does not come, the others wait forever: most hangs of large training runs
# have this cause. Here a cell has a time limit, and shows where every rank was:

# %% tags=["raises-exception"]
# %%ranks 4 --timeout 2
if rank != 2:
    group.all_reduce(partial, "mlp output")

# %% [markdown]
# ## What to take away
#
# | split | a rank holds | it computes | it must send |
# |---|---|---|---|
# | by rows of X | all of A | its rows of Y | nothing |
# | by columns of A | 1/t of A | its columns of Y | nothing, as long as columns are what comes next |
# | by rows of A | 1/t of A | a partial sum of Y | an all-reduce of Y |
#
# - Columns first, then rows: the MLP needs one all-reduce forward.
# - Never apply a nonlinear function to a partial sum.
# - A wrong split raises no error. Compare with what one process computes.
#
# ## Try it
#
# 1. Change `t` to 3 or 5 and run everything again. What in the cells above is still true if the numbers do not divide?
# 2. Replace GeLU by `lambda u: (3 * u, None)` in the wrong way. Why is it right now?
# 3. Which split would you choose for two products with *nothing* between them, $Y = X A B$?
#
# <details><summary>Answer to 2</summary>
#
# `partial` has the four partial sums $X_r A_r$. With a linear function each may go through it by itself:
#
# ```python
# linear = lambda u: (3 * u, None)
# wrong = sum(linear(z)[0] @ B for z in partial)
# print(np.allclose(wrong, linear(X @ A)[0] @ B))      # True
# ```
#
# $\sum_r 3 (X_r A_r) = 3 \sum_r X_r A_r$: a linear function of a sum is the sum of its values. GeLU fails only because
# it is not linear. With `3 * u + 1` it prints False: the 1 is added once on each rank, four times in all. That is the
# mistake of a bias that every rank adds.
#
# </details>
#
# Next: [2. f and g, and why they are adjoint](02_f_and_g.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m shardlab.demos.mlp`.
