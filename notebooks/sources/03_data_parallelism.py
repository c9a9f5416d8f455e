# %% [markdown]
# # 3. Data parallelism: copies of a model that learn together
#
# In the first two walkthroughs the ranks held one layer together. They can also hold a copy of the whole model each,
# and divide the *data*. That is the oldest way to train on many devices, and still the first to try: it needs one
# kind of partial sum, the gradient, and no change inside the model.
#
# **You will** distribute a batch over four copies of a model and get the gradient of one process; get it wrong in a way
# that raises no error; see how gradients are stored in memory, and sent; train on four real ranks, and see their loss
# fall on the curve of one process; and leave the sum out, and see that the loss falls all the same.
#
# **You need** walkthroughs [*Splitting matrices*](01_splitting_matrices.ipynb) (rank, partial sum, all-reduce) and
# [*f and g*](02_f_and_g.ipynb) (its cost), and an idea of how a network is trained. The model is a small GPT, which
# this walkthrough uses as a function with parameters: what is inside comes in the next ones. About 30 minutes.

# %%
# %load_ext shardlab.notebook
import numpy as np

from shardlab.demos.tiny_gpt import OPTIMIZER, SEED, global_batch, tiny_gpt
from shardlab.notebook.pictures.charts import draw_bars, draw_curves
from shardlab.notebook.pictures.shards import Matrix, draw_matrices, partial_sums
from shardlab.notebook.predictions import reveal
from reference.params import leaves

# %% [markdown]
# ## A batch, distributed
#
# Training goes step by step. A step takes a *batch* of $B$ samples (texts, here). The model predicts each next token,
# and the *loss* says how wrong it was, averaged over all tokens of the batch. The *gradient* has a number for each
# parameter of the model: how the loss changes with it. The *optimizer* then moves each parameter a little.
#
# A *replica* is a copy of the whole model. With $d$ replicas each takes some of the samples. If its samples do not fit
# into memory together, it takes them in $m$ *microbatches* of $b$ samples, one after another, so that $B = m\,d\,b$. A
# colour for each replica; a row of the batch is a sample:

# %%
from reference.parallel.data_parallel import all_reduce_trees, data_parallel_gradients, samples_of

d, b, m = 4, 1, 2
tokens, targets = global_batch(step=0, samples=m * d * b)
B, s = tokens.shape

owners = np.zeros((B, s), int)
for replica in range(d):
    for k in range(m):
        owners[samples_of(replica, k, d, b)] = replica

draw_matrices([Matrix("batch", owners), "forward, backward  →", partial_sums("gradient", 8, 10, "4 partial sums")], d,
              "data parallelism")

# %% [markdown]
# The loss is a sum over samples, divided by their number. So its gradient is such a sum, too, and a replica computes a
# *partial sum* of it from its own samples. We know what to do with those: an all-reduce. It is right if the division
# happens in the right place. **Each replica divides by the size of the whole batch, $1/(B s)$, and then the gradients
# are added up.**
#
# `reference/parallel/data_parallel.py` is that rule, with all replicas in one process. Here it is with a tiny GPT of
# two layers, compared with one process without replicas:

# %%
from reference.batches import GPTBatch
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors
from reference.params import initialize
from reference.training.trainer import loss_and_gradients

model = tiny_gpt(2)
params = initialize(gpt_tensors(model), SEED, "float64")
loss, gradient = loss_and_gradients(GPTBatch(tokens, targets), params, model)

def apart(found, expected):
    """Return the largest difference of two trees of tensors, relative to the largest element."""
    pairs = [(x, y) for (_, x), (_, y) in zip(leaves(found), leaves(expected))]
    return float(max(abs(x - y).max() for x, y in pairs) / max(abs(y).max() for _, y in pairs))

for d, b in (1, 8), (2, 2), (4, 1), (8, 1):
    found, everyone = data_parallel_gradients(tokens, targets, params, model, d, b)
    print(f"d = {d}, m = {B // (d * b)}, b = {b}: same loss {abs(found - loss) < 1e-12},",
          f"same gradient on every replica {all(apart(one, gradient) < 1e-12 for one in everyone)}")

# %% [markdown]
# ### The wrong way: an average of averages
#
# It is tempting to let each replica compute the mean loss of *its own* samples, as if it were alone, and then to
# average the gradients over the replicas. As long as all replicas have the same number of tokens, that is the same
# number.
#
# They often are not. Suppose that four replicas have a text each, but the last one is short: only one of its tokens
# counts, and the rest is padding. (Or only answers count, and not the questions. Or the last batch of the data does not
# divide.) Two ways to give each token a weight, by the count of all tokens and by the count of the replica's own:

# %%
counts = np.array([6, 6, 6, 1])                             # tokens that count, on each of four replicas
mask = (np.arange(s) < counts[:, None]).astype(float)       # [4, s]

def gradient_of(samples, weights):
    """Return the gradient of the weighted sum of these samples' losses."""
    _, cache = gpt_forward(tokens[samples], params, model, targets[samples])
    return gpt_backward(weights, params, cache, model)[1]

def summed(weights):
    """Return the sum of the gradients of four replicas with one sample each."""
    return all_reduce_trees([gradient_of([r], weights[r:r + 1]) for r in range(4)])[0]

right = mask / mask.sum()                                   # by the global count
wrong = mask / mask.sum(axis=1, keepdims=True) / 4          # each by its own count, then averaged
one_process = gradient_of([0, 1, 2, 3], right)

print("by the global count: the same?", apart(summed(right), one_process) < 1e-12)
print(f"by its own count: off by {apart(summed(wrong), one_process):.0%} of the largest element")

# %% [markdown]
# **Predict.** Done wrong, how many tokens of replica 0 together weigh as much as the only token of replica 3?

# %%
guess = ...                # tokens

# %% tags=["hide-output"]
reveal(guess, wrong[3, 0] / wrong[0, 0], "tokens weigh as much as the one of replica 3")
draw_bars({"each token, anywhere": {"by the global count": 100 * right[0, 0]},
           "each token of replicas 0 to 2": {"each by its own count": 100 * wrong[0, 0]},
           "the one token of replica 3": {"each by its own count": 100 * wrong[3, 0]}},
          "% of the loss that one token contributes", unit=" %")

# %% [markdown]
# The one token of the short text counts as much as six others. No error, no strange loss: only a model that learns most
# from its shortest texts. The same happens with microbatches if each is averaged by itself. So compute the weight of
# the *global* batch first, divide by it immediately, and from there on only add.
#
# ## The flat buffer, and its buckets
#
# A model has many tensors, and a message for each would be many small messages, each with a fixed cost. So all
# gradients are stored in **one** array, the *flat buffer*, and a tensor is a view of a part of it. Then sending
# gradients is sending slices of one array.
#
# The buffer is divided into *buckets*, and each bucket is sent as one message: a run of whole layers or tables with at
# least `bucket_size` elements, so most have more. Tensors are stored in the order in which the backward pass finishes
# them, **last layer first**. So the first bucket is complete, and on its way, while the backward still works on the
# layers before.
#
# `reference/parallel/layout.py` computes it. Tensors are alternately dark and light, units (a layer, a table) in blue
# and sand:

# %%
from shardlab.notebook.pictures.buffers import draw_layout
from reference.parallel.layout import Layout

layout = Layout(gpt_tensors(model), bucket_size=900)
print(f"{len(layout.segments)} tensors of {layout.size:,} elements in {len(layout.buckets)} buckets")
draw_layout(layout, "the flat buffer of the tiny GPT")

# %% [markdown]
# A value written to a tensor is in the buffer:

# %%
flat = np.zeros(layout.size)
layout.views(flat).output[...] = 1.0
print("elements of the flat buffer that are 1 now:", int(flat.sum()), "= V h =", model.vocab_size * model.hidden_size)

# %% [markdown]
# ## On real ranks
#
# Four processes, a replica each. All draw the same parameters (a function of the seed), take their own sample of the
# same batch, and run forward and backward. Nothing has been sent yet, and the gradients differ:

# %%
# %%ranks 4
from shardlab.demos.tiny_gpt import SEED, global_batch, tiny_gpt
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import Layout
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors
from reference.params import assign, initialize, tree_map

model = tiny_gpt(2)
layout = Layout(gpt_tensors(model), bucket_size=900)
params = initialize(gpt_tensors(model), SEED, "float64")
tokens, targets = global_batch(step=0, samples=size)
mine = samples_of(rank, 0, size, 1)

losses, cache = gpt_forward(tokens[mine], params, model, targets[mine])
_, grads = gpt_backward(np.full_like(losses, 1 / tokens.size), params, cache, model)     # the global batch's size
flat = np.zeros(layout.size)
tree_map(assign, layout.views(flat), grads)
print(f"sample {mine.start}, gradient begins {flat[:4].round(4)}")

# %% [markdown]
# **Predict.** The buffer has 2,000 numbers of 8 bytes. How many bytes does each of the four ranks send, if they add up
# their gradients in a ring (walkthrough *f and g*)?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes

summed = flat.copy()
for bucket in layout.buckets:
    group.all_reduce(summed[bucket.slice], "gradients")
print(f"sum of the gradients begins {summed[:4].round(4)}")
sent = sum(ring_bytes(entry, total) for entry, total in group.ledger.totals.items())

# %% tags=["hide-output"]
assert layout.size == 2000
reveal(guess, ranks["sent"][0], "bytes that a rank sends")

# %% [markdown]
# Each rank's sum, tensor by tensor, compared with the gradient that one process computes of all four samples:

# %%
tokens, targets = global_batch(step=0, samples=4)
loss, gradient = loss_and_gradients(GPTBatch(tokens, targets), params, model)
print([apart(layout.views(found), gradient) < 1e-12 for found in ranks["summed"]])

# %% [markdown]
# That is data parallelism. How much it sends does not depend on the number of samples: with more of them a rank
# computes longer for the same $2\,\Psi\,\frac{d-1}{d}$ numbers ($\Psi$, read: psi, is the number of parameters). So
# large batches hide the sum best.
#
# In `mpi_impl/parallel/data_parallel.py` the buckets are sent automatically: each part of the
# backward reports that it has contributed to a unit, and when a bucket is complete its sum begins,
# without waiting for it. (`post_all_reduce` begins one and returns a handle, which the end of the step waits for.)

# %%
import inspect

from mpi_impl.parallel.data_parallel import Gradients

print(inspect.getsource(Gradients.contributed), inspect.getsource(Gradients.counted), sep="\n")

# %% [markdown]
# ## A curve that falls
#
# Now a loop around it. A step of training is: gradients of the own sample, their sum, and an update of all weights,
# which each rank computes for itself. The update is Adam's: it looks at each gradient and at averages of the past
# ones, `m` and `v`. The same sum and the same rule from the same weights give the same weights again. So the copies
# stay equal, though nobody ever sends a weight.
#
# The text is easy: from one number count on, modulo 12. The second time, one line is missing.

# %%
# %%ranks 4
from shardlab.demos.tiny_gpt import OPTIMIZER
from reference.optimizers.adam import adam_update

def train(add_up, steps=30):
    """Train this rank's copy. Return the loss of its sample in each step, and the weights at the end, [parameters]."""
    weights, m, v = np.zeros((3, layout.size))
    tree_map(assign, layout.views(weights), params)             # the same on all ranks
    losses = []
    for step in range(steps):
        tokens, targets = global_batch(step, samples=size)
        model_weights = layout.views(weights)
        loss, cache = gpt_forward(tokens[mine], model_weights, model, targets[mine])
        _, grads = gpt_backward(np.full_like(loss, 1 / tokens.size), model_weights, cache, model)
        gradient = np.zeros(layout.size)
        tree_map(assign, layout.views(gradient), grads)
        if add_up:
            group.all_reduce(gradient, "gradients")
        adam_update(weights, gradient, m, v, step + 1, OPTIMIZER.lr, False, OPTIMIZER)
        losses.append(loss.mean())
    return losses, weights

with_sum, without_sum = train(add_up=True), train(add_up=False)

# %% [markdown]
# One process takes all four samples in each step. Its loss is the mean of the four ranks':

# %%
from dataclasses import replace

from shardlab.demos.tiny_gpt import textbook_of

textbook = textbook_of(model, replace(OPTIMIZER, clip_grad=0, weight_decay=0))      # Adam and nothing else
losses = [textbook.step(GPTBatch(*global_batch(step, 4)))[0] for step in range(30)]
mean = {name: np.mean([one[0] for one in ranks[name]], axis=0) for name in ("with_sum", "without_sum")}
print("the same losses as in one process:", np.allclose(mean["with_sum"], losses, rtol=1e-12, atol=0))
draw_curves({"one process": losses, "four ranks": mean["with_sum"], "without the sum": mean["without_sum"]}, "step",
            "loss", "30 steps of training")

# %% [markdown]
# The two curves lie on one another. The third is a run whose gradients nobody adds up: no error, and a loss
# that falls. What is wrong is not in the loss.
#
# **Predict.** Without the sum, how many different models do the four ranks have after 30 steps? (1: all weights are the
# same, in every bit.)

# %%
guess = ...                # different models

# %% tags=["hide-output"]
copies = {name: len({one[1].tobytes() for one in ranks[name]}) for name in ("with_sum", "without_sum")}
largest = [abs(one[1] - ranks["without_sum"][0][1]).max() for one in ranks["without_sum"]]
print(f"with the sum: {copies['with_sum']}; without it, weights differ from rank 0's by up to {max(largest):.2f}")
reveal(guess, copies["without_sum"], "different models without the sum")

# %% [markdown]
# Not even a last digit differs, because every rank gets the sum that was made in the same order. It is worth a test in
# every program that trains replicas: compare the weights' bits across ranks once in a while (Megatron-LM has
# `--check-weight-hash-across-dp-replicas-interval` for it).
#
# ## What to take away
#
# - With $d$ replicas a batch of $B$ samples is taken in $m$ microbatches of $b$ samples: $B = m\,d\,b$.
# - A replica's gradient is a partial sum. Divide by the weight of the *global* batch, then only add. An average of
#   averages is wrong as soon as the replicas' weights differ.
# - Gradients are stored in one flat buffer, last layer first, and sent in buckets, while the backward still computes.
# - A rank sends $2\,\Psi\,\frac{d-1}{d}$ numbers in a step, for any number of samples.
# - Every rank holds all parameters, gradients and moments. That wastes memory, and walkthrough *ZeRO* removes the
#   waste.
#
# ## Try it
#
# 1. Let the replicas begin from different weights: give `initialize` the seed `SEED + rank` in the first cell on ranks.
#    Which checks fail? After the sum all ranks have the same gradient. Why do the replicas still never come together?
# 2. Set `counts` to `[6, 6, 6, 6]`. How large is the error of the wrong way now? Then `[3, 3, 3, 3]`?
#
# <details><summary>Answer</summary>
#
# Both are right, up to rounding: if all replicas have the same count, a mean of means is the mean. That is why the
# mistake lives long. A test with texts of equal length cannot see it.
# </details>
#
# 3. Change `bucket_size` in the picture of the flat buffer to 1, and to 10,000. What is good about each?
# 4. Let each rank divide by its own `tokens[mine].size`, and add up all the same. By what factor is the gradient wrong?
#    The loss falls nearly as before. Why does Adam hide it, and what would plain gradient descent do?
#
# Next: [4. Heads: how attention is sharded](04_attention_heads.ipynb). Those who know PyTorch may look at
# [17. A bridge to PyTorch](17_a_bridge_to_pytorch.ipynb) now.
