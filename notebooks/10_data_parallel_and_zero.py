# %% [markdown]
# # 10. Data parallelism and ZeRO
#
# So far the ranks held one model together. They can also hold a copy of it each, and divide the *data*. That is the
# oldest way to train on many devices and the simplest, and it wastes memory: every rank holds the same. ZeRO removes
# that waste.
#
# **You will** distribute a batch over four copies of a model and get the gradient of one process; get it wrong in a way
# that raises no error; see how gradients are stored in memory; take an all-reduce apart; train with ZeRO's stages,
# 0 to 3, on real ranks, counting what each rank holds and sends; and meet an optimizer that cannot be sharded anywhere.
#
# **You need** walkthrough 1 (rank, shard, partial sum, all-reduce), and an idea of how a network is trained. About 60
# minutes.

# %%
# %load_ext mpi_impl.notebook
import numpy as np

from mpi_impl.demos.tiny_gpt import OPTIMIZER, SEED, global_batch, tiny_gpt
from mpi_impl.notebook.pictures.charts import draw_bars, draw_curves
from mpi_impl.notebook.pictures.shards import Matrix, by_columns, draw_matrices, partial_sums, whole
from mpi_impl.notebook.predictions import reveal
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
# **Predict.** In the wrong way, as many tokens of replicas 0 to 2 as how many count as much as the one token of
# replica 3?

# %%
guess = ...                # tokens

# %% tags=["hide-output"]
reveal(guess, wrong[3, 0] / wrong[0, 0], "tokens count as much as the one of replica 3")
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
# For ZeRO each bucket is also divided into equal parts, one for each replica, without regard to tensors: rank $i$
# *owns* the $i$-th part of each bucket. `reference/parallel/layout.py` computes all this. Above are the tensors,
# alternately dark and light (units in blue and sand); below are their owners:

# %%
from mpi_impl.notebook.pictures.buffers import draw_layout
from reference.parallel.layout import Layout

layout = Layout(gpt_tensors(model), bucket_size=900, parts=4)
print(f"{len(layout.segments)} tensors of {layout.size:,} elements in {len(layout.buckets)} buckets")
draw_layout(layout, "the flat buffer of the tiny GPT, for 4 replicas")

# %% [markdown]
# A part may begin or end in the middle of a tensor: rank 1 has the end of one matrix and the beginning of the next. Its
# own parts together are its *shard*. (If a bucket does not divide, as by 5 replicas here, it is padded with zeros.) A
# value written to a tensor is in the buffer:

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
from mpi_impl.demos.tiny_gpt import SEED, global_batch, tiny_gpt
from reference.parallel.data_parallel import samples_of
from reference.parallel.layout import Layout
from reference.models.gpt import gpt_backward, gpt_forward, gpt_tensors
from reference.params import assign, initialize, tree_map

model = tiny_gpt(2)
layout = Layout(gpt_tensors(model), bucket_size=900, parts=size)
params = initialize(gpt_tensors(model), SEED, "float64")
tokens, targets = global_batch(step=0, samples=size)
mine = samples_of(rank, 0, size, 1)

losses, cache = gpt_forward(tokens[mine], params, model, targets[mine])
_, grads = gpt_backward(np.full_like(losses, 1 / tokens.size), params, cache, model)     # the global batch's size
flat = np.zeros(layout.size)
tree_map(assign, layout.views(flat), grads)
print(f"sample {mine.start}, gradient begins {flat[:4].round(4)}")

# %%
# %%ranks 4
summed = flat.copy()
for bucket in layout.buckets:
    group.all_reduce(summed[bucket.slice], "gradients")
print(f"sum of the gradients begins {summed[:4].round(4)}")

# %%
tokens, targets = global_batch(step=0, samples=4)
loss, gradient = loss_and_gradients(GPTBatch(tokens, targets), params, model)
print([apart(layout.views(found), gradient) < 1e-12 for found in ranks["summed"]])

# %% [markdown]
# That is data parallelism. In `mpi_impl/parallel/data_parallel.py` the buckets are sent automatically: each part of the
# backward reports that it has contributed to a unit (a layer, a table), and when a bucket is complete its sum begins,
# without waiting for it. (`post_all_reduce` begins one and returns a handle, which the end of the step waits for.)

# %%
import inspect

from mpi_impl.parallel.data_parallel import Gradients

print(inspect.getsource(Gradients.contributed), inspect.getsource(Gradients.counted), sep="\n")

# %% [markdown]
# ## An all-reduce is two things
#
# Let rank $i$ be responsible for the $i$-th part of the buffer. In a **reduce-scatter** every rank sends rank $i$ the
# $i$-th part of its own gradients, and rank $i$ adds them up: each rank has one part of the sum. In an **all-gather**
# every rank sends its part to all: every rank has the whole sum. One after the other they are an all-reduce.

# %%
draw_matrices([partial_sums("gradients", 4, 12, "4 partial sums"), "reduce-scatter  →",
               by_columns("the sum", 4, 12, 4, "each rank has a part"), "all-gather  →",
               whole("the sum", 4, 12, "every rank has all")], 4, "an all-reduce, in two halves")

# %% [markdown]
# **Predict.** The buffer has 2,000 numbers of 8 bytes. How many bytes does each of the four ranks send for the
# all-reduce of all of it?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
from mpi_impl.comm.ledger import ring_bytes

for bucket in layout.buckets:
    group.all_reduce(flat[bucket.slice].copy(), "both halves")
    part = group.reduce_scatter(flat[bucket.slice], 0, "first half")
    both = group.all_gather(part, 0, "second half")
    assert np.allclose(both, summed[bucket.slice], rtol=0, atol=1e-12)
sent_by_halves = {entry.operation: ring_bytes(entry, total) for entry, total in group.ledger.totals.items()}
for entry, total in group.ledger.totals.items():        # the ledger of this cell
    print(f"{entry.operation:14} {entry.reason:11} {ring_bytes(entry, total):6,.0f} bytes that a rank sends")

# %% tags=["hide-output"]
assert layout.size == 2000
reveal(guess, ranks["sent_by_halves"][0]["all_reduce"], "bytes that a rank sends for the all-reduce")

# %% [markdown]
# Each half costs a rank $\frac{d-1}{d}$ of the buffer, if the ranks form a ring: in each of $d - 1$ rounds a rank sends
# one part, $\frac{1}{d}$ of the buffer, to its neighbour. (The paper of ZeRO writes $N_d$ for our $d$.) Two halves,
# $2\,\Psi\,\frac{d-1}{d}$ numbers for $\Psi$ parameters (read: psi): that is the cost of an
# all-reduce.
#
# ## The idea of ZeRO
#
# After the all-reduce all ranks hold the same gradients, and all do the same: Adam updates all parameters, on each
# rank, in the same way. For that each holds Adam's two *moments* of every parameter, averages of past gradients and of
# their squares. Only Adam needs them. And Adam treats each element by itself. So its work can be divided anywhere:

# %%
from reference.optimizer import adam_update

random = np.random.default_rng(1)
weight, grad, m1, v1 = random.normal(size=(4, 1000))
together, parts = [(weight.copy(), grad, m1.copy(), v1**2) for _ in range(2)]

adam_update(*together, step=3, lr=0.01, decay=True, c=OPTIMIZER)
for part in np.array_split(np.arange(1000), 4):                      # rank 0's, rank 1's, ...
    part = slice(part[0], part[-1] + 1)
    adam_update(*(x[part] for x in parts), step=3, lr=0.01, decay=True, c=OPTIMIZER)
print("the same, bit by bit:", np.array_equal(together[0], parts[0]))

# %% [markdown]
# So put Adam *between the two halves*. After the reduce-scatter a rank has the sum of its part of the gradients. It
# updates its part of the parameters. Then the all-gather gives every rank the updated **parameters**, instead of the
# gradients. Both are $\Psi$ numbers, so **no more is sent**, and each rank keeps the moments of its own part only.
#
# That is stage 1 of ZeRO ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 5). Each stage shards
# one thing more:
#
# | stage | what else is sharded | how it works |
# |---|---|---|
# | 0 | nothing | gradients all-reduced, every rank updates everything |
# | 1 | optimizer states | gradients reduce-scattered, the own part updated, parameters all-gathered |
# | 2 | gradients | reduce-scatter after every microbatch; only the own part of the sum is kept |
# | 3 | parameters | a layer is gathered just before it is used, forward and backward, and then released |
#
# ### A step, event by event
#
# Choose a stage below, and press *next* (or click on a slider and use the arrow keys). The four ranks train a GPT of
# three blocks, with one sample each: the textbook has taken this step, and after each event we have compared every
# element of every rank with one process. A column is a rank. In it are three kinds of arrays, as wide as their elements
# have bytes: a parameter and its gradient take 2 each, in 16 bits; the optimizer states take 12, in 32 bits: two
# moments, and a more exact copy of the parameter (walkthrough 11 says why). A row is a *unit*, a block or a table, and
# has a quarter for each rank. So what is not grey is memory:

# %%
from mpi_impl.notebook.sliders import play_zero

play_zero(stage=1)

# %% [markdown]
# - Stage 1, after the reduce-scatter: each rank has the sum of its own quarters only. The rest are hatched: they are
#   still the gradients of its own sample, and nobody reads them.
# - Stage 2: a whole gradient lives from the backward of its unit to the reduce-scatter after it.
# - Stage 3: a unit's parameters are whole while it computes, forward and again backward. There is no all-gather at the
#   end: the next step's forward does it.
#
# **Predict.** At stage 0 a rank holds 43,136 bytes all the time. How many does it hold at stage 3, at most?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
from mpi_impl.notebook.sliders.zero import play_step

helds = [held for _, held, _, _ in play_step(3)]
print(f"between the events: {min(helds):,.0f} bytes, a quarter: {min(helds) == 43_136 / 4}")
reveal(guess, max(helds), "bytes that a rank holds at stage 3, at most")

# %% [markdown]
# Figure 1 of the paper shows what that means for a large model: 7.5 billion parameters on 64 devices.
# `reference/parallel/model_states.py` has the formulas.
#
# **Predict.** Without ZeRO, 7.5 billion parameters take 120 GB on each device. How many with stage 1, on 64?

# %%
guess = ...                # GB

# %% tags=["hide-output"]
from mpi_impl.report.charts import MEMORY
from reference.parallel.model_states import model_states

psi, d = 7_500_000_000, 64

def gigabytes(stage, n):
    return {kind: size / 1e9 for kind, size in model_states(psi, n, stage)._asdict().items()}

totals = [sum(gigabytes(stage, d).values()) for stage in range(4)]
assert [f"{total:.3g}" for total in totals] == ["120", "31.4", "16.6", "1.88"]
assert np.allclose([sum(gigabytes(stage, 10**9).values()) for stage in (1, 2)], [30, 15])    # what is replicated
reveal(guess, totals[1], "GB on each device with stage 1")
draw_bars({f"stage {stage}": gigabytes(stage, d) for stage in range(4)}, "GB on each of 64 devices", unit=" GB",
          title="model states of 7.5 billion parameters", colors=MEMORY)

# %% [markdown]
# Stages 1 and 2 cannot go below what is replicated: 30 and 15 GB, for any number of devices. Stage 3 has no such floor:

# %%
from matplotlib.figure import Figure

from mpi_impl.notebook.pictures.shards import OWNERS
from mpi_impl.report.charts import finish

devices = [2**k for k in range(11)]
figure = Figure((8.5, 3.4), layout="constrained")
axes = figure.add_subplot(xscale="log", yscale="log", xticks=devices, xticklabels=devices, ylabel="GB on each")
for stage, style in enumerate(("-", "--", "-.", ":")):
    axes.plot(devices, [sum(gigabytes(stage, n).values()) for n in devices], style, color=OWNERS[stage], linewidth=2.5,
              label=f"stage {stage}")
axes.minorticks_off()
axes.legend(frameon=False, loc="lower left")
finish(axes, "devices, each a replica", "the same model on more and more devices", "both")
figure

# %% [markdown]
# ## Stages 0 to 3, on real ranks
#
# `Trainer` is the machine's: it trains a GPT as configured. We train the same model at each stage for a few steps, and
# look at the losses, at the weights, at the bytes that a rank holds from step to step, and at the numbers that it sends
# for gradients and parameters. All is in float64 here: 8 bytes for a parameter, 8 for its gradient, 16 for its moments,
# and no copy.

# %%
# %%ranks 4
from mpi_impl.comm.group import Group, Instruments
from mpi_impl.demos.tiny_gpt import OPTIMIZER, share_of, training_on
from mpi_impl.demos.zero import sent
from reference.config import ParallelConfig
from reference.params import leaves

def train(stage, m=1, layers=2, steps=8, offload=False, optimizer=OPTIMIZER):
    parallel = ParallelConfig(data_parallel_size=size, zero_stage=stage, ddp_bucket_size=900, cpu_offload=offload,
                              whole_matrices=optimizer.muon)
    apart = Group(group.comm, group.name, Instruments())               # with a ledger of its own
    with training_on(apart, tiny_gpt(layers), parallel, optimizer) as trainer:
        losses = []
        for step in range(steps):
            tokens, targets = global_batch(step, m * size)
            losses.append(trainer.step(share_of(trainer, tokens, targets, b=1), len(tokens)).loss)
        weights = dict(leaves(trainer.state.layout.views(trainer.state.whole(trainer.state.parameters.own))))
        return {"losses": losses, "held": trainer.held(), "psi": trainer.state.layout.size,
                "sent": sent(trainer.ledger) / steps, "weights": weights}

stages = [train(stage) for stage in range(4)]
for stage, found in enumerate(stages):
    print(f"stage {stage}: losses {np.round(found['losses'], 3)}")

# %% [markdown]
# The same losses on all ranks, at all stages. And in one process, from the textbook? And are the weights the same?

# %%
from mpi_impl.demos.tiny_gpt import textbook_of

textbook = textbook_of(model)
losses = [textbook.step(GPTBatch(*global_batch(step, 4)))[0] for step in range(8)]
expected = dict(leaves(textbook.params))
for stage in range(4):
    found = [everyone[stage] for everyone in ranks["stages"]]
    same_losses = all(np.allclose(one["losses"], losses, rtol=1e-12, atol=0) for one in found)
    same_weights = all(abs(one["weights"][name] - x).max() < 1e-10 for one in found for name, x in expected.items())
    print(f"stage {stage}: same losses {same_losses}, same weights {same_weights}")

# %%
found = ranks["stages"][0]
draw_curves({"one process": losses} | {f"stage {stage}": one["losses"] for stage, one in enumerate(found)}, "step",
            "loss", "five curves over one another")

# %% [markdown]
# What does rank 0 hold? The trainer counts the bytes of its arrays, and they equal the formula:

# %%
print([np.allclose(one["held"][:3], model_states(one["psi"], 4 if stage else 1, stage, 8, 8, 16))
       for stage, one in enumerate(found)])
kinds = "parameters", "gradients", "optimizer"
draw_bars({f"stage {stage}": {kind: getattr(one["held"], kind) / 1000 for kind in kinds}
           for stage, one in enumerate(found)}, "kB on rank 0, of 4, measured", unit=" kB", colors=MEMORY)

# %% [markdown]
# ### What is sent
#
# With one microbatch a step, $m = 1$, and in units of $\Psi \frac{d-1}{d}$: stages 0, 1 and 2 send 2. Stage 3 sends 3:
# parameters gathered for the forward, gathered again for the backward (since they were released), and gradients
# reduce-scattered (section 7 of the paper).
#
# More microbatches have a price that the paper, which assumes one, does not show. Stage 2 keeps no whole gradients, so
# it must reduce-scatter after *every* microbatch: $m + 1$. Stage 3 gathers for every microbatch, too: $3m$.

# %%
# %%ranks 4
four = [train(stage, m=4, steps=2) for stage in range(4)]

# %%
rows = {}
for m, name in (1, "stages"), (4, "four"):
    for stage, one in enumerate(ranks[name][0]):
        rows[f"m = {m}, stage {stage}"] = {f"m = {m}": one["sent"] / (one["psi"] * 3 / 4)}
draw_bars(rows, "numbers that rank 0 sent in a step, of Ψ(d-1)/d, from its ledger")

# %% [markdown]
# With $m = 1$ stages 0 to 2 are 2, 2, 2 to the last element, and stage 3 is a little below 3. The difference is the
# tables of tokens and positions: the *backward* of looking up a row needs no table, so they are gathered only once. For
# a real model, where the tables are a small part, it is 3.

# %%
from reference.costs.volumes import data_parallel_traffic

for m, name in (1, "stages"), (4, "four"):
    for stage, one in enumerate(ranks[name][0]):
        tables = m * sum(x.size for _, x in leaves(params.embedding)) * 3 / 4 if stage == 3 else 0
        formula = data_parallel_traffic(one["psi"], 4, stage, m) - tables
        print(f"m = {m}, stage {stage}: as the formula says: {abs(one['sent'] - formula) < 1e-6}")

# %% [markdown]
# ### Stage 3: a layer is whole while it is used
#
# In stage 3 a layer must be whole while it is used, and the next one is on its way meanwhile. So besides its shard a
# rank holds about two layers, whatever their number. This is the loop (`prefetch` begins to gather, `materialized`
# waits for it, and releases it afterwards):

# %%
from mpi_impl.models.units import in_turn

print(inspect.getsource(in_turn))

# %% [markdown]
# **Predict.** With 2 layers at most 13,952 bytes are gathered at any time. How many with 8 layers, which have 57,856
# bytes of parameters?

# %%
guess = ...                # bytes

# %% tags=["hide-output"]
# %%ranks 4
depths = {layers: train(3, layers=layers, steps=1) for layers in (2, 4, 8)}
for layers, found in depths.items():
    held = found["held"]
    print(f"{layers} layers: {8 * found['psi']:6,} bytes of parameters in all, {held.parameters:6,} kept here, "
          f"{held.gathered:6,} gathered at any time, at most")

# %% tags=["hide-output"]
assert ranks["depths"][0][2]["held"].gathered == 13_952 and 8 * ranks["depths"][0][8]["psi"] == 57_856
reveal(guess, ranks["depths"][0][8]["held"].gathered, "bytes gathered at any time, with 8 layers")

# %% [markdown]
# ### FSDP: stage 3 as a wrapper
#
# PyTorch's FSDP does the same without knowing the model: it wraps any layers. The textbook has it in a page
# (`reference/parallel/fsdp.py`). Here are three linear layers, 8-4, 4-16 and 16-4, on 4 ranks, first as DDP, then fully
# sharded. `docs/fsdp.md` says where PyTorch's arguments are in this project.

# %%
from reference import ops
from reference.parallel.fsdp import AnyLayer, FullySharded


def linear_layer(n, m):
    """Return a linear layer with random numbers, for the wrapper."""
    def backward(dy, p, x):
        dx, dw, db = ops.linear_backward(dy, x, p["w"])
        return dx, {"w": dw, "b": db}

    return AnyLayer({"w": rng.normal(size=(n, m)), "b": np.zeros(m)}, lambda x, p: (ops.linear(x, p["w"], p["b"]), x),
                    backward)


rng = np.random.default_rng(0)
layers = [linear_layer(8, 4), linear_layer(4, 16), linear_layer(16, 4)]
xs = list(rng.normal(size=(4, 2, 8)))
outputs = {}
for name, n in ("DDP", 1), ("FSDP", 4), ("hybrid", 2):
    model = FullySharded([[layer] for layer in layers], d=4, n=n)
    ys, caches = model.forward(xs)
    model.backward(ys, caches)                            # of the loss sum(y * y) / 2
    model.descend(lr=0.01)
    outputs[name] = np.stack(model.forward(xs)[0])
    print(f"{name:6} a rank keeps {sum(unit.shards[0].size for unit in model.units):3} parameters")

assert sum(unit.shards[0].size for unit in model.units) == 92       # the hybrid's: half of 184
print("after a step all three give the same outputs:", all(np.allclose(x, outputs["DDP"]) for x in outputs.values()))

# %% [markdown]
# ### Even less: offloading
#
# A shard need not be on the device. A GPU's own memory is small and fast, the host's is large and slow, and Adam needs
# each element once per step. With `cpu_offload` a rank's shard is *offloaded* and copied back piece by piece. Only the
# gradients stay on the device. (Our ranks have no GPU. They offload to another buffer, or to a file, with the same
# rules.)

# %%
# %%ranks 4
offloaded = train(3, offload=True)
held = offloaded["held"]
print(f"on the device: {sum(held[:3]):,} bytes; offloaded: {held.offloaded:,} bytes;",
      f"same losses: {np.allclose(offloaded['losses'], stages[3]['losses'], rtol=1e-12, atol=0)}")

# %% [markdown]
# ## An optimizer that needs whole matrices
#
# Adam looks at one element at a time, so a part of the buffer may end in the middle of a row. Jordan's Muon does
# not: it *orthogonalizes* the momentum $X = U S V^T$ of each matrix, to about $U V^T$, so that all directions in which
# gradients point get the same step. Five rounds of a polynomial do it, without $U$ and $V$: with $A = X X^T$, $X
# \leftarrow a X + (b A + c A^2) X$. What happens if two ranks each orthogonalize a half?

# %%
from reference.muon import newton_schulz

x = np.random.default_rng(0).normal(size=(4, 16)) * [[1], [0.3], [0.1], [0.05]]
halves = np.concatenate([newton_schulz(half, 5) for half in np.split(x, 2, 1)], 1)
for name, y in ("the momentum", x / np.linalg.norm(x)), ("orthogonalized", newton_schulz(x, 5)), ("by halves", halves):
    print(f"{name:15} singular values {np.linalg.svd(y)[1].round(2)}")

# %% [markdown]
# Halves make another update, with singular values up to 1.53, and thirds would make a third one. So in ZeRO-1 with Muon
# each matrix has one owner, which has all of it. Owners should have about as much to *compute*: the costliest matrix is
# dealt out first, each to the owner with the least to compute so far. Adam's tensors are sharded as before. Here are
# the owners in a GPT of three layers, on two replicas:

# %%
from reference.muon import multiplications
from reference.parallel.layout import Layout
from reference.models.gpt import gpt_tensors

layout = Layout(gpt_tensors(tiny_gpt(3)), parts=2, whole_matrices=True)
for replica in range(2):
    owned = [piece.of for piece in layout.pieces(replica) if piece.of.matrix]
    print(f"replica {replica}: {sum(multiplications(one.tensor) for one in owned):6,} multiplications a round:",
          *(one.name.removeprefix("blocks.") for one in owned))

# %% [markdown]
# A matrix that ranks share by tensor parallelism is gathered by all of them, or $A$ is summed over them in every round.
#
# On real ranks: the same losses at stages 0 and 1, and in one process. Muon has a momentum and no second moment: of
# each element of a matrix 8 bytes less.

# %%
# %%ranks 4
from dataclasses import replace

muon = [train(stage, optimizer=replace(OPTIMIZER, optimizer="muon")) for stage in range(2)]

# %%
from dataclasses import replace

textbook = textbook_of(tiny_gpt(2), replace(OPTIMIZER, optimizer="muon"))
losses = [textbook.step(GPTBatch(*global_batch(step, 4)))[0] for step in range(8)]
for stage in range(2):
    same = all(np.allclose(everyone[stage]["losses"], losses, rtol=1e-11, atol=0) for everyone in ranks["muon"])
    adam, found = ranks["stages"][0][stage], ranks["muon"][0][stage]
    print(f"stage {stage}: same losses {same}; optimizer states {found['held'].optimizer:,} bytes, with Adam "
          f"{adam['held'].optimizer:,}; sent, of Ψ(d-1)/d: {found['sent'] / (found['psi'] * 3 / 4):.2f}")

# %% [markdown]
# ## What to take away
#
# With $w$, $g$ and $K$ bytes for a parameter, its gradient and its optimizer states:
#
# | stage | a rank holds | and sends, of $\Psi\frac{d-1}{d}$ | 7.5 billion, $d = 64$ |
# |---|---|---|---|
# | 0 | $(w + g + K)\,\Psi$ | 2 | 120 GB |
# | 1 | $(w + g)\,\Psi + K\Psi/d$ | 2 | 31.4 GB |
# | 2 | $w\,\Psi + (g + K)\,\Psi/d$ | $m + 1$ | 16.6 GB |
# | 3 | $(w + g + K)\,\Psi/d$ | $3m$ | 1.88 GB |
#
# - Divide by the weight of the global batch, then only add. An average of averages is wrong as soon as the replicas'
#   weights differ.
# - An all-reduce is a reduce-scatter and an all-gather. Stage 1 lets the optimizer work between the two, for free.
# - Stages 2 and 3 pay for every microbatch, so they are best with few and large ones. A pipeline needs many
#   (walkthrough 9): stage 1 suits it best.
# - No stage changes what is computed: same losses, same weights.
# - How an optimizer can be sharded depends on what its update needs to see: Adam's an element, Muon's a matrix.
#
# ## Try it
#
# 1. Let the replicas begin from different weights: give `initialize` the seed `SEED + rank` in the cell on ranks. Which
#    check fails? After the sum all ranks have the same gradient. Why do the replicas still never come together?
# 2. Set `counts` to `[6, 6, 6, 6]`. How large is the error of the wrong way now? Then `[3, 3, 3, 3]`?
# 3. Gradients are clipped by their *norm*, the root of the sum of all squares. At stage 1 a rank has a part of the
#    gradients only. What must be sent, and how much is it? (Look for "gradient norm" in the ledger.)
# 4. Change `bucket_size` in the picture of the flat buffer to 1, and to 10,000. What is good about each?
#
# Next: [11. Precision](11_precision.ipynb). The demo for this walkthrough:
# `python -m mpi_impl.launch -n 4 -m mpi_impl.demos.zero`.
